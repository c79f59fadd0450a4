"""meshmuon: the Muon optimizer for any device mesh."""

from .errors import ConfigError, GradientError, MeshmuonError, RoutingWarning, StateError, UnsupportedError
from .optim import Muon, RoutingRow, RoutingTable, get_default_muon_param_groups
from .ortho import Scheme, Workspace, keller, orthogonalize, polar_express

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "GradientError",
    "MeshmuonError",
    "Muon",
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
