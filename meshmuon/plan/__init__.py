"""What will be computed and what will travel, decided before any tensor is touched."""

from .batches import Batch, BatchItem, ItemRange, plan_batches
from .buffers import SlotSizes, WaveSizes, buffer_bytes, slot_sizes, wave_sizes
from .cost import CostModel, cost_model_for
from .owners import lightest_possible
from .plan import NO_WAVE, REPLICA_OPTIONS, Plan, PlannedParam, PlanOptions, Send, Task, make_plan
from .report import table
from .routes import WaveRoutes, routes_of

__all__ = [
    "NO_WAVE",
    "REPLICA_OPTIONS",
    "Batch",
    "BatchItem",
    "CostModel",
    "ItemRange",
    "Plan",
    "PlanOptions",
    "PlannedParam",
    "Send",
    "SlotSizes",
    "Task",
    "WaveRoutes",
    "WaveSizes",
    "buffer_bytes",
    "cost_model_for",
    "lightest_possible",
    "make_plan",
    "plan_batches",
    "routes_of",
    "slot_sizes",
    "table",
    "wave_sizes",
]
