"""From the parameters of a step to a plan that all ranks share.

Each rank works out the plan from metadata alone. One small reduction in host memory per step then tells whether all ranks are
about to do the same; only when they are not do they compare notes, and either continue with what they have in common or raise
the same error.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..errors import ConfigError, PlanError, PlanMismatchError, TransportError
from ..execute import UpdateRule
from ..layout import Layout, Mesh
from ..matrices import MatrixSet
from ..ortho import Orthogonalizer, Scheme, expected_flops
from ..plan import NO_WAVE, Entry, Plan, PlanOptions, cost_model_for, make_plan
from ..torch_compat import warn_if_untested
from ..transport import Agreement, Exchange, Vote, exchange_group, host_group
from .differences import Note, raise_failures, raise_mismatch, raise_other_plan, raise_torn_replicas
from .dtensors import ReplicaGroup, connected_ranks, groups_of, layouts_of, replica_ranks, replicated_layout, siblings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Demand", "Outcome", "Planner"]

_FAILED, _READY = -1, 1
_T = TypeVar("_T")


class Demand(NamedTuple):
    """What a plan must know of a parameter. Two steps with equal demands have equal plans.

    Attributes:
        name: its name.
        group: index of its group.
        shape: its global shape.
        local_shape: shape of what this rank holds.
        mesh: its mesh, None for a plain tensor.
        placements: torch's placements on the mesh.
        device: where it is.
        matrices: its matrices, one set per part of a fused weight; None when AdamW takes it.
        scheme: how they are orthogonalised.
        rule: what is done to them beside that.
        compute_dtype: dtype of the products.
        comm_dtype: dtype on the wire.
        update_dtype: dtype in which the update is formed.
        active: whether it has a gradient on this rank.
    """

    name: str
    group: int
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    mesh: DeviceMesh | None
    placements: tuple[Any, ...]
    device: torch.device
    matrices: tuple[MatrixSet, ...] | None
    scheme: Scheme | Orthogonalizer | None
    rule: UpdateRule | None
    compute_dtype: torch.dtype
    comm_dtype: torch.dtype
    update_dtype: torch.dtype
    active: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all ranks have agreed to do.

    Attributes:
        plan: the plan; its entries are the parameters of ``members``, in order.
        members: for each entry, the index of its demand and of its set of matrices.
        zeros: indices of the demands whose gradient only other ranks have.
        exchange: how pieces travel; None when none does.
        rank: this rank.
        prepares: some rank makes its buffers anew, and all then say whether they are ready.
        nonfinite: some rank has a gradient that must not be stepped with.
        busy: some rank has more to do than creating state.
        repeats: ranks compute the same matrix, each for itself.
    """

    plan: Plan
    members: tuple[tuple[int, int], ...]
    zeros: frozenset[int]
    exchange: Exchange | None
    rank: int
    prepares: bool = False
    nonfinite: bool = False
    busy: bool = True
    repeats: bool = False


class _Link:
    """The ranks that plan together, and how they talk."""

    def __init__(self, ranks: tuple[int, ...], existing: Iterable[dist.ProcessGroup]) -> None:
        self.ranks = ranks
        group = exchange_group(ranks, existing)
        self.exchange = Exchange(group)
        self.agreement = Agreement(host_group(group))


