"""What users touch: the optimizer, its parameter groups and its learning-rate rules."""

from .clipping import clip_grad_norm_, total_grad_norm
from .dist_muon import DistMuon
from .max_logits import MaxLogits
from .muon import Muon
from .routing import get_default_muon_param_groups
from .rules import MuonEq, MuonPlus, NorMuon, UpdateRule
from .table import RoutingRow, RoutingTable

__all__ = [
    "DistMuon",
    "MaxLogits",
    "Muon",
    "MuonEq",
    "MuonPlus",
    "NorMuon",
    "RoutingRow",
    "RoutingTable",
    "UpdateRule",
    "clip_grad_norm_",
    "get_default_muon_param_groups",
    "total_grad_norm",
]
