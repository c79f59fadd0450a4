"""How each parameter lies on the ranks: over the usual axes of a mesh, as torchtitan shards it, or as a file says.

From the outermost axis to the innermost: pp, dp_replicate, dp_shard, cp, tp. FSDP cuts over dp_shard and cp together.
Experts see the same ranks as dp_replicate, efsdp, ep: expert parallelism borrows its ranks from dp_shard × cp × tp, and
FSDP cuts experts over the rest of these.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from ...errors import ConfigError
from ...layout import Mesh, Placement, Replicated, Sharded
from .description import ModelDescription, ModelParam
from .inputs import did_you_mean, divisors, nearest, read_file

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
_MOST_RANKS = 2**20  # a plan keeps numbers for each of them
_MOST_RANK_NUMBERS = 2**31
_EXAMPLE = 'such as --mesh "dp_replicate=2,dp_shard=32,tp=8"'
_EXAMPLE_FILE = (
    '{"meshes": {"main": {"shape": [2, 4]}}, "params": {"*": {"mesh": "main", "placements": ["R", "S(0)"]}}}'
)


@dataclass(frozen=True, slots=True)
class PlacedParam:
    """A parameter on a mesh."""

    param: ModelParam
    mesh: Mesh
    placements: tuple[Placement, ...]


class Sharding(Protocol):
    """Where the parameters of a model are. As text it is what reports call it."""

    def stages(self, model: ModelDescription) -> Iterator[list[PlacedParam]]:
        """The parameters of each pipeline stage; raises ``ConfigError`` if the model does not fit."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""