class Planner:
    """Plans when something has changed, and has the ranks agree before anything is written."""

    def __init__(
        self, options: PlanOptions, form: str, path: str, replica_group: ReplicaGroup | None, *, reduced: bool = True
    ) -> None:
        self._options, self._form, self._path, self._replica_group = options, form, path, replica_group
        self._reduced = reduced  # whether replicas come with equal gradients, or each with its own
        self._process = os.getpid()
        self._link: _Link | None = None
        self._agreed: tuple[Demand, ...] | None = None
        self.demands: tuple[Demand, ...] = ()
        self._outcome: Outcome | None = None
        self._token = 0
        self._meshes: dict[DeviceMesh, tuple[Mesh, ...]] = {}
        self._replicas: list[tuple[int, ...]] = []
        self._layouts: list[tuple[Layout, ...]] = []
        self._groups: tuple[tuple[int, int], ...] = ()  # of the parameters that ranks share: from which on, which group
        self._misfit: Exception | None = None

    def outcome(
        self,
        demands: tuple[Demand, ...],
        failure: Exception | None,
        *,
        held: Plan | None = None,
        nonfinite: bool = False,
        busy: bool = True,
        numbers: Sequence[str] = (),
    ) -> Outcome:
        """What all ranks do about ``demands``.

        Args:
            demands: this rank's parameters.
            failure: this rank's own reason not to step, which then is every rank's.
            held: the plan that this rank has buffers for.
            nonfinite: whether this rank has a gradient that must not be stepped with.
            busy: whether this rank has more to do than creating state.
            numbers: the hyperparameters of each group, of which ranks that share parameters must have the same.
        """
        if demands != self._agreed:
            self._propose(demands)
        failure = failure or self._misfit
        prepares = self._outcome is None or self._outcome.plan is not held
        if self._link is None:
            if failure is not None:
                raise failure
        else:
            self._check_process()
            common = _runs([(start, numbers[group]) for start, group in self._groups]) if numbers else ()
            token = _number_of((self._token, common)) if failure is None else _FAILED
            verdict = self._link.agreement.decide(Vote(token, prepares, nonfinite, busy))
            if not verdict.unanimous or failure is not None:
                self._compare_notes(demands, failure, common, self._link.agreement)
            prepares = verdict.prepares or not verdict.unanimous  # ranks that compare notes all plan anew
            nonfinite, busy = verdict.nonfinite, verdict.busy
        assert self._outcome is not None
        plain = not prepares and not nonfinite and busy
        return self._outcome if plain else replace(self._outcome, prepares=prepares, nonfinite=nonfinite, busy=busy)

    def confirm(self, failure: Exception | None) -> None:
        """All ranks are ready for the step, or all raise the first one's reason why it is not."""
        if self._link is None:
            if failure is not None:
                raise failure
            return
        verdict = self._link.agreement.decide(Vote(_READY if failure is None else _FAILED))
        if not verdict.unanimous or failure is not None:
            raise_failures(self._link.agreement.everyone(Note(_failure_text(failure))), failure)
            raise PlanMismatchError("some ranks are ready for a step that others have not begun: call step() equally often.")

    def _propose(self, demands: tuple[Demand, ...]) -> None:
        """This rank's own idea of the plan."""
        self._agreed = self._outcome = self._misfit = None  # nothing half made survives an error
        meshes = dict.fromkeys(demand.mesh for demand in demands if demand.mesh is not None)
        self._meshes = {mesh: siblings(mesh) for mesh in meshes}
        self._replicas = replica_ranks(self._replica_group)
        if meshes or self._replicas:
            warn_if_untested()
        ranks = self._reach()
        if isinstance(self._replica_group, dist.ProcessGroup) and len(ranks) > len(self._replicas[0]):
            raise ConfigError(
                f"replica_group has {len(self._replicas[0])} ranks, but the meshes of other parameters connect {list(ranks)}, "
                "some of which have replica groups of their own. Instead of the group pass its mesh, which knows them all: "
                'replica_group=mesh["dp"].'
            )
        if len(ranks) == 1:
            self._link = None
        elif self._link is None or self._link.ranks != ranks:
            self._check_process()
            existing = [group for mesh in meshes for group in groups_of(mesh)]
            self._link = _Link(ranks, [*groups_of(self._replica_group), *existing])
        try:
            self._plan(demands, frozenset(ranks))
        except Exception as error:  # the others wait to hear of it
            self._misfit = error

    def _plan(self, demands: tuple[Demand, ...], reached: frozenset[int]) -> None:
        self._options = replace(self._options, cost=cost_model_for(demands[0].device.type)) if demands else self._options
        self._layouts = [self._layouts_of(demand, reached) for demand in demands]
        shared = (demand.group for demand, layouts in zip(demands, self._layouts, strict=True) if layouts)
        self._groups = _runs(list(enumerate(shared)))
        self._misfit = self._find_misfit(demands)
        self._settle(demands, [demand.active for demand in demands])

    def _settle(self, demands: tuple[Demand, ...], active: Sequence[bool], whose: object = None) -> None:
        """Plans a step on the ``active`` parameters.

        ``whose`` tells which rank has which gradient where ranks differ: as soon as that changes on any of them, its number is
        another and all look again whether replicas still have the same gradients.
        """
        chosen = [
            (k, part, entry) for k, parts in enumerate(self._entries(demands)) for part, entry in enumerate(parts) if active[k]
        ]
        zeros = frozenset(k for k, demand in enumerate(demands) if active[k] and not demand.active)
        plan = make_plan([entry for _, _, entry in chosen], self._options)
        exchange = None if self._link is None else self._link.exchange
        members = tuple((k, part) for k, part, _ in chosen)
        self._outcome = Outcome(plan, members, zeros, exchange, self._rank(), repeats=_repeats(plan))
        # What AdamW steps is no part of the plan, but ranks must agree on it as well.
        others = [active[k] for k, demand in enumerate(demands) if demand.matrices is None and self._layouts[k]]
        self._token = _number_of((self._path, plan.digest, others, whose, sum(map(bool, self._layouts))))
        self._agreed = self.demands = demands

    def _entries(self, demands: Sequence[Demand]) -> list[list[Entry]]:
        """What the plan knows of each parameter; nothing of AdamW's and of those on meshes that do not touch this rank's."""
        ranks = (self._rank(),) if self._link is None else self._link.ranks
        return [
            [
                self._entry(demand, matrices, layouts, ranks)
                for matrices in demand.matrices or ()
                if demand.mesh is None or layouts
            ]
            for demand, layouts in zip(demands, self._layouts, strict=True)
        ]

    def _entry(self, demand: Demand, matrices: MatrixSet, layouts: tuple[Layout, ...], ranks: tuple[int, ...]) -> Entry:
        return Entry(
            name=demand.name,
            layouts=layouts or (replicated_layout(demand.shape, ranks),),
            lead=matrices.lead,
            lane=(demand.device.type, str(demand.comm_dtype), str(demand.update_dtype)),
            itemsize=demand.comm_dtype.itemsize,
            flops=expected_flops(matrices.rows, matrices.cols, demand.scheme, self._form, demand.compute_dtype),
            share=True if demand.mesh is None else None,
            private=not layouts and self._link is not None,  # one rank alone shares all it knows
            window=matrices.window,
            how=_how(demand),
        )

    def _layouts_of(self, demand: Demand, reached: frozenset[int]) -> tuple[Layout, ...]:
        if demand.mesh is not None:
            return layouts_of(demand.name, demand.shape, demand.placements, self._meshes[demand.mesh], reached)
        return tuple(replicated_layout(demand.shape, ranks) for ranks in self._replicas if not reached.isdisjoint(ranks))

    def _reach(self) -> tuple[int, ...]:
        """All ranks that share a mesh or a replica group with this one, directly or through others."""
        meshes = [mesh.ranks for alike in self._meshes.values() for mesh in alike]
        return connected_ranks(self._rank(), [*meshes, *self._replicas])

    def _find_misfit(self, demands: Sequence[Demand]) -> PlanError | None:
        """A local tensor that is not what its placements say; only the ranks that hold it can see it."""
        for demand, layouts in zip(demands, self._layouts, strict=True):
            own = [layout.local_shape(self._rank()) for layout in layouts if self._rank() in layout.mesh.ranks]
            if own and own[0] != demand.local_shape and math.prod(own[0]) + math.prod(demand.local_shape) > 0:
                return PlanError(
                    f"{demand.name} is {'; '.join(map(str, layouts))}, so that this rank should hold {own[0]}, but it holds "
                    f"{demand.local_shape}. Some wrappers (FSDP2 over tensor parallelism with rows that do not divide) store "
                    "other shards than their placements say: choose sizes that divide, or shard another dim."
                )
        return None

    def _check_process(self) -> None:
        """Refuses to wait in a fork, to which no other rank will ever answer."""
        if os.getpid() != self._process:
            raise TransportError(
                f"ranks lost each other in the agreement of a step: process {os.getpid()} is a fork of process {self._process}, "
                "which is one of several ranks; a fork has none of its connections. Step in that process only, or start new "
                'processes ("spawn") that join a process group and build their optimizer themselves.'
            )

    def _rank(self) -> int:
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def _compare_notes(
        self, demands: tuple[Demand, ...], failure: Exception | None, common: tuple[tuple[int, str], ...], agreement: Agreement
    ) -> None:
        """Ranks differ: finds out in what, and either settles on one plan or raises the same error everywhere."""
        if failure is not None:  # all that the others will look at
            raise_failures(agreement.everyone(Note(_failure_text(failure))), failure)
        shared = [k for k, layouts in enumerate(self._layouts) if layouts]
        entries = self._entries(demands)
        note = Note(
            failure=None,
            options=f"{self._options}, form={self._form!r}, {self._path}",
            parameters=tuple(_description(demands[k], self._layouts[k], entries[k]) for k in shared),
            active=tuple(demands[k].active for k in shared),
            numbers=common,
        )
        notes = agreement.everyone(note)
        raise_failures(notes, failure)
        raise_mismatch(notes)
        if self._reduced:
            raise_torn_replicas(
                {rank: one.active for rank, one in notes.items()}, [(demands[k].name, self._layouts[k]) for k in shared]
            )
        union = [any(flags) for flags in zip(*(one.active for one in notes.values()), strict=True)]
        active = [demand.active for demand in demands]
        for k, flag in zip(shared, union, strict=True):
            active[k] = flag
        flags = {rank: one.active for rank, one in sorted(notes.items())}
        try:
            self._settle(demands, active, None if len(set(flags.values())) == 1 else flags)
        except Exception as error:  # the others wait to hear of it
            failure = error
        raise_failures(agreement.everyone(Note(_failure_text(failure))), failure)
        assert self._outcome is not None
        raise_other_plan(agreement.everyone((self._token, _owners(self._outcome.plan))))


