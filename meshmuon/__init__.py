"""meshmuon: the Muon optimizer for any device mesh."""

from .clipping.grad_norm import clip_grad_norm_, total_grad_norm
from .errors import (
    CheckpointError,
    ConfigError,
    GradientError,
    InactiveWarning,
    MeshmuonError,
    PlanError,
    PlanMismatchError,
    RoutingWarning,
    StateError,
    TransportError,
    UnsupportedError,
    UntestedTorchWarning,
)
from .matrices import Interleaved
from .optim import DistMuon, Muon
from .ortho import Scheme, Workspace, halley, hybrid, keller, orthogonalize, polar_express, zolotarev
from .params.rules import MuonEq, MuonPlus, NorMuon, UpdateRule
from .plan import CostModel, Plan
from .qk_clip.max_logits import MaxLogits
from .routing.param_groups import get_default_muon_param_groups
from .routing.table import RoutingRow, RoutingTable

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CostModel",
    "DistMuon",
    "GradientError",
    "InactiveWarning",
    "Interleaved",
    "MaxLogits",
    "MeshmuonError",
    "Muon",
    "MuonEq",
    "MuonPlus",
    "NorMuon",
    "Plan",
    "PlanError",
    "PlanMismatchError",
    "RoutingRow",
    "RoutingTable",
    "RoutingWarning",
    "Scheme",
    "StateError",
    "TransportError",
    "UnsupportedError",
    "UntestedTorchWarning",
    "UpdateRule",
    "Workspace",
    "clip_grad_norm_",
    "get_default_muon_param_groups",
    "halley",
    "hybrid",
    "keller",
    "orthogonalize",
    "polar_express",
    "total_grad_norm",
    "zolotarev",
]
