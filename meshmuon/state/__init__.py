"""The optimizer's state of each parameter: creating, checking, saving and restoring it."""
