"""What ranks tell each other when they disagree, and the error that all of them then raise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .. import errors
from ..errors import GradientError, MeshmuonError, PlanMismatchError, StateError
from ..layout import Layout
from .identity import Pairing, Place

__all__ = [
    "ABSENT",
    "ELSEWHERE",
    "PRESENT",
    "Note",
    "differing_state",
    "failure_for_other_ranks",
    "lost_by_owners",
    "other_optimizer",
    "other_step",
    "raise_failures",
    "raise_lost_state",
    "raise_mismatch",
    "raise_other_plan",
    "raise_torn_replicas",
]

ABSENT, PRESENT, ELSEWHERE = "0", "1", "-"  # of a parameter's state: to be begun, here, another rank's affair
_T = TypeVar("_T")
_NO_PAIRING, _ALONE = Pairing(), Place(0, 1)


@dataclass(frozen=True, slots=True)
class Note:
    """One rank's view of a step.

    Attributes:
        failure: class and text of the error that keeps it from stepping.
        options: the optimizer's options that shape a plan.
        parameters: (name, all that must be equal) of each parameter on a mesh, in order.
        active: which of them have a gradient.
        numbers: (index of a parameter, hyperparameters of it and of those behind it).
        pairing: which optimizer it steps, and how often it was stepped.
        place: the optimizer's place among those of its process that look alike.
        state: a letter for each of the parameters, whether its state is there.
    """

    failure: tuple[str, str] | None
    options: str = ""
    parameters: tuple[tuple[str, str], ...] = ()
    active: tuple[bool, ...] = ()
    numbers: tuple[tuple[int, str], ...] = ()
    pairing: Pairing = _NO_PAIRING
    place: Place = _ALONE
    state: str = ""


def raise_failures(notes: Mapping[int, Note], own: Exception | None) -> None:
    """Raises the first rank's failure on every rank, in the same words."""
    for rank, note in sorted(notes.items()):
        if note.failure is not None:
            kind, text = note.failure
            if not hasattr(errors, kind):
                text = f"{kind}: {text}"
            raise getattr(errors, kind, MeshmuonError)(f"rank {rank}: {text}") from own


def other_optimizer(notes: Mapping[int, Note]) -> PlanMismatchError | None:
    """The error of ranks that step different optimizers, as far as they can know."""
    for rank, note in sorted(notes.items()):
        for model in sorted(other for other in notes if other < rank):
            numbers = {note.pairing.number, notes[model].pairing.number}
            mine, its = note.place, notes[model].place
            same_number = len(numbers) == 1 and 0 not in numbers
            if (len(numbers) == 2 and 0 not in numbers) or (not same_number and mine.alike == its.alike and mine != its):
                return PlanMismatchError(
                    f"rank {rank} steps another optimizer than rank {model}, and gradients of different parameters would be "
                    "mixed. Step several optimizers in the same order on every rank, and each equally often."
                )
    return None


def other_step(notes: Mapping[int, Note]) -> PlanMismatchError | None:
    """The error of ranks that have stepped the same optimizer more or less often."""
    steps = {rank: note.pairing.steps for rank, note in sorted(notes.items())}
    if len({note.pairing.number for note in notes.values()}) > 1 or len(set(steps.values())) == 1:
        return None
    usual = _most(list(steps.values()))
    rank = next(rank for rank, count in steps.items() if count != usual)
    model = next(rank for rank, count in steps.items() if count == usual)
    return PlanMismatchError(
        f"rank {rank} is at call {steps[rank]} of this optimizer's step() since the ranks first stepped it together, rank "
        f"{model} at call {usual}: calls have ended on one rank alone, in its closure for example, and gradients of different "
        "batches would be mixed. Call step() equally often on every rank."
    )


def differing_state(states: Mapping[int, str], active: Sequence[bool]) -> list[int]:
    """Which of the ``active`` parameters have state on some ranks and should have it on others that have none."""
    letters = (set(one) for one in zip(*states.values(), strict=True))
    return [position for position, found in enumerate(letters) if active[position] and found >= {ABSENT, PRESENT}]


def lost_by_owners(states: Mapping[int, str]) -> dict[int, list[int]]:
    """State that only owners keep, of which nobody else can tell: it was there if that of other parameters is.

    Returns:
        By a rank that has other state, the parameters whose owners have lost theirs; empty when none is lost, or all.
    """
    letters = [set(one) for one in zip(*states.values(), strict=True)]
    lost, there = ([k for k, found in enumerate(letters) if found == {what, ELSEWHERE}] for what in (ABSENT, PRESENT))
    if not lost or not there:
        return {}
    return {next(rank for rank, one in sorted(states.items()) if one[there[0]] == PRESENT): lost}


def raise_lost_state(names: Sequence[str], states: Mapping[int, str], begun: Mapping[int, Sequence[int]]) -> None:
    """Raises when a parameter has state on some of the ranks that should have it and none on others.

    Args:
        names: of the parameters.
        states: by rank, a letter for each parameter.
        begun: by rank, what has more than zeros, which are the same as no state.
    """
    for rank, having in sorted(begun.items()):
        for position in having:
            lacking = [other for other, letters in sorted(states.items()) if letters[position] == ABSENT]
            if lacking:
                raise StateError(
                    f"{names[position]} has no state on rank {lacking[0]} and would restart there from zero, while rank {rank} "
                    "has state and goes on. Load a checkpoint on every rank; to restart it on purpose, delete its entry in "
                    "optimizer.state on every rank."
                )


