"""One rank's own plan of a step, from metadata alone: nothing in this module communicates."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ..device import device_memory, memory_budget_for
from ..errors import PlanError
from ..execute import may_fail
from ..layout import Layout, Mesh
from ..matrices import MatrixSet
from ..ortho import expected_flops
from ..params.dtensors import ReplicaGroup, connected_ranks, layouts_of, replica_ranks, replicated_layout, siblings
from ..params.param_record import ParamIndex, ParamRecord
from ..plan import (
    NO_WAVE,
    CostModel,
    Nodes,
    PartIndex,
    Plan,
    PlannedParam,
    PlanOptions,
    cost_model_for,
    make_plan,
)
from ..transport import Exchange
from .descriptions import describe_param, recipe_text
from .differences import Note
from .planned_set import PlannedSet
from .step_decision import RankStatus, StepDecision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks that this rank plans with, and how their meshes connect them."""

    rank: int  # this rank
    # The mesh of each sharded parameter, with all slices of its parent mesh that look like it. For parameters on the
    # "tp" axis of a 2×4 mesh over ranks 0–7 these are the slices (0, 1, 2, 3) and (4, 5, 6, 7).
    meshes: Mapping[DeviceMesh | Mesh, tuple[Mesh, ...]]
    replica_sets: Sequence[tuple[int, ...]]  # the sets of ranks over which plain tensors are replicated
    # all ranks that share a mesh or a replica set with this one, directly or through others, ascending
    ranks: tuple[int, ...]
    nodes: Nodes | None = None  # which of them share a node; None if all do, or as long as that is not known

    @classmethod
    def around(cls, rank: int, records: Sequence[ParamRecord], replica_group: ReplicaGroup | None) -> Topology:
        """The topology that ``rank`` sees."""
        # in the order of parameters
        own_meshes = dict.fromkeys(record.mesh for record in records if record.mesh is not None)
        meshes = {mesh: (mesh,) if isinstance(mesh, Mesh) else siblings(mesh) for mesh in own_meshes}
        replica_sets = replica_ranks(replica_group)
        mesh_sets = [mesh.ranks for slices in meshes.values() for mesh in slices]
        return cls(rank, meshes, replica_sets, connected_ranks(rank, [*mesh_sets, *replica_sets]))

    def layouts(self, records: Sequence[ParamRecord]) -> list[tuple[Layout, ...]]:
        """The layouts of each parameter on the ranks that plan together; none for plain tensors that are not
        replicated.
        """
        planning_ranks = frozenset(self.ranks)
        replica_sets = [ranks for ranks in self.replica_sets if not planning_ranks.isdisjoint(ranks)]
        return [
            tuple(replicated_layout(param.shape, ranks) for ranks in replica_sets)
            if param.mesh is None
            else layouts_of(param.name, param.shape, param.placements, self.meshes[param.mesh], planning_ranks)
            for param in records
        ]


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The optimizer's options that shape a plan."""

    options: PlanOptions
    form: str  # of the orthogonalisation: it decides the FLOPs
    path: str  # which executor will run the plan, as text
    cost_model: CostModel | None = None  # the user's own; None for that of the parameters' device
    memory_budget: int | None = None  # the same
    device_memory: int | None = None  # bytes of the device, where it is simulated


