"""Predicted time of a step, on measured or described machines."""
