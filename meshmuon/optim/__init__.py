"""What users touch: the optimizer, its parameter groups and its learning-rate rules."""

from .dist_muon import DistMuon
from .muon import Muon
from .routing import get_default_muon_param_groups
from .table import RoutingRow, RoutingTable

__all__ = ["DistMuon", "Muon", "RoutingRow", "RoutingTable", "get_default_muon_param_groups"]
