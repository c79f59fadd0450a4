"""Who computes which matrix and what travels, decided from shapes and layouts alone."""

from .calibration import Calibration, CostModelLike, LinkRate, Rate, cost_model_from
from .choice import choose_plan
from .cost import CostModel, cost_model_for
from .machines import Machine, machine_like
from .nodes import Nodes
from .plan import Plan, make_plan
from .plan_data import PlanData, add_local_costs
from .relays import HopRoutes, Hops, Parcel, Relays, WaveHops
from .report import bytes_text, counted, how_computed, table
from .routes import WaveRoutes, WaveSizes, rank_routes, routes_of, slot_sizes, wave_sizes
from .schedule import Action, Batch, BatchItem, ItemRange, gradient_read_order, most_gathered_ahead, pipeline_order, plan_batches
from .tasks import (
    DEFAULT_IN_FLIGHT,
    DEFAULT_MAX_PEERS,
    EVERY_HOLDER,
    NO_WAVE,
    REPLICA_OPTIONS,
    PartIndex,
    PieceTransfer,
    PlannedParam,
    PlanOptions,
    Replicas,
    Task,
)
from .wire import BLOCK, BY_OWNER, INT8, SCALE_BYTES, Wire, blocks_touched, bytes_of, cuts_blocks, cuts_blocks_of

__all__ = [
    "BLOCK",
    "BY_OWNER",
    "DEFAULT_IN_FLIGHT",
    "DEFAULT_MAX_PEERS",
    "EVERY_HOLDER",
    "INT8",
    "NO_WAVE",
    "REPLICA_OPTIONS",
    "SCALE_BYTES",
    "Action",
    "Batch",
    "BatchItem",
    "Calibration",
    "CostModel",
    "CostModelLike",
    "HopRoutes",
    "Hops",
    "ItemRange",
    "LinkRate",
    "Machine",
    "Nodes",
    "Parcel",
    "PartIndex",
    "PieceTransfer",
    "Plan",
    "PlanData",
    "PlanOptions",
    "PlannedParam",
    "Rate",
    "Relays",
    "Replicas",
    "Task",
    "WaveHops",
    "WaveRoutes",
    "WaveSizes",
    "Wire",
    "add_local_costs",
    "blocks_touched",
    "bytes_of",
    "bytes_text",
    "choose_plan",
    "cost_model_for",
    "cost_model_from",
    "counted",
    "cuts_blocks",
    "cuts_blocks_of",
    "gradient_read_order",
    "how_computed",
    "machine_like",
    "make_plan",
    "most_gathered_ahead",
    "pipeline_order",
    "plan_batches",
    "rank_routes",
    "routes_of",
    "slot_sizes",
    "table",
    "wave_sizes",
]
