"""What users touch: optimizers, default param groups, the routing table, update rules, clipping and ``MaxLogits``."""

from ..clipping.grad_norm import clip_grad_norm_, total_grad_norm
from ..execute import UpdateRule
from ..params.rules import MuonEq, MuonPlus, NorMuon
from ..qk_clip.max_logits import MaxLogits
from ..routing.param_groups import get_default_muon_param_groups
from ..routing.table import RoutingRow, RoutingTable
from .dist_muon import DistMuon
from .muon import Muon

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
