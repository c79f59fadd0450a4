"""The optimizers."""

from .dist_muon import DistMuon
from .muon import Muon
from .torch_muon import TorchMuon

__all__ = ["DistMuon", "Muon", "TorchMuon"]