@dataclass(frozen=True)
class MeshAxes:
    """Sizes of the axes. ``ep`` does not multiply the ranks.

    Tensor parallelism cuts by the model's plan, expert parallelism along the experts, then FSDP2 as torchtitan applies
    it: along the first dim, or along the rows of experts where there are more shards than experts.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def parse(cls, text: str, ranks: int | None = None) -> MeshAxes:
        """The axes in ``text``, such as ``"dp_shard=64,tp=8"``. ``dp_shard=-1`` takes the ranks that the others
        leave.
        """
        sizes: dict[str, int] = {}
        for item in filter(None, re.split(r"[,\s]+", text.strip())):
            name, _, value = item.partition("=")
            if name not in AXES:
                raise ConfigError(
                    f"mesh {text!r}: the axis {name!r} is unknown.{did_you_mean(name, AXES)} Write some of "
                    f"{', '.join(AXES)}, {_EXAMPLE}."
                )
            if name in sizes:
                raise ConfigError(f"mesh {text!r}: the axis {name} is there twice. Write it once.")
            number = int(value) if re.fullmatch(r"-?\d{1,18}", value) else 0
            if number < 1 and not (name == "dp_shard" and number == -1):
                raise ConfigError(
                    f"mesh {text!r}: {name}={value} must be a whole number of at least 1 and at most {_MOST_RANKS}, "
                    f"{_EXAMPLE}."
                )
            sizes[name] = number
        if not sizes:
            raise ConfigError(f"mesh {text!r} names no axis. Write one, {_EXAMPLE}.")
        if sizes.get("dp_shard") == -1:
            others = math.prod(size for name, size in sizes.items() if name not in ("dp_shard", "ep"))
            if ranks is None or ranks % others:
                unknown = "the number of ranks is not known: add --nodes"
                reason = unknown if ranks is None else f"{ranks} ranks do not divide by {others}"
                raise ConfigError(f"mesh {text!r}: dp_shard=-1 cannot be resolved, because {reason}. Write its size.")
            sizes["dp_shard"] = ranks // others
        axes = cls(**sizes)
        axes._check(text, ranks)
        return axes

    def _check(self, text: str, ranks: int | None) -> None:
        if self.ranks > _MOST_RANKS:
            raise ConfigError(
                f"mesh {text!r}: its axes multiply to {self.ranks} ranks. A plan has at most {_MOST_RANKS}."
            )
        if ranks is not None and self.ranks != ranks:
            others = self.ranks // self.dp_shard
            fix = f"write dp_shard={ranks // others}" if ranks % others == 0 else "choose axes that multiply to it"
            raise ConfigError(
                f"mesh {text!r}: its axes multiply to {self.ranks} ranks, but --nodes gives {ranks}: {fix}, or change "
                "--nodes."
            )
        borrowed = self.fsdp * self.tp
        if borrowed % self.ep:
            raise ConfigError(
                f"mesh {text!r}: ep={self.ep} takes its ranks from dp_shard × cp × tp = {borrowed}, which it does not "
                f"divide. Write ep={nearest(divisors(borrowed), self.ep)}."
            )

    def __str__(self) -> str:
        sizes = ((name, getattr(self, name)) for name in AXES)
        return ",".join(f"{name}={size}" for name, size in sizes if size > 1) or "dp_shard=1"

    @property
    def ranks(self) -> int:
        return self.pp * self.dp_replicate * self.fsdp * self.tp

    @property
    def fsdp(self) -> int:
        """Number of ranks over which FSDP cuts what is no expert."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Number of ranks over which FSDP cuts experts under expert parallelism."""
        return self.fsdp * self.tp // self.ep

    def meshes(self, stage: int) -> tuple[Mesh, Mesh]:
        """The mesh of a stage for what is no expert, with FSDP's axis always; and that of experts under expert
        parallelism.
        """
        count = self.ranks // self.pp
        ranks = tuple(range(stage * count, (stage + 1) * count))
        replicas = (self.dp_replicate,) if self.dp_replicate > 1 else ()
        dense = (*replicas, self.fsdp, *((self.tp,) if self.tp > 1 else ()))
        return Mesh(dense, ranks), Mesh((*replicas, self.efsdp, self.ep), ranks)

    def stages(self, model: ModelDescription) -> Iterator[list[PlacedParam]]:
        self._check_model(model)
        for stage, params in enumerate(split_into_stages(model, self.pp)):
            dense, sparse = self.meshes(stage)
            yield [self._placed(param, dense, sparse, model.experts) for param in params]

    def _check_model(self, model: ModelDescription) -> None:
        experts = model.experts
        if self.ep > 1 and not experts:
            raise ConfigError(f"mesh {self}: {model.name} has no experts. Leave out ep.")
        if self.ep > 1 and experts % self.ep:
            fitting = [ep for ep in divisors(experts) if self.fsdp * self.tp % ep == 0]
            raise ConfigError(
                f"mesh {self}: the {experts} experts of {model.name} do not divide by ep={self.ep}. Write ep="
                f"{nearest(fitting, self.ep)}, or describe an uneven layout with --layout FILE."
            )
        if self.tp > 1 and not model.has_tp_plan:
            raise ConfigError(
                f"mesh {self}: there is no tensor-parallel plan for {model.name}. Leave out tp, or describe the "
                "layout with --layout FILE."
            )
        if self.pp > max(1, model.layers):
            raise ConfigError(
                f"mesh {self}: {model.name} has {model.layers} layers. Write pp={max(1, model.layers)} or less."
            )

    def _placed(self, param: ModelParam, dense: Mesh, sparse: Mesh, experts: int) -> PlacedParam:
        replicas: tuple[Placement, ...] = (Replicated(),) if self.dp_replicate > 1 else ()
        if param.expert and self.ep > 1:
            dim = 1 if self.efsdp * self.ep > experts else 0
            self._check_fsdp(param, dim, param.shape[dim], self.efsdp)
            return PlacedParam(param, sparse, (*replicas, Sharded(dim, self.ep if dim == 0 else 1), Sharded(0)))
        dim = 1 if param.expert and self.fsdp > experts else 0
        inner = tp_placement(param, self.tp) if self.tp > 1 else None
        if isinstance(inner, Sharded) and inner.split_factor > 1 and inner.dim == dim:
            raise ConfigError(
                f"mesh {self}: tensor parallelism cuts both halves of the fused {param.name} {param.shape}, and FSDP "
                f"would cut the same dim {dim} again, which no placement describes. Use ep={self.tp} instead of tp "
                f"for the experts, or fewer shards than the {experts} experts."
            )
        cut = self.tp if isinstance(inner, Sharded) and inner.dim == dim else 1
        self._check_fsdp(param, dim, param.shape[dim] // cut if param.shape else 0, self.fsdp)
        return PlacedParam(param, dense, (*replicas, Sharded(dim, cut), *(() if inner is None else (inner,))))

    def _check_fsdp(self, param: ModelParam, dim: int, size: int, shards: int) -> None:
        if not param.shape:
            raise ConfigError(f"{param.name} has no dims, and FSDP2 refuses scalars. Give it the shape (1,).")
        if dim > 0 and size % shards:
            raise ConfigError(
                f"mesh {self}: FSDP2 cuts {param.name} {param.shape} along dim {dim}, because there are more shards "
                f"than experts, and refuses {size} rows over {shards} shards, which do not divide. Choose ep, "
                f"dp_shard and cp so that experts are cut over {nearest(divisors(size), shards)} ranks."
            )


def tp_placement(param: ModelParam, tp: int) -> Placement:
    """How tensor parallelism cuts a parameter."""
    if param.tp == "replicate":
        return Replicated()
    flipped = param.matrices is not None and param.matrices.dims == "in_out"
    stacked = 1 if param.expert else 0
    outputs = stacked if len(param.shape) - stacked < 2 else stacked + (1 if flipped else 0)
    inputs = stacked + (0 if flipped else 1)
    dim = inputs if param.tp == "rowwise" else outputs
    parts = 2 if param.tp == "packed_colwise" else 1
    if param.shape[dim] % (tp * parts):
        fitting = divisors(param.shape[dim] // parts)
        raise ConfigError(
            f"{param.name} {param.shape} is cut {param.tp} along dim {dim}, whose size does not divide by tp={tp}. "
            f"Write tp={nearest(fitting, tp)}."
        )
    return Sharded(dim, parts)


def split_into_stages(model: ModelDescription, stages: int) -> list[list[ModelParam]]:
    """Consecutive layers for each pipeline stage. What is before the layers counts as one layer, and so does what
    is after.
    """
    if stages == 1:
        return [list(model.params)]
    inside = [k for k, param in enumerate(model.params) if param.layer is not None]
    slots = model.layers + 2
    edges = [slots * stage // stages for stage in range(stages + 1)]
    parts: list[list[ModelParam]] = [[] for _ in range(stages)]
    for k, param in enumerate(model.params):
        slot = param.layer + 1 if param.layer is not None else (0 if k < inside[0] else slots - 1)
        parts[next(stage for stage in range(stages) if slot < edges[stage + 1])].append(param)
    return parts


@dataclass(frozen=True)
class FileSharding:
    """Any layout, from a JSON file with ``meshes`` by name and ``params``: patterns of names, each with a mesh and
    placements.

    Placements are ``"R"``, ``"S(dim)"`` and ``"S(dim, stride k)"``. The first pattern that matches a name counts.
    """

    meshes: Mapping[str, Mesh]
    rules: tuple[tuple[str, str, tuple[Placement, ...]], ...]  # pattern, name of the mesh, placements
    path: Path

    def __str__(self) -> str:
        return f"the layout of {self.path.name}"

    @property
    def ranks(self) -> int:
        return len({rank for mesh in self.meshes.values() for rank in mesh.ranks})

    def stages(self, model: ModelDescription) -> Iterator[list[PlacedParam]]:
        placed = []
        for param in model.params:
            rule = next((rule for rule in self.rules if fnmatchcase(param.name, rule[0])), None)
            if rule is None:
                raise ConfigError(f'--layout {self.path}: no pattern matches {param.name}. Add one, or "*" at the end.')
            pattern, mesh, placements = rule
            if any(isinstance(place, Sharded) and place.dim >= len(param.shape) for place in placements):
                raise ConfigError(
                    f"--layout {self.path}: {pattern} shards a dim that {param.name} {param.shape} does not have. "
                    "Write a separate pattern for it before this one."
                )
            placed.append(PlacedParam(param, self.meshes[mesh], placements))
        yield placed

    @classmethod
    def load(cls, path: Path) -> FileSharding:
        def parse(text: str) -> FileSharding:
            content = json.loads(text)
            meshes = {name: _read_mesh(row) for name, row in content["meshes"].items()}
            rules = tuple(_read_rule(pattern, row, meshes) for pattern, row in content["params"].items())
            return cls(meshes, rules, path)

        return read_file(f"--layout {path}", path, parse, "cannot be understood", f" Write {_EXAMPLE_FILE}.")


def _read_mesh(row: Mapping[str, Any]) -> Mesh:
    shape = tuple(int(size) for size in row["shape"])
    if not shape or min(shape) < 1 or math.prod(shape) > _MOST_RANKS:
        raise ConfigError(
            f"a mesh cannot have the shape {list(shape)}: write sizes from 1 that multiply to {_MOST_RANKS} at most."
        )
    ranks = tuple(int(rank) for rank in row.get("ranks", range(math.prod(shape))))
    if not all(0 <= rank < _MOST_RANK_NUMBERS for rank in ranks):
        raise ConfigError(
            f"the ranks of the mesh {list(shape)} are not all from 0 to {_MOST_RANK_NUMBERS - 1}: write their numbers."
        )
    return Mesh(shape, ranks)


def _read_rule(
    pattern: str, row: Mapping[str, Any], meshes: Mapping[str, Mesh]
) -> tuple[str, str, tuple[Placement, ...]]:
    mesh = row["mesh"]
    if mesh not in meshes:
        raise ConfigError(
            f"{pattern}: the mesh {mesh!r} is unknown.{did_you_mean(mesh, meshes)} Name one of {', '.join(meshes)}."
        )
    placements = tuple(map(_read_placement, row["placements"]))
    if len(placements) != len(meshes[mesh].shape):
        raise ConfigError(
            f"{pattern}: {len(placements)} placements for the mesh {mesh} of {len(meshes[mesh].shape)} axes. Write "
            "one per axis."
        )
    return pattern, mesh, placements


def _read_placement(text: str) -> Placement:
    if text == "R":
        return Replicated()
    match = re.fullmatch(r"S\((\d+)(?:, *stride (\d+))?\)", text)
    if match is None:
        raise ConfigError(f'the placement {text!r} is unknown; write "R", "S(0)" or "S(0, stride 8)".')
    if not 1 <= int(match[2] or 1) <= _MOST_RANKS:
        raise ConfigError(f"the placement {text[:120]!r} has no possible stride: write one from 1 to {_MOST_RANKS}.")
    return Sharded(int(match[1]), int(match[2] or 1))