def raise_mismatch(notes: Mapping[int, Note]) -> None:
    """Raises when ranks have different parameters or options, naming a rank and the first difference."""
    usual = _most(list(map(_facts, notes.values())))
    model = min(rank for rank, note in notes.items() if _facts(note) == usual)
    for rank, note in sorted(notes.items()):
        if note.options != usual[0]:
            raise PlanMismatchError(
                f"rank {rank} was given {note.options}, rank {model} {usual[0]}: give all ranks the same options."
            )
        if note.parameters != usual[1]:
            raise PlanMismatchError(_first_difference(rank, note.parameters, model, usual[1]))
        for k in sorted({start for start, _ in (*note.numbers, *usual[2])}):
            mine, other = _at(note.numbers, k), _at(usual[2], k)
            if mine != other:
                raise PlanMismatchError(
                    f"{note.parameters[k][0]}: rank {rank} steps it with {mine}; rank {model} with {other}. Set the same "
                    "hyperparameters on every rank."
                )


def _at(numbers: Sequence[tuple[int, str]], index: int) -> str:
    return next((text for start, text in reversed(numbers) if start <= index), "")


def raise_other_plan(made: Mapping[int, tuple[int, Sequence[tuple[str, str]]]]) -> None:
    """Raises when ranks made different plans from the same parameters, naming the first matrix that they treat differently.

    Args:
        made: by rank, the number of its plan and what the plan does with each matrix.
    """
    usual = _most([token for token, _ in made.values()])
    model = min(rank for rank, (token, _) in made.items() if token == usual)
    for rank, (token, owners) in sorted(made.items()):
        if token != usual:
            pairs = zip(owners, made[model][1], strict=False)
            mine, other = next((pair for pair in pairs if pair[0] != pair[1]), (("the plan", str(token)), ("", str(usual))))
            raise PlanMismatchError(
                f"{mine[0]}: rank {rank} plans {mine[1]}, rank {model} plans {other[1]}, from the same parameters. Use one "
                "version of meshmuon on all ranks."
            )


def _facts(note: Note) -> tuple[str, tuple[tuple[str, str], ...], tuple[tuple[int, str], ...]]:
    return note.options, note.parameters, note.numbers


def _most(things: Sequence[_T]) -> _T:
    """What most ranks have; the first of several."""
    return Counter(things).most_common(1)[0][0]


def _first_difference(rank: int, mine: Sequence[tuple[str, str]], model: int, usual: Sequence[tuple[str, str]]) -> str:
    for one, other in zip(mine, usual, strict=False):
        if one[0] != other[0]:
            return (
                f"{other[0]}: rank {rank} has {one[0]} in its place, rank {model} has {other[0]}. The parameters are in another "
                "order or are others: build the same groups on every rank."
            )
        if one != other:
            return (
                f"{one[0]}: rank {rank} has {one[1]}; rank {model} has {other[1]}. Build the optimizer after every rank has "
                "sharded the model in the same way, with the same options for each group."
            )
    longer, more = (rank, mine) if len(mine) > len(usual) else (model, usual)
    shorter = model if longer == rank else rank
    name = more[min(len(mine), len(usual))][0]
    return f"{name}: rank {longer} has it, rank {shorter} does not. Add the same groups on every rank."


def raise_torn_replicas(active: Mapping[int, Sequence[bool]], parameters: Sequence[tuple[str, Sequence[Layout]]]) -> None:
    """Raises when holders of the same elements differ in having a gradient: treated as zero, their replicas would part.

    Ranks that hold different elements may differ; a missing gradient is then zero for its elements.
    """
    for k, (name, layouts) in enumerate(parameters):
        if len({flags[k] for flags in active.values()}) == 1:
            continue
        for layout in layouts:
            for holders in layout.holders().values():
                having = [rank for rank in holders if rank in active and active[rank][k]]
                lacking = [rank for rank in holders if rank in active and not active[rank][k]]
                if having and lacking:
                    raise GradientError(
                        f"{name} has a gradient on rank {having[0]} and none on rank {lacking[0]}, which hold the same elements. "
                        "Replicas must have equal gradients: reduce them before step(), or set p.grad = torch.zeros_like(p)."
                    )


def failure_for_other_ranks(failure: Exception, parted: bool) -> MeshmuonError:
    """What the other ranks hear of a step that failed on this one; once, unless its parameters have ``parted`` from theirs."""
    text = f"{type(failure).__name__}: {failure}"
    if not parted:
        return MeshmuonError(f"the step before this one failed: {text}")
    return StateError(
        f"an earlier step failed on this rank alone ({text}), so that its parameters are not those of the other ranks any more. "
        "Load a checkpoint of the model and of this optimizer on all ranks."
    )
