"""meshmuon: the Muon optimizer for any device mesh."""

from .errors import (
    CheckpointError,
    ConfigError,
    GradientError,
    MeshmuonError,
    PlanError,
    PlanMismatchError,
    RoutingWarning,
    StateError,
    TransportError,
    UnsupportedError,
    UntestedTorchWarning,
)
from .optim import (
    DistMuon,
    MaxLogits,
    Muon,
    MuonEq,
    MuonPlus,
    NorMuon,
    RoutingRow,
    RoutingTable,
    UpdateRule,
    clip_grad_norm_,
    get_default_muon_param_groups,
    total_grad_norm,
)
from .ortho import Scheme, Workspace, halley, keller, orthogonalize, polar_express, zolotarev
from .plan import Plan

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DistMuon",
    "GradientError",
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
    "keller",
    "orthogonalize",
    "polar_express",
    "total_grad_norm",
    "zolotarev",
]