class LocalPlanner:
    """Plans steps on one set of parameters. Ranks with the same parameters, layouts and options make the same plans.

    Raises what keeps the parameters from being planned, such as placements that meshmuon does not support.

    In each step ``propose`` comes first, then ``propose_together`` if the ranks have to compare notes, and
    ``count_step`` once it is certain that the step takes place.

    Attributes:
        records: the parameters.
        decision: what this rank proposes or, after ``propose_together``, what all ranks will do; None before, and if it
            failed.
        shared: indices of the parameters that several ranks know of, because they are on a mesh or replicated.
        layouts: the layouts of every parameter; empty for those that only this rank knows of, and for those on meshes
            without any rank that plans with this one.
    """

    def __init__(
        self,
        records: tuple[ParamRecord, ...],
        settings: PlanSettings,
        topology: Topology,
        exchange: Exchange | None = None,
    ) -> None:
        options = settings.options
        if records:
            # Cost model and budget are those of an accelerator, if any matrix is on one.
            of_muon = [record for record in records if record.matrix_sets is not None] or list(records)
            device = min((record.work_device for record in of_muon), key=lambda device: device.type == "cpu")
            options = replace(
                options,
                cost=settings.cost_model or cost_model_for(device.type),
                budget=settings.memory_budget or memory_budget_for(settings.device_memory or device_memory(device)),
                nodes=None if topology.nodes is None else topology.nodes.among(topology.ranks),
            )
        self._settings = replace(settings, options=options)
        self._topology = topology
        self._exchange = exchange
        self.records = records
        self.layouts = topology.layouts(records)
        self.shared = [index for index, layouts in enumerate(self.layouts) if layouts]
        self._positions = {index: position for position, index in enumerate(self.shared)}
        shared_groups = [(position, records[index].group_index) for position, index in enumerate(self.shared)]
        self._group_starts = _where_changed(shared_groups)
        self._parts_by_param = [
            self._parts_of(record, layouts) for record, layouts in zip(records, self.layouts, strict=True)
        ]
        self._muon = [index for index, record in enumerate(records) if record.matrix_sets is not None]
        flops = {
            index: float(sum(part.flops * part.count for part in self._parts_by_param[index])) for index in self._muon
        }
        shared = {index: flops[index] for index in self._muon if index in self._positions}
        private = {index: flops[index] for index in self._muon if index not in shared}
        self._planned = PlannedSet((shared, private))  # what the plan of the last step covers
        self._planned_next = self._planned  # what ``_full_decision`` covers
        self._full_decision: StepDecision | None = None  # for a step in which all parameters of the plan have gradients
        self.decision: StepDecision | None = None
        self._fingerprint: int | None = None  # of the decision; None until it is asked for
        self._has_grad: tuple[bool, ...] = ()  # which parameters have a gradient on this rank
        # of the shared ones, on each rank; empty if all are equal
        self._flags_by_rank: Mapping[int, tuple[bool, ...]] = {}
        self._active: Sequence[bool] = ()  # which have a gradient on some rank; these are stepped
        self._active_muon = frozenset[int]()

    def check_shards(self) -> None:
        """Raises if a local tensor has another shape than its placements say; only the ranks that hold it can see
        it.
        """
        rank = self._topology.rank
        for record, layouts in zip(self.records, self.layouts, strict=True):
            expected = next((layout.local_shape(rank) for layout in layouts if rank in layout.mesh.ranks), None)
            if expected is None or expected == record.local_shape:
                continue
            if math.prod(expected) + math.prod(record.local_shape) > 0:  # empty shards may have any shape
                raise PlanError(
                    f"{record.name} is {'; '.join(map(str, layouts))}, so this rank should hold {expected}, but it "
                    f"holds {record.local_shape}. Some wrappers (FSDP2 over tensor parallelism with rows that do not "
                    "divide) store other shards than their placements say: choose sizes that divide, or shard another "
                    "dim."
                )

    def propose(self, has_grad: tuple[bool, ...]) -> None:
        """Proposes a step from what this rank knows; ``has_grad`` says which parameters have a gradient on this
        rank.
        """
        if has_grad is not self._has_grad:
            # What the other ranks had is assumed to hold while this rank's own gradients are as they were then. If they
            # are not, it proposes its own alone. Unless all ranks now have the same gradients, the fingerprints then
            # differ, and the ranks compare again.
            if self._flags_by_rank.get(self._topology.rank) != self.shared_flags(has_grad):
                self._flags_by_rank = {}
            self._take_gradients(has_grad)
        self._propose_covering(self._planned.covering(self._active_muon))

    def propose_together(
        self,
        has_grad: tuple[bool, ...],
        flags_by_rank: Mapping[int, tuple[bool, ...]],
        idle_steps: Iterable[Sequence[int]],
    ) -> None:
        """Proposes a step on all that is planned on any rank: the same on all ranks, whatever each has planned before.

        ``flags_by_rank`` are the ``shared_flags`` of each rank, ``idle_steps`` those of its note.
        """
        self._flags_by_rank = flags_by_rank if len(set(flags_by_rank.values())) > 1 else {}
        self._take_gradients(has_grad)
        self._propose_covering(self._planned_next.merged(self.shared, idle_steps))

    def count_step(self) -> None:
        """Keeps the planned set of a step that takes place, and counts which parameters were idle in it."""
        self._planned = self._planned_next.after_step(self._active_muon)

    def _take_gradients(self, has_grad: tuple[bool, ...]) -> None:
        active = list(has_grad)
        for position, index in enumerate(self.shared if self._flags_by_rank else ()):
            active[index] = any(flags[position] for flags in self._flags_by_rank.values())
        self._has_grad, self._active = has_grad, active
        self._active_muon = frozenset(index for index in self._muon if active[index])
        self.decision = None

    def _propose_covering(self, planned: PlannedSet) -> None:
        """Proposes a step under a plan that covers ``planned``; the last plan if it covers just that."""
        if planned.indices != self._planned_next.indices:
            self._full_decision = self.decision = None
        self._planned_next = planned
        if self._full_decision is None:
            self._full_decision = self.plan(planned.indices)
        if self.decision is None:
            active, has_grad, parts = self._active, self._has_grad, self._full_decision.planned_parts
            self._fingerprint = None
            self.decision = replace(
                self._full_decision,
                zeros=frozenset(ParamIndex(index) for index, flag in enumerate(active) if flag and not has_grad[index]),
                idle=frozenset(PartIndex(part) for part, (index, _) in enumerate(parts) if not active[index]),
            )

    @property
    def fingerprint(self) -> int:
        """Of the decision: equal on two ranks that propose the same."""
        if self._fingerprint is None:
            assert self.decision is not None
            # What AdamW steps is no part of the plan, but ranks must agree on it as well. The flags of all ranks are
            # compared: when a rank's gradients change, the fingerprints differ, and ranks check again that replicas
            # have equal gradients.
            flags = bytes(self.shared_flags(self._active)), self._flags_by_rank
            self._fingerprint = fingerprint_of((self.decision.plan.digest, self._settings.path, *flags))
        return self._fingerprint

    def plan(self, indices: AbstractSet[int]) -> StepDecision:
        """Plans a step on the parameters with these ``indices``."""
        chosen = [
            (index, part, planned)
            for index, parts in enumerate(self._parts_by_param)
            for part, planned in enumerate(parts)
            if index in indices
        ]
        parts = [planned for _, _, planned in chosen]
        plan = make_plan(parts, self._settings.options)
        return StepDecision(
            plan=plan,
            planned_parts=tuple((ParamIndex(index), part) for index, part, _ in chosen),
            exchange=self._exchange,
            rank=self._topology.rank,
            repeats=_repeats_matrices(plan),
        )

    def shared_flags(self, has_grad: Sequence[bool]) -> tuple[bool, ...]:
        """The flags of the shared parameters, out of those of all parameters."""
        return tuple(has_grad[index] for index in self.shared)

    def compared(self, status: RankStatus) -> tuple[object, ...]:
        """What must be equal on all ranks in this step."""
        without_state = tuple(self._positions[index] for index in status.without_state if index in self._positions)
        return self.fingerprint, self._hyperparameters(status), without_state

    def note(self, status: RankStatus) -> Note:
        """The same in words, for ranks that differ."""
        options = repr(self._settings.options).removeprefix("PlanOptions(").removesuffix(")")
        planned = self._parts_by_param
        return Note(
            failure=None,
            options=f"{options}, form={self._settings.form!r}, {self._settings.path}",
            parameters=tuple(
                describe_param(self.records[index], self.layouts[index], planned[index]) for index in self.shared
            ),
            has_grad=self.shared_flags(status.has_grad),
            idle_steps=self._planned_next.idle_steps(self.shared),
            hyperparameters=self._hyperparameters(status),
            state="".join(status.presence.presence(index) for index in self.shared),
        )

    def _hyperparameters(self, status: RankStatus) -> tuple[tuple[int, str], ...]:
        texts = status.hyperparameters()
        return (
            _where_changed([(start, texts[group_index]) for start, group_index in self._group_starts]) if texts else ()
        )

    def _parts_of(self, record: ParamRecord, layouts: tuple[Layout, ...]) -> list[PlannedParam]:
        """What the plan must know of a parameter's matrix sets.

        Empty for parameters of AdamW, and for those on meshes that none of the planning ranks is on.
        """
        return [
            self._planned_param(record, matrix_set, layouts)
            for matrix_set in record.matrix_sets or ()
            if record.mesh is None or layouts
        ]

    def _planned_param(self, record: ParamRecord, matrix_set: MatrixSet, layouts: tuple[Layout, ...]) -> PlannedParam:
        ranks, rows, cols = self._topology.ranks, matrix_set.rows, matrix_set.cols
        compute_dtype = record.compute_dtype_of(matrix_set)
        gather, scatter = (dtype.itemsize for dtype in record.comm_dtype)
        # A private parameter is planned as replicated over all ranks. It is then whole, so it stays on this rank, and
        # it costs nothing in the balance. Reports count it on every rank, as if each had one like it. Replicas share
        # what code of the user computes: if it fails on one rank, none of them is stepped, and they stay equal.
        return PlannedParam(
            name=record.name,
            layouts=layouts or (replicated_layout(record.shape, ranks),),
            stack_dims=matrix_set.stack_dims,
            lane=(_places(record), str(record.comm_dtype), str(record.update_dtype)),
            itemsize=gather,
            itemsize_back=None if scatter == gather else scatter,
            flops=expected_flops(rows, cols, record.scheme, self._settings.form, compute_dtype, record.work_device),
            share=True if record.mesh is None or may_fail(record.scheme, record.rules) else None,
            private=not layouts and len(ranks) > 1,  # on a single rank nothing is compared, so nothing is left out
            window=matrix_set.window,
            staged=record.device.type != record.work_device.type,
            how=recipe_text(record, compute_dtype),
            compute_dtype=str(compute_dtype).removeprefix("torch."),
        )


def _places(record: ParamRecord) -> str:
    """Where a parameter is and where its matrices are orthogonalised: ``"cuda"`` for both, ``"cpu to cuda"`` for
    host memory.
    """
    stored, works = record.device.type, record.work_device.type
    return works if stored == works else f"{stored} to {works}"


def fingerprint_of(values: object) -> int:
    """A number below 2**60, made from the text of ``values``: equal on all ranks for equal values."""
    return int(hashlib.sha256(repr(values).encode()).hexdigest()[:15], 16)


def _where_changed(items: Sequence[tuple[int, _T]]) -> tuple[tuple[int, _T], ...]:
    """The items whose value differs from that of the item before: ((0, a), (1, a), (2, b)) gives ((0, a), (2, b))."""
    return tuple(item for k, item in enumerate(items) if k == 0 or item[1] != items[k - 1][1])


def _repeats_matrices(plan: Plan) -> bool:
    """Whether several ranks compute the same matrix."""
    shared = [task for task in plan.tasks if not plan.params[task.param].private]
    return len({(task.param, task.matrix) for task in shared}) < len(shared) or any(
        task.wave == NO_WAVE and len(task.sharded.holdings) > 1 for task in shared
    )
