"""Who computes which matrix and what travels, decided from shapes and layouts alone."""

from .cost import CostModel, cost_model_for
from .nodes import Nodes
from .plan import Plan, make_plan
from .plan_data import PlanData, add_local_costs
from .rates import CostModelLike, cost_model_from
from .report import bytes_text, counted, how_computed, table
from .routes import WaveRoutes, WaveSizes, rank_routes, routes_of, slot_sizes, wave_sizes
from .schedule import Action, Batch, BatchItem, gradient_read_order, most_gathered_ahead, pipeline_order, plan_batches
from .tasks import (
    DEFAULT_IN_FLIGHT,
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
from .wire import Wire
