"""What will be computed and what will travel, decided before any tensor is touched."""

from .batches import Batch, Item, Slice, plan_batches
from .cost import CostModel, cost_model_for
from .owners import lightest_possible
from .plan import REPLICA_OPTIONS, Entry, Plan, PlanOptions, Send, Task, make_plan
from .routes import WaveRoutes, routes_of

__all__ = [
    "REPLICA_OPTIONS",
    "Batch",
    "CostModel",
    "Entry",
    "Item",
    "Plan",
    "PlanOptions",
    "Send",
    "Slice",
    "Task",
    "WaveRoutes",
    "cost_model_for",
    "lightest_possible",
    "make_plan",
    "plan_batches",
    "routes_of",
]
