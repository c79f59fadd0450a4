"""Who computes which matrix and what travels, decided from shapes and layouts alone."""

from .batches import Batch, BatchItem, ItemRange, plan_batches
from .buffer_sizes import WaveSizes, slot_sizes, wave_sizes
from .calibration import Calibration, CostModelLike, cost_model_from
from .cost import CostModel, cost_model_for
from .nodes import Crossings, Nodes
from .owners import lightest_possible
from .plan import Plan, make_plan
from .plan_data import DEFAULT_MAX_PEERS, REPLICA_OPTIONS, PlanOptions, add_local_costs
from .prediction import Prediction, predict
from .rates import Elementwise, Link, Rate, rate_at
from .relay_bytes import Hops, WaveHops
from .relays import HopRoutes, Parcel, Relays
from .report import how_computed, table
from .routes import WaveRoutes, rank_routes, routes_of
from .tasks import EVERY_HOLDER, NO_WAVE, PieceTransfer, PlannedParam, Task
from .timeline import Span, StepSeconds, Timeline, WaveSeconds, timeline_of
from .trace import trace_events, write_trace
from .traffic import ExchangeBytes, WaveTraffic

__all__ = [
    "DEFAULT_MAX_PEERS",
    "EVERY_HOLDER",
    "NO_WAVE",
    "REPLICA_OPTIONS",
    "Batch",
    "BatchItem",
    "Calibration",
    "CostModel",
    "CostModelLike",
    "Crossings",
    "Elementwise",
    "ExchangeBytes",
    "HopRoutes",
    "Hops",
    "ItemRange",
    "Link",
    "Nodes",
    "Parcel",
    "PieceTransfer",
    "Plan",
    "PlanOptions",
    "PlannedParam",
    "Prediction",
    "Rate",
    "Relays",
    "Span",
    "StepSeconds",
    "Task",
    "Timeline",
    "WaveHops",
    "WaveRoutes",
    "WaveSeconds",
    "WaveSizes",
    "WaveTraffic",
    "add_local_costs",
    "cost_model_for",
    "cost_model_from",
    "how_computed",
    "lightest_possible",
    "make_plan",
    "plan_batches",
    "predict",
    "rank_routes",
    "rate_at",
    "routes_of",
    "slot_sizes",
    "table",
    "timeline_of",
    "trace_events",
    "wave_sizes",
    "write_trace",
]
