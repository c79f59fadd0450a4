"""Meshes by the usual names of their axes, with ranks in the order in which torchtitan lays them out.

From the outermost axis to the innermost: pp, dp_replicate, dp_shard, cp, tp. FSDP cuts over dp_shard and cp together. Experts
see the same ranks as dp_replicate, efsdp, ep: expert parallelism borrows its ranks from dp_shard × cp × tp, and FSDP cuts experts
over the rest of these.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

from ...errors import ConfigError
from ...layout import Mesh
from .words import did_you_mean, divisors, nearest

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
MOST_RANKS = 2**20  # a plan keeps numbers for each of them
_EXAMPLE = 'such as --mesh "dp_replicate=2,dp_shard=32,tp=8"'


@dataclass(frozen=True)
class MeshAxes:
    """Sizes of the axes. ``ep`` does not multiply the ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def parse(cls, text: str, ranks: int | None = None) -> MeshAxes:
        """The axes in ``text``, such as ``"dp_shard=64,tp=8"``. ``dp_shard=-1`` takes the ranks that the others leave."""
        sizes: dict[str, int] = {}
        for item in filter(None, re.split(r"[,\s]+", text.strip())):
            name, _, value = item.partition("=")
            if name not in AXES:
                raise ConfigError(
                    f"mesh {text!r}: the axis {name!r} is unknown.{did_you_mean(name, AXES)} Write some of {', '.join(AXES)}, "
                    f"{_EXAMPLE}."
                )
            if name in sizes:
                raise ConfigError(f"mesh {text!r}: the axis {name} is there twice. Write it once.")
            number = int(value) if re.fullmatch(r"-?\d{1,18}", value) else 0
            if number < 1 and not (name == "dp_shard" and number == -1):
                raise ConfigError(
                    f"mesh {text!r}: {name}={value} must be a whole number of at least 1 and at most {MOST_RANKS}, {_EXAMPLE}."
                )
            sizes[name] = number
        if not sizes:
            raise ConfigError(f"mesh {text!r} names no axis. Write one, {_EXAMPLE}.")
        if sizes.get("dp_shard") == -1:
            sizes["dp_shard"] = cls._remaining(text, sizes, ranks)
        axes = cls(**sizes)
        axes._check(text, ranks)
        return axes

    @staticmethod
    def _remaining(text: str, sizes: dict[str, int], ranks: int | None) -> int:
        others = math.prod(size for name, size in sizes.items() if name not in ("dp_shard", "ep"))
        if ranks is None or ranks % others:
            have = (
                "the number of ranks is not known: add --nodes" if ranks is None else f"{ranks} ranks do not divide by {others}"
            )
            raise ConfigError(f"mesh {text!r}: dp_shard=-1 cannot be resolved, because {have}. Write its size.")
        return ranks // others

    def _check(self, text: str, ranks: int | None) -> None:
        if self.ranks > MOST_RANKS:
            raise ConfigError(f"mesh {text!r}: its axes multiply to {self.ranks} ranks. A plan has at most {MOST_RANKS}.")
        if ranks is not None and self.ranks != ranks:
            others = self.ranks // self.dp_shard
            fix = f"write dp_shard={ranks // others}" if ranks % others == 0 else "choose axes that multiply to it"
            raise ConfigError(
                f"mesh {text!r}: its axes multiply to {self.ranks} ranks, but --nodes gives {ranks}: {fix}, or change --nodes."
            )
        borrowed = self.dp_shard * self.cp * self.tp
        if borrowed % self.ep:
            raise ConfigError(
                f"mesh {text!r}: ep={self.ep} takes its ranks from dp_shard × cp × tp = {borrowed}, which it does not divide. "
                f"Write ep={nearest(divisors(borrowed), self.ep)}."
            )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.pp * self.ranks_per_stage

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of a pipeline stage."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def fsdp(self) -> int:
        """Over how many ranks FSDP cuts what is no expert."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Over how many ranks FSDP cuts experts under expert parallelism."""
        return self.fsdp * self.tp // self.ep

    def __str__(self) -> str:
        sizes = ((name, getattr(self, name)) for name in AXES)
        return ",".join(f"{name}={size}" for name, size in sizes if size > 1) or "dp_shard=1"

    def with_axis(self, **sizes: int) -> MeshAxes:
        """The same mesh with other sizes of some axes."""
        return replace(self, **sizes)

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """All axes by name."""
        return {name: getattr(self, name) for name in AXES}

    def dense(self, stage: int) -> Mesh:
        """The mesh of what is no expert: dp_replicate and tp where they are used, and FSDP's axis always."""
        return self._mesh(stage, self.dense_shape)

    def sparse(self, stage: int) -> Mesh:
        """The mesh of experts under expert parallelism."""
        return self._mesh(stage, (*self._replicas, self.efsdp, self.ep))

    @property
    def dense_shape(self) -> tuple[int, ...]:
        """The shape of ``dense``."""
        return (*self._replicas, self.fsdp, *((self.tp,) if self.tp > 1 else ()))

    @property
    def _replicas(self) -> tuple[int, ...]:
        return (self.dp_replicate,) if self.dp_replicate > 1 else ()

    def _mesh(self, stage: int, shape: tuple[int, ...]) -> Mesh:
        first = stage * self.ranks_per_stage
        return Mesh(shape, tuple(range(first, first + self.ranks_per_stage)))
