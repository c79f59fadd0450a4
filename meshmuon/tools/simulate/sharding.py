"""How each parameter lies on the mesh: as torchtitan shards it, or as a file says."""

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
from .meshes import MOST_RANKS, MeshAxes
from .words import did_you_mean, divisors, nearest

_MOST_RANK_NUMBERS = 2**31


@dataclass(frozen=True, slots=True)
class PlacedParam:
    """A parameter on a mesh."""

    param: ModelParam
    mesh: Mesh
    placements: tuple[Placement, ...]


class Sharding(Protocol):
    """Where the parameters of a model are."""

    def stages(self, model: ModelDescription) -> Iterator[list[PlacedParam]]:
        """The parameters of each pipeline stage; raises ``ConfigError`` if the model does not fit."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""

    @property
    def text(self) -> str:
        """What reports call it."""


@dataclass(frozen=True)
class MeshSharding:
    """Tensor parallelism by the model's plan, expert parallelism along the experts, then FSDP2 as torchtitan applies it.

    FSDP2 cuts along the first dim. Experts are cut along their rows where there are more shards than experts.
    """

    axes: MeshAxes

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.axes.ranks

    @property
    def text(self) -> str:
        """The axes."""
        return str(self.axes)

    def stages(self, model: ModelDescription) -> Iterator[list[PlacedParam]]:
        """The parameters of each pipeline stage."""
        self._check_model(model)
        for stage, params in enumerate(split_into_stages(model, self.axes.pp)):
            dense, sparse = self.axes.dense(stage), self.axes.sparse(stage)
            yield [self._placed(param, dense, sparse, model.experts) for param in params]

    def _check_model(self, model: ModelDescription) -> None:
        axes, experts = self.axes, model.experts
        if axes.ep > 1 and not experts:
            raise ConfigError(f"mesh {axes}: {model.name} has no experts. Leave out ep.")
        if axes.ep > 1 and experts % axes.ep:
            fitting = [ep for ep in divisors(experts) if axes.fsdp * axes.tp % ep == 0]
            raise ConfigError(
                f"mesh {axes}: the {experts} experts of {model.name} do not divide by ep={axes.ep}. Write ep="
                f"{nearest(fitting, axes.ep)}, or describe an uneven layout with --layout FILE."
            )
        if axes.tp > 1 and not model.has_tp_plan:
            raise ConfigError(
                f"mesh {axes}: nobody says how tensor parallelism cuts {model.name}. Leave out tp, or describe the layout with "
                "--layout FILE."
            )
        if axes.pp > max(1, model.layers):
            raise ConfigError(f"mesh {axes}: {model.name} has {model.layers} layers. Write pp={max(1, model.layers)} or less.")

    def _placed(self, param: ModelParam, dense: Mesh, sparse: Mesh, experts: int) -> PlacedParam:
        axes = self.axes
        replicas: tuple[Placement, ...] = (Replicated(),) if axes.dp_replicate > 1 else ()
        if param.expert and axes.ep > 1:
            dim = 1 if axes.efsdp * axes.ep > experts else 0
            self._check_fsdp(param, dim, param.shape[dim], axes.efsdp)
            return PlacedParam(param, sparse, (*replicas, Sharded(dim, axes.ep if dim == 0 else 1), Sharded(0)))
        dim = 1 if param.expert and axes.fsdp > experts else 0
        inner = tp_placement(param, axes.tp) if axes.tp > 1 else None
        if isinstance(inner, Sharded) and inner.split_factor > 1 and inner.dim == dim:
            raise ConfigError(
                f"mesh {axes}: tensor parallelism cuts both halves of the fused {param.name} {param.shape}, and FSDP would cut "
                f"the same dim {dim} again, which no placement describes. Use ep={axes.tp} instead of tp for the experts, or "
                f"fewer shards than the {experts} experts."
            )
        cut = axes.tp if isinstance(inner, Sharded) and inner.dim == dim else 1
        self._check_fsdp(param, dim, param.shape[dim] // cut if param.shape else 0, axes.fsdp)
        outer = Sharded(dim, cut)
        return PlacedParam(param, dense, (*replicas, outer, *(() if inner is None else (inner,))))

    def _check_fsdp(self, param: ModelParam, dim: int, size: int, shards: int) -> None:
        if not param.shape:
            raise ConfigError(f"{param.name} has no dims, and FSDP2 refuses scalars. Give it the shape (1,).")
        if dim > 0 and size % shards:
            raise ConfigError(
                f"mesh {self.axes}: FSDP2 cuts {param.name} {param.shape} along dim {dim}, because there are more shards than "
                f"experts, and refuses {size} rows over {shards} shards, which do not divide. Choose ep, dp_shard and cp so that "
                f"experts are cut over {nearest(divisors(size), shards)} ranks."
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
            f"{param.name} {param.shape} is cut {param.tp} along dim {dim}, whose size does not divide by tp={tp}. Write tp="
            f"{nearest(fitting, tp)}."
        )
    return Sharded(dim, parts)


def split_into_stages(model: ModelDescription, stages: int) -> list[list[ModelParam]]:
    """Consecutive layers for each pipeline stage. What is before the layers counts as one layer, and so does what is after."""
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
    """Any layout, from a JSON file with ``meshes`` by name and ``params``: patterns of names, each with a mesh and placements.

    Placements are ``"R"``, ``"S(dim)"`` and ``"S(dim, stride k)"``. The first pattern that matches a name counts.
    """

    meshes: Mapping[str, Mesh]
    rules: tuple[tuple[str, str, tuple[Placement, ...]], ...]
    name: str

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len({rank for mesh in self.meshes.values() for rank in mesh.ranks})

    @property
    def text(self) -> str:
        """The name of the file."""
        return f"the layout of {Path(self.name).name}"

    def stages(self, model: ModelDescription) -> Iterator[list[PlacedParam]]:
        """All parameters, in one stage."""
        placed = []
        for param in model.params:
            rule = next((rule for rule in self.rules if fnmatchcase(param.name, rule[0])), None)
            if rule is None:
                raise ConfigError(f'--layout {self.name}: no pattern matches {param.name}. Add one, or "*" at the end.')
            _, mesh, placements = rule
            if any(isinstance(place, Sharded) and place.dim >= len(param.shape) for place in placements):
                raise ConfigError(
                    f"--layout {self.name}: {rule[0]} shards a dim that {param.name} {param.shape} does not have. Give it a "
                    "pattern of its own before this one."
                )
            placed.append(PlacedParam(param, self.meshes[mesh], placements))
        yield placed

    @classmethod
    def load(cls, path: Path) -> FileSharding:
        """Reads a file."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            meshes = {name: _read_mesh(row) for name, row in content["meshes"].items()}
            rules = tuple(_read_rule(pattern, row, meshes) for pattern, row in content["params"].items())
        except OSError as error:
            raise ConfigError(f"--layout {path} cannot be read: {error.strerror or error}.") from None
        except ConfigError as error:
            raise ConfigError(f"--layout {path}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"--layout {path} cannot be understood ({type(error).__name__}: {error}). Write "
                '{"meshes": {"main": {"shape": [2, 4]}}, "params": {"*": {"mesh": "main", "placements": ["R", "S(0)"]}}}.'
            ) from None
        return cls(meshes, rules, str(path))


