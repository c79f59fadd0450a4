"""What the optimizer keeps of each parameter: creating, checking, storing and restoring it."""
