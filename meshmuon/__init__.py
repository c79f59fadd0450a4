"""meshmuon: the Muon optimizer for any device mesh."""

from .errors import (
    ConfigError,
    GradientError,
    MeshmuonError,
    PlanError,
    PlanMismatchError,
    RoutingWarning,
    StateError,
    UnsupportedError,
)
from .optim import DistMuon, Muon, RoutingRow, RoutingTable, get_default_muon_param_groups
from .ortho import Scheme, Workspace, keller, orthogonalize, polar_express
from .plan import Plan

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DistMuon",
    "GradientError",
    "MeshmuonError",
    "Muon",
    "Plan",
    "PlanError",
    "PlanMismatchError",
    "RoutingRow",
    "RoutingTable",
    "RoutingWarning",
    "Scheme",
    "StateError",
    "UnsupportedError",
    "Workspace",
    "get_default_muon_param_groups",
    "keller",
    "orthogonalize",
    "polar_express",
]