def _read_mesh(row: Mapping[str, Any]) -> Mesh:
    shape = tuple(int(size) for size in row["shape"])
    if not shape or min(shape) < 1 or math.prod(shape) > MOST_RANKS:
        raise ConfigError(
            f"a mesh cannot have the shape {list(shape)}: write sizes from 1 that multiply to {MOST_RANKS} at most."
        )
    ranks = tuple(int(rank) for rank in row.get("ranks", range(math.prod(shape))))
    if not all(0 <= rank < _MOST_RANK_NUMBERS for rank in ranks):
        raise ConfigError(
            f"the ranks of the mesh {list(shape)} are not all from 0 to {_MOST_RANK_NUMBERS - 1}: write their numbers."
        )
    return Mesh(shape, ranks)


def _read_rule(pattern: str, row: Mapping[str, Any], meshes: Mapping[str, Mesh]) -> tuple[str, str, tuple[Placement, ...]]:
    mesh = row["mesh"]
    if mesh not in meshes:
        raise ConfigError(
            f"{pattern}: the mesh {mesh!r} is unknown.{did_you_mean(mesh, meshes)} Name one of {', '.join(meshes)}."
        )
    placements = tuple(map(_read_placement, row["placements"]))
    if len(placements) != len(meshes[mesh].shape):
        raise ConfigError(
            f"{pattern}: {len(placements)} placements for the mesh {mesh} of {len(meshes[mesh].shape)} axes. Write one per axis."
        )
    return pattern, mesh, placements


def _read_placement(text: str) -> Placement:
    if text == "R":
        return Replicated()
    match = re.fullmatch(r"S\((\d+)(?:, *stride (\d+))?\)", text)
    if match is None:
        raise ConfigError(f'the placement {text!r} is unknown; write "R", "S(0)" or "S(0, stride 8)".')
    if not 1 <= int(match[2] or 1) <= MOST_RANKS:
        raise ConfigError(f"the placement {text[:120]!r} has no possible stride: write one from 1 to {MOST_RANKS}.")
    return Sharded(int(match[1]), int(match[2] or 1))
