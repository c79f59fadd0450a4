"""What will be computed, decided before any tensor is touched."""

from .batches import Batch, Item, Slice, plan_batches

__all__ = ["Batch", "Item", "Slice", "plan_batches"]
