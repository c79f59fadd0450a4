"""Reads the plan that a job wrote with ``optimizer.plan().to_json()``. It is the same plan, with the same digest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import ConfigError, PlanError
from ...layout import Layout, Mesh, Placement, Replicated, Sharded, ShardedMatrix
from ...matrices import StridedRange
from ...plan import EVERY_HOLDER, NO_WAVE, CostModel, Nodes, Plan, PlannedParam, PlanOptions, Task
from ...plan.report import PLAN_VERSION


def read_plan(text: str) -> Plan:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is not JSON ({error}).") from None
    if not isinstance(content, Mapping) or "matrices" not in content or "digest" not in content:
        raise ConfigError("it is no plan: write one with optimizer.plan().to_json().")
    if content.get("version") != PLAN_VERSION:
        raise ConfigError(
            f"its plan has version {content.get('version')!r}, and this meshmuon reads version {PLAN_VERSION}: write "
            "it again with optimizer.plan().to_json()."
        )
    try:
        plan = _read(content)
        holders = {rank for sharded in {task.sharded for task in plan.tasks} for rank in sharded.holdings}
        if not holders <= set(plan.ranks) or not all(isinstance(task.cost, (int, float)) for task in plan.tasks):
            raise ValueError("its ranks or costs do not fit its matrices")
    except ConfigError:
        raise
    except (PlanError, KeyError, TypeError, IndexError, ValueError) as error:
        raise ConfigError(f"its plan is damaged ({type(error).__name__}: {error}).") from None
    if plan.digest != content["digest"]:
        raise ConfigError("its plan is not the one that was written: the digests differ. The file was changed.")
    return plan


def _read(content: Mapping[str, Any]) -> Plan:
    meshes = [Mesh(tuple(row["shape"]), tuple(row["ranks"])) for row in content["meshes"]]
    layouts = [
        Layout(tuple(row["shape"]), meshes[row["mesh"]], tuple(map(_placement, row["placements"])))
        for row in content["layouts"]
    ]
    params = tuple(_read_param(row, layouts) for row in content["parameters"])
    nodes = content["nodes"]
    options = content["options"] | {
        "cost": CostModel(**content["options"]["cost"]),
        "nodes": None if nodes is None else Nodes(tuple(map(tuple, nodes))),
    }
    return Plan(
        ranks=tuple(content["ranks"]),
        params=params,
        tasks=tuple(_read_tasks(content["matrices"], params)),
        wave_lanes=tuple(params[row["parameter"]].lane for row in content["waves"]),
        options=PlanOptions(**options),
    )


def _read_param(row: Mapping[str, Any], layouts: Sequence[Layout]) -> PlannedParam:
    return PlannedParam(
        name=row["name"],
        layouts=tuple(layouts[number] for number in row["layout_numbers"]),
        stack_dims=row["stack_dims"],
        lane=tuple(row["lane"]) if isinstance(row["lane"], list) else row["lane"],
        itemsize=row["bytes_per_element"],
        flops=row["flops_per_matrix"],
        share=row["share"],
        private=row["private"],
        window=None if row["window"] is None else (StridedRange(**row["window"][0]), StridedRange(**row["window"][1])),
        staged=row["staged"],
        how=row["how"],
        compute_dtype=row["compute_dtype"],
        itemsize_back=row["bytes_per_element_back"],
    )


def _read_tasks(rows: Sequence[Mapping[str, Any]], params: Sequence[PlannedParam]) -> Iterator[Task]:
    copies = dict[tuple[int, int], int]()
    for row in rows:
        owner = EVERY_HOLDER if row["owner"] is None else row["owner"]
        wave = NO_WAVE if row["wave"] is None else row["wave"]
        param, matrix = params[row["param"]], row["matrix"]
        if owner == EVERY_HOLDER:  # one such task per layout, in their order
            copy = copies[row["param"], matrix] = copies.get((row["param"], matrix), -1) + 1
            sharded = param.sharded_matrices(param.layouts[copy])[matrix]
        else:
            sharded = _held_by(param, matrix, owner, row["replicas"])
        yield Task(row["param"], matrix, sharded, row["cost"], owner, wave)


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
