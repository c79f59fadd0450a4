"""From the parameters of a step to a plan that all ranks share.

Each rank works out the plan from metadata alone. One small reduction in host memory per step then tells whether all ranks are
about to do the same; only when they are not do they compare notes, and either continue with what they have in common or raise
the same error.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch.distributed as dist

from ..errors import ConfigError, PlanError, PlanMismatchError
from ..layout import Layout, Mesh
from ..matrices import MatrixSet
from ..ortho import expected_flops
from ..params.dtensors import ReplicaGroup, connected_ranks, groups_of, layouts_of, replica_ranks, replicated_layout, siblings
from ..plan import NO_WAVE, Plan, PlannedParam, PlanOptions, cost_model_for, make_plan
from ..torch_compat import warn_if_untested
from ..transport import Exchange, Vote
from .descriptions import description, failure_text, how, owners
from .differences import (
    PRESENT,
    Note,
    differing_state,
    lost_by_owners,
    other_optimizer,
    other_step,
    raise_failures,
    raise_lost_state,
    raise_mismatch,
    raise_other_plan,
    raise_torn_replicas,
)
from .identity import Optimizer, Pairing, place_of
from .link import Home, Link
from .plan_input import PlanInput

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..agree.state_presence import StatePresence

__all__ = ["PlanInput", "Planner", "RankStatus", "StepDecision"]

_FAILED, _READY = -1, 1
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What all ranks have agreed to do.

    Attributes:
        plan: the plan. ``plan.params[i]``, ``members[i]`` and the executor's ``step_params[i]`` are about the same parameter.
        members: for each parameter of the plan, the index of its plan input and the index of its part in ``matrices`` there.
        zeros: indices of the plan inputs whose gradient only other ranks have; here it is zeros.
        exchange: how pieces travel; None when none does.
        rank: this rank.
        prepares: some rank must make new buffers; all ranks then confirm that they are ready.
        nonfinite: some rank has a gradient that must not be used; all skip the step.
        busy: some rank has more to do than create state.
        repeats: several ranks compute the same matrix, each for itself.
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


class RankStatus(NamedTuple):
    """What a rank tells the others before a step, beside its plan inputs.

    Attributes:
        prepared_plan: the plan that it has buffers for.
        nonfinite: it has a gradient that must not be used.
        busy: it has more to do than create state.
        hyperparameters: those of each param group as text; ranks that share its parameters must have the same.
        without_state: indices of the plan inputs whose state it would start at zero.
        presence: which state it has; looked at only where ranks differ.
    """

    prepared_plan: Plan | None
    nonfinite: bool
    busy: bool
    hyperparameters: Sequence[str]
    without_state: Sequence[int]
    presence: StatePresence


class Planner:
    """Plans when something has changed, and has the ranks agree before anything is written."""

    def __init__(
        self,
        options: PlanOptions,
        form: str,
        path: str,
        replica_group: ReplicaGroup | None,
        optimizer: Callable[[], Optimizer | None],
        *,
        reduced: bool = True,
    ) -> None:
        self._options, self._form, self._path, self._replica_group = options, form, path, replica_group
        self._optimizer = optimizer  # whose planner this is: a weak reference, which does not keep it alive
        self._pairing = Pairing()
        self._reduced = reduced  # whether replicas come with equal gradients, or each with its own
        self._home = Home()
        self._link: Link | None = None
        self._agreed: tuple[PlanInput, ...] | None = None
        self.plan_inputs: tuple[PlanInput, ...] = ()
        self._decision: StepDecision | None = None
        self._token = 0
        self._meshes: dict[DeviceMesh, tuple[Mesh, ...]] = {}
        self._replicas: list[tuple[int, ...]] = []
        self._layouts: list[tuple[Layout, ...]] = []
        self._groups: tuple[tuple[int, int], ...] = ()  # of the parameters that ranks share: from which on, which group
        self._misfit: Exception | None = None

    def begin(self) -> None:
        """A step begins. Calls that end before ranks can agree count too: on other ranks they may not have ended so."""
        self._pairing = Pairing(self._pairing.number, self._pairing.steps + 1)

    def begin_anew(self) -> None:
        """What was stepped so far counts no more: a state is loaded."""
        self._pairing = Pairing()

    def decide(self, plan_inputs: tuple[PlanInput, ...], failure: Exception | None, status: RankStatus) -> StepDecision:
        """What all ranks do about their parameters in this step.

        Args:
            plan_inputs: this rank's parameters.
            failure: this rank's own reason not to step, which then is every rank's.
            status: what else this rank tells the others.
        """
        if self._link is not None:
            self.check_connected()
        if plan_inputs != self._agreed:
            self._propose(plan_inputs)
        failure = failure or self._misfit
        try:
            if self._link is not None:
                return self._vote(plan_inputs, failure, status)
            if failure is not None:
                raise failure
        finally:
            del failure  # an error that its own traceback holds would keep the caller alive
        assert self._decision is not None
        return self._decided(self._decision.plan is not status.prepared_plan, status.nonfinite, status.busy)

    def _vote(self, plan_inputs: tuple[PlanInput, ...], failure: Exception | None, status: RankStatus) -> StepDecision:
        """One reduction tells whether all ranks are about to do the same; where they are not, they compare notes."""
        assert self._link is not None
        self._home.check_process()
        prepares = self._decision is None or self._decision.plan is not status.prepared_plan
        texts = status.hyperparameters
        shared_texts = _without_repeats([(start, texts[index]) for start, index in self._groups]) if texts else ()
        facts = (self._token, shared_texts, self._who(), self._shared_among(status.without_state))
        token = _number_of(facts) if failure is None else _FAILED
        vote = Vote(token, prepares, status.nonfinite, status.busy, self._pairing.proposal())
        verdict = self._link.agreement.decide(vote)
        if not verdict.unanimous or failure is not None:
            try:
                self._compare_notes(plan_inputs, failure, shared_texts, status.presence)
            finally:
                del failure
        self._pairing = self._pairing.joined(verdict.number)
        prepares = verdict.prepares or not verdict.unanimous  # ranks that compare notes all make a new plan
        return self._decided(prepares, verdict.nonfinite, verdict.busy)

    def _decided(self, prepares: bool, nonfinite: bool, busy: bool) -> StepDecision:
        assert self._decision is not None
        steady = not prepares and not nonfinite and busy
        return self._decision if steady else replace(self._decision, prepares=prepares, nonfinite=nonfinite, busy=busy)

    def confirm(self, failure: Exception | None) -> None:
        """All ranks are ready for the step, or all raise the first one's reason why it is not."""
        if self._link is None:
            if failure is not None:
                try:
                    raise failure
                finally:
                    del failure
            return
        verdict = self._link.agreement.decide(Vote(_READY if failure is None else _FAILED))
        if not verdict.unanimous or failure is not None:
            raise_failures(self._link.agreement.everyone(Note(failure_text(failure))), failure)
            raise PlanMismatchError("some ranks are ready for a step that others have not begun: call step() equally often.")

    def _propose(self, plan_inputs: tuple[PlanInput, ...]) -> None:
        """This rank's own idea of the plan."""
        self._agreed = self._decision = self._misfit = None  # nothing half made survives an error
        meshes = dict.fromkeys(plan_input.mesh for plan_input in plan_inputs if plan_input.mesh is not None)
        self._meshes = {mesh: siblings(mesh) for mesh in meshes}
        if self._replica_group is not None:
            self.check_connected()
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
            self._home.check_process()
            self.check_connected()
            existing = [group for mesh in meshes for group in groups_of(mesh)]
            self._link = Link(ranks, [*groups_of(self._replica_group), *existing])
            self._pairing = Pairing(steps=1)  # with these ranks it is the first
        try:
            self._plan(plan_inputs, frozenset(ranks))
        except Exception as error:  # the others wait to hear of it
            self._misfit = error

    def _plan(self, plan_inputs: tuple[PlanInput, ...], reached: frozenset[int]) -> None:
        self._options = replace(self._options, cost=cost_model_for(plan_inputs[0].device.type)) if plan_inputs else self._options
        self._layouts = [self._layouts_of(plan_input, reached) for plan_input in plan_inputs]
        shared = (plan_input.group_index for plan_input, layouts in zip(plan_inputs, self._layouts, strict=True) if layouts)
        self._groups = _without_repeats(list(enumerate(shared)))
        self._misfit = self._find_misfit(plan_inputs)
        self._settle(plan_inputs, [plan_input.has_grad for plan_input in plan_inputs])

    def _settle(self, plan_inputs: tuple[PlanInput, ...], active: Sequence[bool], whose: object = None) -> None:
        """Plans a step on the ``active`` parameters.

        ``whose`` tells which rank has which gradient where ranks differ: as soon as that changes on any of them, its number is
        another and all look again whether replicas still have the same gradients.
        """
        chosen = [
            (k, part, entry)
            for k, parts in enumerate(self._entries(plan_inputs))
            for part, entry in enumerate(parts)
            if active[k]
        ]
        zeros = frozenset(k for k, plan_input in enumerate(plan_inputs) if active[k] and not plan_input.has_grad)
        plan = make_plan([entry for _, _, entry in chosen], self._options)
        exchange = None if self._link is None else self._link.exchange
        members = tuple((k, part) for k, part, _ in chosen)
        self._decision = StepDecision(plan, members, zeros, exchange, self._rank(), repeats=_repeats(plan))
        # What AdamW steps is no part of the plan, but ranks must agree on it as well.
        others = [active[k] for k, plan_input in enumerate(plan_inputs) if plan_input.matrices is None and self._layouts[k]]
        self._token = _number_of((self._path, plan.digest, others, whose, sum(map(bool, self._layouts))))
        self._agreed = self.plan_inputs = plan_inputs

    def _entries(self, plan_inputs: Sequence[PlanInput]) -> list[list[PlannedParam]]:
        """What the plan knows of each parameter; nothing of AdamW's and of those on meshes that do not touch this rank's."""
        ranks = (self._rank(),) if self._link is None else self._link.ranks
        return [
            [
                self._entry(plan_input, matrices, layouts, ranks)
                for matrices in plan_input.matrices or ()
                if plan_input.mesh is None or layouts
            ]
            for plan_input, layouts in zip(plan_inputs, self._layouts, strict=True)
        ]

    def _entry(
        self, plan_input: PlanInput, matrices: MatrixSet, layouts: tuple[Layout, ...], ranks: tuple[int, ...]
    ) -> PlannedParam:
        return PlannedParam(
            name=plan_input.name,
            layouts=layouts or (replicated_layout(plan_input.shape, ranks),),
            stack_dims=matrices.stack_dims,
            lane=(plan_input.device.type, str(plan_input.comm_dtype), str(plan_input.update_dtype)),
            itemsize=plan_input.comm_dtype.itemsize,
            flops=expected_flops(matrices.rows, matrices.cols, plan_input.scheme, self._form, plan_input.compute_dtype),
            share=True if plan_input.mesh is None else None,
            private=not layouts and self._link is not None,  # one rank alone shares all it knows
            window=matrices.window,
            how=how(plan_input),
        )

    def _layouts_of(self, plan_input: PlanInput, reached: frozenset[int]) -> tuple[Layout, ...]:
        if plan_input.mesh is not None:
            return layouts_of(plan_input.name, plan_input.shape, plan_input.placements, self._meshes[plan_input.mesh], reached)
        return tuple(replicated_layout(plan_input.shape, ranks) for ranks in self._replicas if not reached.isdisjoint(ranks))

    def _reach(self) -> tuple[int, ...]:
        """All ranks that share a mesh or a replica group with this one, directly or through others."""
        meshes = [mesh.ranks for alike in self._meshes.values() for mesh in alike]
        return connected_ranks(self._rank(), [*meshes, *self._replicas])

    def _find_misfit(self, plan_inputs: Sequence[PlanInput]) -> PlanError | None:
        """A local tensor that is not what its placements say; only the ranks that hold it can see it."""
        for plan_input, layouts in zip(plan_inputs, self._layouts, strict=True):
            own = [layout.local_shape(self._rank()) for layout in layouts if self._rank() in layout.mesh.ranks]
            if own and own[0] != plan_input.local_shape and math.prod(own[0]) + math.prod(plan_input.local_shape) > 0:
                return PlanError(
                    f"{plan_input.name} is {'; '.join(map(str, layouts))}, so that this rank should hold {own[0]}, but it holds "
                    f"{plan_input.local_shape}. Some wrappers (FSDP2 over tensor parallelism with rows that do not divide) store "
                    "other shards than their placements say: choose sizes that divide, or shard another dim."
                )
        return None

    def _who(self) -> tuple[int, ...]:
        """Which optimizer this is, and how often it was stepped."""
        pairing = self._pairing
        return (pairing.number, pairing.steps) if pairing.number else (pairing.steps, *place_of(self._optimizer()))

    def _shared_among(self, indices: Sequence[int]) -> tuple[int, ...]:
        """The demands of ``indices`` that ranks share, by their place among all that they share."""
        if not indices:
            return ()
        shared = (k for k, layouts in enumerate(self._layouts) if layouts)
        at = {k: position for position, k in enumerate(shared)}
        return tuple(at[k] for k in indices if k in at)

    def check_connected(self) -> None:
        """Refuses to talk over groups of an earlier ``init_process_group``."""
        self._home.check_connected(plain=not self._meshes and self._replica_group is not None)

    def _rank(self) -> int:
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def _compare_notes(
        self,
        plan_inputs: tuple[PlanInput, ...],
        failure: Exception | None,
        common: tuple[tuple[int, str], ...],
        presence: StatePresence,
    ) -> None:
        """Ranks differ: finds out in what, and either settles on one plan or raises the same error everywhere."""
        assert self._link is not None
        agreement = self._link.agreement
        if failure is not None:  # all that the others will look at
            raise_failures(agreement.everyone(Note(failure_text(failure))), failure)
        shared = [k for k, layouts in enumerate(self._layouts) if layouts]
        entries = self._entries(plan_inputs)
        note = Note(
            failure=None,
            options=f"{self._options}, form={self._form!r}, {self._path}",
            parameters=tuple(description(plan_inputs[k], self._layouts[k], entries[k]) for k in shared),
            active=tuple(plan_inputs[k].has_grad for k in shared),
            numbers=common,
            pairing=self._pairing,
            place=place_of(self._optimizer()),
            state="".join(presence.presence(k) for k in shared),
        )
        notes = agreement.everyone(note)
        raise_failures(notes, failure)
        self._refuse_strangers(notes)
        raise_mismatch(notes)
        if self._reduced:
            raise_torn_replicas(
                {rank: one.active for rank, one in notes.items()}, [(plan_inputs[k].name, self._layouts[k]) for k in shared]
            )
        union = [any(flags) for flags in zip(*(one.active for one in notes.values()), strict=True)]
        self._refuse_lost_state(plan_inputs, {rank: one.state for rank, one in notes.items()}, union, presence)
        active = [plan_input.has_grad for plan_input in plan_inputs]
        for k, flag in zip(shared, union, strict=True):
            active[k] = flag
        flags = {rank: one.active for rank, one in sorted(notes.items())}
        try:
            self._settle(plan_inputs, active, None if len(set(flags.values())) == 1 else flags)
        except Exception as error:  # the others wait to hear of it
            failure = error
        raise_failures(agreement.everyone(Note(failure_text(failure))), failure)
        assert self._decision is not None
        raise_other_plan(agreement.everyone((self._token, owners(self._decision.plan))))

    def _refuse_strangers(self, notes: Mapping[int, Note]) -> None:
        """All ranks must step the same optimizer, and must have done so equally often."""
        number, steps = self._pairing
        if (stranger := other_optimizer(notes)) is not None:
            self._pairing = Pairing(number, steps - 1)  # as if it had not been tried: in the right order it will be
            raise stranger
        if (late := other_step(notes)) is not None:
            self._pairing = Pairing(number, max(note.pairing.steps for note in notes.values()))  # told once, then together
            raise late

    def _refuse_lost_state(
        self, plan_inputs: Sequence[PlanInput], states: Mapping[int, str], active: Sequence[bool], presence: StatePresence
    ) -> None:
        """State that some ranks would begin anew must not be under way on others."""
        assert self._link is not None
        shared = [k for k, layouts in enumerate(self._layouts) if layouts]
        names = [plan_inputs[k].name for k in shared]
        if differing := differing_state(states, active):
            mine = states[self._rank()]
            begun = tuple(position for position in differing if mine[position] == PRESENT and presence.begun(shared[position]))
            raise_lost_state(names, states, self._link.agreement.everyone(begun))
        if not self._reduced:
            raise_lost_state(names, states, lost_by_owners(states))


def _without_repeats(items: Sequence[tuple[int, _T]]) -> tuple[tuple[int, _T], ...]:
    """The items whose second part differs from that of the item before."""
    return tuple(item for k, item in enumerate(items) if k == 0 or item[1] != items[k - 1][1])


def _number_of(facts: object) -> int:
    """A number below 2**60 that is equal for equal facts, on every rank."""
    return int(hashlib.sha256(repr(facts).encode()).hexdigest()[:15], 16)


def _repeats(plan: Plan) -> bool:
    """Whether ranks compute a matrix that others compute as well."""
    shared = [task for task in plan.tasks if not plan.params[task.param].private]
    return len({(task.param, task.matrix) for task in shared}) < len(shared) or any(
        task.wave == NO_WAVE and len(task.sharded.piece_and_replica) > 1 for task in shared
    )
