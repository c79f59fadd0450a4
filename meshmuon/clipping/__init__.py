"""Clipping gradients by their norm over all ranks."""
