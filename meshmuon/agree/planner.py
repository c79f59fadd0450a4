"""The ranks agree on one plan for a step, or raise one error.

Each rank plans from metadata alone (``local_planner.py``). One small vote in host memory per step then tells whether
all ranks are about to do the same. If they are not, they exchange notes and either plan together or raise the same
error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch.distributed as dist

from ..errors import ConfigError, KeptError, MeshmuonError, PlanMismatchError
from ..layout import Layout
from ..params.dtensors import ReplicaGroup, groups_of
from ..params.param_record import ParamRecord
from ..torch_compat import warn_if_untested
from ..transport import Agreement, Exchange, Vote, exchange_group
from .descriptions import owner_assignments
from .differences import (
    PRESENT,
    Note,
    other_optimizer,
    other_step,
    raise_failures,
    raise_lost_state,
    raise_mismatch,
    raise_other_plan,
    raise_other_progress,
    raise_unequal_replicas,
)
from .identity import Home, Optimizer, Pairing, current_rank, place_of
from .local_planner import LocalPlanner, PlanSettings, Topology, fingerprint_of
from .node_view import NodeView, settled_nodes
from .planned_set import NOT_PLANNED
from .step_decision import Activity, RankStatus, StepDecision

_FAILED, _READY = -1, 1  # what a rank votes instead of a fingerprint, which is 0 or more


class Planner:
    """Plans steps, and has the ranks agree before anything is written.

    One planner belongs to one optimizer on one rank. The ranks that it plans with are those that the meshes of the
    parameters and the replica group connect to this one. On a single rank it plans without communicating.

    ``step()`` calls, on every one of these ranks and in this order:

    1. ``begin()``, once per step, before the closure runs. It counts the call, unless nothing will be stepped
       (``prepare()`` of the optimizer, which then calls the others as a step does), and does not communicate.
    2. ``agree(status)``, once per step, before anything is written. A rank that cannot step has its error in ``status``
       and still takes part. It plans, at the first step and whenever the records have changed, a parameter has its
       first gradient, or a considerable part of the plan has had none for long (``PlannedSet``); ranks that meet for
       the first time create their process groups. At every step the ranks vote, with seven integers in host memory. If
       the votes differ, the ranks first tell each other on which nodes they are, and vote again if some did not know
       that of all ranks. If the votes still differ, they gather their views and settle on one plan for all that any of
       them has planned. It returns the same ``StepDecision`` on all ranks, except for what belongs to a rank (``rank``,
       ``zeros``, parameters that only it knows), or raises the same error on all of them. If this rank leaves with an
       error of its own (Ctrl-C), the others do not wait.
    3. ``confirm(failure)``, only if ``decision.prepares``: after each rank has created its buffers, and before anything
       travels. One more vote. If a rank could not create its buffers, all ranks raise its error.
    4. ``end()``, once per step, also if it fails. It does not wait for other ranks.

    Between steps come ``forget_steps()``, on ranks that have loaded a state, and ``check_connected()``, before any
    other communication of the optimizer. Neither communicates.

    Args:
        settings: the options that shape a plan; ranks must agree on them.
        replica_group: the ranks over which plain tensors are replicated.
        optimizer: a weak reference to the optimizer, which the planner must not keep alive.
        reduced: whether replicas come with equal gradients; False where each rank brings its own and the step averages
            them.
    """

    def __init__(
        self,
        settings: PlanSettings,
        replica_group: ReplicaGroup | None,
        optimizer: Callable[[], Optimizer | None],
        *,
        reduced: bool = True,
    ) -> None:
        self._settings = settings
        self._replica_group = replica_group
        self._optimizer = optimizer
        self._reduced = reduced
        self._home = Home()
        self._pairing = Pairing()
        self._counts = 1  # what the present call adds to the number of steps
        self._agreement: Agreement | None = None  # None on a single rank
        self._exchange: Exchange | None = None  # over the process group of the agreement
        self._node_view: NodeView | None = None  # what this rank knows of the nodes of the ranks that agree
        self._on_meshes = False  # whether any parameter is on a mesh
        self._topology: Topology  # of the ranks that the parameters connect
        self._local: LocalPlanner | None = None  # None if the parameters could not be planned

    @property
    def layouts(self) -> Sequence[tuple[Layout, ...]]:
        """The layouts of each parameter of the last decision; none for parameters that only this rank knows."""
        return () if self._local is None else self._local.layouts

    @property
    def steps(self) -> int:
        """Number of this step, from 1 on, since the ranks last identified each other; the same on all ranks once
        they agree.
        """
        return self._pairing.steps + bool(self._pairing.shared_id)  # a common id is agreed on in the first step

    @property
    def shared_id(self) -> int:
        """The number that the ranks have agreed on and no other optimizer has; 0 on a single rank."""
        return self._pairing.shared_id

    def begin(self, *, counts: bool = True) -> None:
        """Counts a call of ``step()``, also one that fails before the ranks can agree: on other ranks it may have
        succeeded.
        """
        self._counts = int(counts)
        self._pairing = self._pairing._replace(steps=self._pairing.steps + self._counts)

    def agree(self, status: RankStatus) -> StepDecision:
        """Plans, and decides with all ranks what this step does; raises on all of them if they cannot agree."""
        try:
            counted = self._counted_votes(status)
        except MeshmuonError:
            raise
        except BaseException:
            if self._exchange is not None:
                self._exchange.abandon()
            raise
        if not counted.prepares and not counted.nonfinite and counted.has_work and counted.activity == Activity.ACTIVE:
            self._local_planner.count_step()  # which only runs the plan that it has
            return self._decision
        return replace(
            self._decision,
            prepares=counted.prepares,
            nonfinite=counted.nonfinite,
            has_work=counted.has_work,
            activity=Activity(counted.activity),
        )

    def confirm(self, failure: KeptError) -> None:
        """Returns on all ranks once all are ready for the step, or raises on all ranks the error of the first that is
        not.
        """
        if self._agreement is None:
            failure.raise_it()
        elif not self._agreement.decide(Vote(_FAILED if failure else _READY)).unanimous or failure:
            _raise_anyones(failure, self._agreement)
            raise PlanMismatchError(
                "some ranks are ready for a step that others have not begun: call step() equally often."
            )
        self._local_planner.count_step()

    def end(self) -> None:
        """The step is over, also one that has failed: other threads may step over the process group."""
        if self._agreement is not None:
            self._agreement.end_turn()

    def forget_steps(self) -> None:
        """Forgets the steps so far, because a state was loaded: the ranks identify each other again at the next
        step.
        """
        self._pairing = Pairing()

    def check_connected(self) -> None:
        """Raises if the process group that the optimizer was built in was destroyed, even if its connections still
        answer.
        """
        self._home.check_connected(plain=not self._on_meshes and self._replica_group is not None)

    # What one rank does by itself.

    @property
    def _local_planner(self) -> LocalPlanner:
        assert self._local is not None
        return self._local

    @property
    def _decision(self) -> StepDecision:
        assert self._local_planner.decision is not None
        return self._local_planner.decision

    def _connect(self, records: tuple[ParamRecord, ...]) -> Topology:
        """Finds the ranks to plan with, and creates the process groups to talk to them if they are not those of the
        last plan.
        """
        self._on_meshes = any(record.mesh is not None for record in records)
        if self._replica_group is not None:
            self.check_connected()
        topology = Topology.around(current_rank(), records, self._replica_group)
        if self._on_meshes or topology.replica_sets:
            warn_if_untested()
        ranks = topology.ranks
        if isinstance(self._replica_group, dist.ProcessGroup) and len(ranks) > len(topology.replica_sets[0]):
            raise ConfigError(
                f"replica_group has {len(topology.replica_sets[0])} ranks, but the meshes of other parameters connect "
                f"{list(ranks)}, some of which have other replica groups. Pass the mesh instead of the process group: "
                'replica_group=mesh["dp"] knows all of them.'
            )
        if len(ranks) == 1:
            self._agreement = self._exchange = self._node_view = None
        elif self._agreement is None or self._agreement.ranks != ranks:
            self._home.check_process()
            self.check_connected()
            existing = [process_group for mesh in topology.meshes for process_group in groups_of(mesh)]
            process_group = exchange_group(ranks, [*groups_of(self._replica_group), *existing])
            self._agreement, self._exchange, self._node_view = Agreement(process_group), Exchange(process_group), None
            self._pairing = Pairing(steps=self._counts)  # with these ranks it is the first step
        return topology

    def _propose_alone(self, status: RankStatus, failure: KeptError) -> None:
        """Proposes what this rank would do by itself; keeps an error for the vote, since the other ranks wait there."""
        with failure:
            if self._local is None:
                topology = self._topology
                if self._agreement is not None:
                    world = dist.get_world_size()
                    self._node_view = self._node_view or NodeView.from_environment(topology.rank, topology.ranks, world)
                    topology = replace(topology, nodes=self._node_view.nodes)
                local = LocalPlanner(status.records, self._settings, topology, self._exchange)
                local.check_shards()
                self._local = local
            self._local.propose(status.has_grad)

    def _vote(self, status: RankStatus, failure: KeptError) -> Vote:
        """What this rank is about to do. A single rank compares nothing."""
        fingerprint, proposed_id = _READY, 0
        if self._agreement is not None:
            fingerprint = _FAILED if failure else self._fingerprint(status)
            proposed_id = self._pairing.proposed_id()
        decision = None if self._local is None else self._local.decision
        prepares = decision is None or decision.plan is not status.prepared_plan
        return Vote(fingerprint, prepares, status.nonfinite, status.has_work, status.activity, proposed_id)

    def _fingerprint(self, status: RankStatus) -> int:
        """Of all that must be equal on all ranks in this step."""
        pairing, nodes = self._pairing, "" if self._node_view is None else self._node_view.compared
        identity = pairing if pairing.shared_id else (pairing.steps, *place_of(self._optimizer()))
        # Of all votes only the first after loading reads the state, which waits for the device.
        progress = () if pairing.shared_id else status.presence.progress(self._local_planner.shared)
        return fingerprint_of((*self._local_planner.compared(status), identity, nodes, progress))

    # What the ranks do together.

    def _counted_votes(self, status: RankStatus) -> Vote:
        """Compares with all ranks what each is about to do, and looks for the reason where they differ."""
        if self._agreement is not None:
            self.check_connected()
        if self._local is None or status.records != self._local.records:
            self._local = None
            self._topology = self._connect(status.records)
        else:
            self._local.records = status.records  # equal ones, perhaps of other tensors
        self._propose_alone(status, status.failure)
        agreement = self._agreement
        if agreement is None:
            status.failure.raise_it()
            return self._vote(status, status.failure)
        self._home.check_process()
        agreement.begin_turn()
        counted = agreement.decide(self._vote(status, status.failure))
        if not counted.unanimous or status.failure:
            # The error of one rank is raised by all, so that nothing else has to be compared.
            notes = _raise_anyones(status.failure, agreement, self._node_view)
            counted = self._vote_again(agreement, notes, status) or counted
        if not counted.unanimous:
            notes = self._compare_notes(agreement, self._local_planner, status)
            changed = self._plan_together(agreement, self._local_planner, notes, status)
            counted = counted._replace(prepares=changed or counted.prepares)
        if counted.proposed_id:  # some rank had no shared id; now all have this one
            self._pairing = Pairing(counted.proposed_id, steps=self._counts - 1)
        return counted

    def _vote_again(self, agreement: Agreement, notes: Mapping[int, Note], status: RankStatus) -> Vote | None:
        """Plans for the nodes that the ranks have told each other, and votes again; None if all ranks knew the same."""
        views = {rank: note.node_view for rank, note in notes.items() if note.node_view is not None}
        if len({view.compared for view in views.values()}) < 2:
            return None
        assert self._node_view is not None
        self._node_view, self._local = replace(self._node_view, nodes=settled_nodes(views)), None
        failure = KeptError()
        self._propose_alone(status, failure)
        counted = agreement.decide(self._vote(status, failure))
        if not counted.unanimous or failure:
            _raise_anyones(failure, agreement)
        return counted

    def _compare_notes(self, agreement: Agreement, local: LocalPlanner, status: RankStatus) -> dict[int, Note]:
        """Gathers every rank's view of the step; raises where ranks step other optimizers, parameters or
        hyperparameters.
        """
        note = replace(local.note(status), pairing=self._pairing, place=place_of(self._optimizer()))
        notes = agreement.all_gather_objects(note)
        if (mixed_up := other_optimizer(notes)) is not None:
            # This call is not counted: it will be repeated in the right order.
            self._pairing = self._pairing._replace(steps=self._pairing.steps - self._counts)
            raise mixed_up
        if (out_of_step := other_step(notes)) is not None:
            # Raised once: from here on all ranks count from the largest number of steps.
            self._pairing = self._pairing._replace(steps=max(of_rank.pairing.steps for of_rank in notes.values()))
            raise out_of_step
        raise_mismatch(notes)
        if any(not of_rank.pairing.shared_id for of_rank in notes.values()):  # some rank has loaded a state
            progress = agreement.all_gather_objects(status.presence.progress(local.shared))
            raise_other_progress([name for name, _ in note.parameters], progress)
        return notes

    def _plan_together(
        self, agreement: Agreement, local: LocalPlanner, notes: Mapping[int, Note], status: RankStatus
    ) -> bool:
        """Plans all that is planned on any rank, and checks that all ranks have made the same plan.

        What is planned follows from the notes alone, so that ranks with different histories make the same plan. Returns
        whether the plan of any rank has changed.
        """
        names = [local.records[index].name for index in local.shared]
        flags_by_rank = {rank: note.has_grad for rank, note in sorted(notes.items())}
        if self._reduced:
            raise_unequal_replicas(
                flags_by_rank, list(zip(names, (local.layouts[index] for index in local.shared), strict=True))
            )

        def gather_begun(positions: list[int]) -> dict[int, tuple[int, ...]]:
            kept = [k for k in positions if notes[current_rank()].state[k] == PRESENT]
            return agreement.all_gather_objects(tuple(k for k in kept if status.presence.begun(local.shared[k])))

        raise_lost_state(names, notes, gather_begun, kept_by_owners=not self._reduced)
        idle_steps = [note.idle_steps for note in notes.values()]
        failure = KeptError()
        with failure:  # the other ranks wait for this rank's note
            local.propose_together(status.has_grad, flags_by_rank, idle_steps)
        _raise_anyones(failure, agreement)
        raise_other_plan(agreement.all_gather_objects((local.fingerprint, owner_assignments(self._decision.plan))))
        return len({tuple(steps == NOT_PLANNED for steps in of_rank) for of_rank in idle_steps}) > 1


def _raise_anyones(failure: KeptError, agreement: Agreement, node_view: NodeView | None = None) -> dict[int, Note]:
    """Raises on all ranks the failure of the first rank that has one; returns the notes of ranks that have none."""
    notes = agreement.all_gather_objects(Note(failure.text, node_view=node_view))
    raise_failures(notes, failure.take())
    return notes
