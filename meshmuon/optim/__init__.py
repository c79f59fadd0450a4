"""The optimizers."""

from .dist_muon import DistMuon
from .muon import Muon

__all__ = ["DistMuon", "Muon"]
