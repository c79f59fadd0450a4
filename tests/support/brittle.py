"""An update rule that makes single updates infinite, as rare overflows of products in 16 bits do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshmuon import NorMuon

TOO_LARGE = 1e6
"""The update of a matrix is infinite if an element of its momentum is larger than this."""


class Brittle:
    """NorMuon with one infinite element in such updates. It belongs to one rank; it reads nothing to the host."""

    def __init__(self) -> None:
        self._large: list[Tensor] = []  # batch by batch, between ``before`` and ``after``

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))

    def remembers(self) -> bool:
        return True

    def before(self, momentum: Tensor) -> None:
        self._large.append(momentum.abs().amax((1, 2)) > TOO_LARGE)

    def after(self, update: Tensor, memory: Tensor | None) -> None:
        NorMuon().after(update, memory)
        corner = update[:, -1, -1]
        corner.copy_(torch.where(self._large.pop(0), math.inf, corner))


class TrustedBrittle(Brittle):
    """The same as if it were the library's, which does not expect its own rules to raise."""

    __module__ = "meshmuon.support"


RULES = (Brittle, TrustedBrittle)