def _runs(items: Sequence[tuple[int, _T]]) -> tuple[tuple[int, _T], ...]:
    """Without those that say the same as the one before."""
    return tuple(item for k, item in enumerate(items) if k == 0 or item[1] != items[k - 1][1])


def _number_of(facts: object) -> int:
    """A number below 2**60 that is equal for equal facts, on every rank."""
    return int(hashlib.sha256(repr(facts).encode()).hexdigest()[:15], 16)


def _repeats(plan: Plan) -> bool:
    """Whether ranks compute a matrix that others compute as well."""
    shared = [task for task in plan.tasks if not plan.entries[task.entry].private]
    return len({(task.entry, task.matrix) for task in shared}) < len(shared) or any(
        task.wave == NO_WAVE and len(task.spread.place) > 1 for task in shared
    )


def _owners(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Each matrix that ranks share, and who does what with it when."""
    return tuple(
        (plan.entries[task.entry].name, f"matrix {task.matrix} to owner {task.owner} in wave {task.wave}")
        for task in plan.tasks
        if not plan.entries[task.entry].private
    )


def _failure_text(failure: Exception | None) -> tuple[str, str] | None:
    return None if failure is None else (type(failure).__name__, str(failure))


def _how(demand: Demand) -> str:
    """How a parameter's matrices are computed, in words that are the same on every rank."""
    rule = "" if demand.rule is None else f", {_stable_text(demand.rule)}"
    return f"{_scheme_text(demand.scheme)} in {str(demand.compute_dtype).removeprefix('torch.')}{rule}"


def _stable_text(thing: object) -> str:
    """``repr``, unless it is the default one, which holds an address."""
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__repr__ is object.__repr__ else repr(thing)


def _scheme_text(scheme: Scheme | Orthogonalizer | None) -> str:
    if isinstance(scheme, Scheme):
        return "steps " + ", ".join(f"({step[0]:.6g} {step[1]:.6g} {step[2]:.6g})" for step in scheme.steps)
    return f"{getattr(scheme, '__module__', '')}.{getattr(scheme, '__qualname__', type(scheme).__qualname__)}"


def _description(demand: Demand, layouts: Sequence[Layout], parts: Sequence[Entry]) -> tuple[str, str]:
    """A parameter's name, and all of it that must be equal on every rank."""
    where = f"{'×'.join(map(str, demand.shape))} {'; '.join(map(str, layouts))}"
    if not parts:
        return demand.name, f"{where}, for AdamW"
    work = ", ".join(
        f"{entry.flops} FLOPs" if entry.window is None else f"{entry.window}: {entry.flops} FLOPs" for entry in parts
    )
    return demand.name, f"{where}, {parts[0].lane}, lead {parts[0].lead}, {work}, {parts[0].how}"
