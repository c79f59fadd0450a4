"""A plan as JSON, and back: a job writes its plan, and ``meshmuon plan --from-json`` reads it elsewhere.

Layouts and meshes are listed once and referred to by number. Reading a plan makes the same plan, with the same digest.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..errors import ConfigError
from ..layout import Layout, Mesh, Placement, Replicated, Sharded, ShardedMatrix
from ..matrices import StridedRange, Window
from .cost import CostModel
from .nodes import Nodes
from .plan_data import PlanData, PlanOptions
from .tasks import EVERY_HOLDER, NO_WAVE, PlannedParam, Task

VERSION = 1


def plan_content(plan: PlanData) -> dict[str, Any]:
    """Everything that ``read_plan`` needs, as plain data."""
    layouts: dict[Layout, int] = {}
    meshes: dict[Mesh, int] = {}
    parameters = [
        {
            "name": param.name,
            "shape": list(param.layouts[0].shape),
            "layouts": [str(layout) for layout in param.layouts],
            "layout_numbers": [layouts.setdefault(layout, len(layouts)) for layout in param.layouts],
            "flops_per_matrix": param.flops,
            "bytes_per_element": param.itemsize,
            "stack_dims": param.stack_dims,
            "lane": list(param.lane) if isinstance(param.lane, tuple) else str(param.lane),
            "share": param.share,
            "private": param.private,
            "window": None if param.window is None else [asdict(indices) for indices in param.window],
            "how": param.how,
        }
        for param in plan.params
    ]
    options = plan.options
    return {
        "version": VERSION,
        "digest": plan.digest,
        "ranks": list(plan.ranks),
        "options": {
            "replicas": options.replicas,
            "chunk_size": options.chunk_size,
            "budget": options.budget,
            "in_flight": options.in_flight,
            "max_peers": options.max_peers,
            "cost": asdict(options.cost),
        },
        "nodes": None if options.nodes is None else [list(node) for node in options.nodes.ranks],
        "waves": [{"lane": str(lane), "parameter": _first_param(plan, wave)} for wave, lane in enumerate(plan.wave_lanes)],
        "layouts": [
            {
                "shape": list(layout.shape),
                "mesh": meshes.setdefault(layout.mesh, len(meshes)),
                "placements": [None if isinstance(p, Replicated) else [p.dim, p.split_factor] for p in layout.placements],
            }
            for layout in layouts
        ],
        "meshes": [{"shape": list(mesh.shape), "ranks": list(mesh.ranks)} for mesh in meshes],
        "parameters": parameters,
        "matrices": [
            {
                "parameter": plan.params[task.param].name,
                "param": task.param,
                "matrix": task.matrix,
                "owner": None if task.owner == EVERY_HOLDER else task.owner,
                "wave": None if task.wave == NO_WAVE else task.wave,
                "pieces": len(task.sharded.pieces),
                "replicas": task.sharded.replicas,
                "cost": task.cost,
            }
            for task in plan.tasks
        ],
    }


def _first_param(plan: PlanData, wave: int) -> int:
    return next(task.param for task in plan.tasks if task.wave == wave)


def read_plan(content: Any) -> PlanData:
    """The plan in what ``Plan.to_json`` wrote."""
    if not isinstance(content, Mapping) or "matrices" not in content or "digest" not in content:
        raise ConfigError("it is no plan: write one with optimizer.plan().to_json().")
    if content.get("version") != VERSION:
        raise ConfigError(
            f"its plan has version {content.get('version')!r}, and this meshmuon reads version {VERSION}: write it again with "
            "optimizer.plan().to_json()."
        )
    try:
        plan = _Reader(content).plan()
        holders = {rank for sharded in {task.sharded for task in plan.tasks} for rank in sharded.holdings}
        if not holders <= set(plan.ranks) or not all(isinstance(task.cost, (int, float)) for task in plan.tasks):
            raise ValueError("its ranks or costs do not fit its matrices")
    except (KeyError, TypeError, IndexError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"its plan is damaged ({type(error).__name__}: {error}).") from None
    if plan.digest != content["digest"]:
        raise ConfigError("its plan is not the one that was written: the digests differ. The file was changed.")
    return plan


class _Reader:
    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        meshes = [Mesh(tuple(row["shape"]), tuple(row["ranks"])) for row in content["meshes"]]
        self._layouts = [
            Layout(tuple(row["shape"]), meshes[row["mesh"]], tuple(map(_placement, row["placements"])))
            for row in content["layouts"]
        ]

    def plan(self) -> PlanData:
        content = self._content
        params = tuple(map(self._param, content["parameters"]))
        options, nodes = content["options"], content["nodes"]
        return PlanData(
            ranks=tuple(content["ranks"]),
            params=params,
            tasks=tuple(self._tasks(params)),
            wave_lanes=tuple(params[row["parameter"]].lane for row in content["waves"]),
            options=PlanOptions(
                cost=CostModel(**options["cost"]),
                replicas=options["replicas"],
                chunk_size=options["chunk_size"],
                budget=options["budget"],
                in_flight=options["in_flight"],
                nodes=None if nodes is None else Nodes(tuple(map(tuple, nodes))),
                max_peers=options["max_peers"],
            ),
        )

    def _param(self, row: Mapping[str, Any]) -> PlannedParam:
        lane: Hashable = tuple(row["lane"]) if isinstance(row["lane"], list) else row["lane"]
        return PlannedParam(
            name=row["name"],
            layouts=tuple(self._layouts[number] for number in row["layout_numbers"]),
            stack_dims=row["stack_dims"],
            lane=lane,
            itemsize=row["bytes_per_element"],
            flops=row["flops_per_matrix"],
            share=row["share"],
            private=row["private"],
            window=_window(row["window"]),
            how=row["how"],
        )

    def _tasks(self, params: Sequence[PlannedParam]) -> list[Task]:
        tasks, copies = [], dict[tuple[int, int], int]()
        for row in self._content["matrices"]:
            owner = EVERY_HOLDER if row["owner"] is None else row["owner"]
            wave = NO_WAVE if row["wave"] is None else row["wave"]
            param, matrix = params[row["param"]], row["matrix"]
            if owner == EVERY_HOLDER:  # one such task per layout, in their order
                copy = copies[row["param"], matrix] = copies.get((row["param"], matrix), -1) + 1
                sharded = param.sharded_matrices(param.layouts[copy])[matrix]
            else:
                sharded = _held_by(param, matrix, owner, row["replicas"])
            tasks.append(Task(row["param"], matrix, sharded, row["cost"], owner, wave))
        return tasks


def _held_by(param: PlannedParam, matrix: int, owner: int, replicas: int) -> ShardedMatrix:
    """The matrix, or the replica of it, that ``owner`` holds a piece of."""
    for layout in param.layouts:
        sharded = param.sharded_matrices(layout)[matrix]
        if owner in sharded.holdings:
            if sharded.replicas == replicas:
                return sharded
            return sharded.separate_replicas[sharded.holdings[owner][1]]
    raise ConfigError(f"{param.name}: rank {owner} owns matrix {matrix} but holds no piece of it")


def _placement(row: Sequence[int] | None) -> Placement:
    return Replicated() if row is None else Sharded(row[0], row[1])


def _window(rows: Sequence[Mapping[str, int]] | None) -> Window | None:
    if rows is None:
        return None
    first, second = (StridedRange(**row) for row in rows)
    return first, second
