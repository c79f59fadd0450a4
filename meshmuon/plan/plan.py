"""The plan of a step: which rank orthogonalises which matrix, and which pieces travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import PlanError
from ..layout import ShardedMatrix
from .nodes import Crossings
from .owners import assign_owners
from .plan_data import PlanData, add_local_costs, copied_bytes
from .replicas import shared_params
from .report import describe
from .tasks import EVERY_HOLDER, NO_WAVE, PartIndex, PlannedParam, PlanOptions, Task
from .waves import cut_into_waves


@dataclass(frozen=True)
class Plan(PlanData):
    """A ``PlanData`` that has been checked, and can be printed."""

    def describe(self) -> str:
        """The plan as text."""
        return describe(self)

    def __post_init__(self) -> None:
        """Raises unless each matrix has one owner for each copy that is computed separately, and waves and owners fit
        together.

        Every ``ShardedMatrix`` has checked that its pieces tile the matrix and that each rank holds one piece in one
        replica. Sender and receiver of a piece therefore agree on it: both read the same ``ShardedMatrix``.
        """
        copies: list[list[list[ShardedMatrix]]] = [[[] for _ in range(param.count)] for param in self.params]
        for task in self.tasks:
            if task.wave == NO_WAVE:
                if not (task.owner == EVERY_HOLDER and task.sharded.whole):
                    name = self.params[task.param].name
                    raise PlanError(f"{name}: matrix {task.matrix} is in pieces, but the plan moves none of them")
            else:
                self._check_wave(task)
            copies[task.param][task.matrix].append(task.sharded)
        for param, computed in zip(self.params, copies, strict=True):
            _check_copies(param, computed)

    def _check_wave(self, task: Task) -> None:
        param = self.params[task.param]
        if task.owner not in task.sharded.holdings:
            raise PlanError(f"{param.name}: rank {task.owner} owns matrix {task.matrix} but holds no piece of it")
        if not (0 <= task.wave < len(self.wave_lanes) and self.wave_lanes[task.wave] == param.lane):
            raise PlanError(
                f"{param.name}: it travels on {param.lane}, but wave {task.wave} is not on that lane: {self.wave_lanes}"
            )


def _check_copies(param: PlannedParam, copies: Sequence[Sequence[ShardedMatrix]]) -> None:
    """Raises unless the copies of each matrix that are computed separately have exactly its holders."""
    layouts = [param.sharded_matrices(layout) for layout in param.layouts]
    for matrix, computed in enumerate(copies):
        if len(layouts) == len(computed) == 1 and computed[0] is layouts[0][matrix]:
            continue
        holders = sum(len(sharded.holdings) for sharded in computed)
        expected = sum(len(sharded_matrices[matrix].holdings) for sharded_matrices in layouts)
        if holders != expected or (
            len(computed) > 1 and len({r for sharded in computed for r in sharded.holdings}) != holders
        ):
            raise PlanError(f"{param.name}: matrix {matrix} has {expected} holders, the plan computes it for {holders}")


def make_plan(params: Sequence[PlannedParam], options: PlanOptions) -> Plan:
    """Plans a step on ``params``; a pure function of its arguments.

    Every matrix that cannot stay where it is gets an owner, given the load of those that can; then waves that fit the
    memory.
    """
    ranks = tuple(
        sorted({rank for mesh in {layout.mesh for p in params for layout in p.layouts} for rank in mesh.ranks})
    )
    if options.nodes is not None:
        options = replace(options, nodes=options.nodes.among(ranks))
    crossings = None if options.nodes is None else Crossings(options.nodes)
    staying, travelling = _tasks(params, options, crossings)
    loads = dict.fromkeys(ranks, 0.0)
    add_local_costs(loads, ((task.sharded, 0.0 if params[task.param].private else task.cost) for task in staying))
    for rank, count in copied_bytes(ranks, params, [*staying, *travelling]).items():
        loads[rank] += options.cost.per_byte_of_host * count
    itemsizes = [params[task.param].wire.itemsize for task in travelling]
    owners = assign_owners(travelling, loads, crossings, itemsizes)
    owned = [task.placed(owner) for task, owner in zip(travelling, owners, strict=True)]
    in_waves, wave_lanes, in_flight = cut_into_waves(owned, params, options)
    return Plan(ranks, tuple(params), (*staying, *in_waves), wave_lanes, replace(options, in_flight=in_flight))


def _tasks(
    params: Sequence[PlannedParam], options: PlanOptions, crossings: Crossings | None
) -> tuple[list[Task], list[Task]]:
    """Tasks whose matrices stay where they are, and tasks that need an owner: one for all replicas, or one for each."""
    staying: list[Task] = []
    travelling: list[Task] = []
    shared = shared_params(params, options, crossings)
    costs: dict[tuple[int, ShardedMatrix, float], float] = {}
    for k, param in enumerate(params):
        itemsize = param.wire.itemsize
        for layout in param.layouts:
            for matrix, sharded in enumerate(param.sharded_matrices(layout)):
                if not sharded.size:
                    continue
                one_for_all = sharded.replicas > 1 and k in shared
                if sharded.whole and not one_for_all:
                    staying.append(Task(PartIndex(k), matrix, sharded, float(param.flops)))
                    continue
                for replica in (sharded,) if one_for_all else sharded.separate_replicas:
                    kind = param.flops, replica, itemsize  # thousands of matrices are of a few kinds
                    if kind not in costs:
                        costs[kind] = options.cost.owning(*kind, crossings)
                    travelling.append(Task(PartIndex(k), matrix, replica, costs[kind]))
    return staying, travelling
