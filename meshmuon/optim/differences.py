"""What ranks tell each other when they disagree, and the error that all of them then raise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .. import errors
from ..errors import GradientError, MeshmuonError, PlanMismatchError, StateError
from ..layout import Layout

__all__ = ["Note", "raise_failures", "raise_mismatch", "raise_other_plan", "raise_torn_replicas", "to_tell"]


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Note:
    """One rank's view of a step.

    Attributes:
        failure: class and text of the error that keeps it from stepping.
        options: the optimizer's options that shape a plan.
        parameters: (name, all that must be equal) of each parameter on a mesh, in order.
        active: which of them have a gradient.
        numbers: (index of a parameter, hyperparameters of it and of those behind it).
    """

    failure: tuple[str, str] | None
    options: str = ""
    parameters: tuple[tuple[str, str], ...] = ()
    active: tuple[bool, ...] = ()
    numbers: tuple[tuple[int, str], ...] = ()


def raise_failures(notes: Mapping[int, Note], own: Exception | None) -> None:
    """Raises the first rank's failure on every rank, in the same words."""
    for rank, note in sorted(notes.items()):
        if note.failure is not None:
            kind, text = note.failure
            if not hasattr(errors, kind):
                text = f"{kind}: {text}"
            raise getattr(errors, kind, MeshmuonError)(f"rank {rank}: {text}") from own


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


def to_tell(failure: Exception, parted: bool) -> MeshmuonError:
    """What the other ranks hear of a step that failed on this one; once, unless its parameters have ``parted`` from theirs."""
    text = f"{type(failure).__name__}: {failure}"
    if not parted:
        return MeshmuonError(f"the step before this one failed: {text}")
    return StateError(
        f"an earlier step failed on this rank alone ({text}), so that its parameters are not those of the other ranks any more. "
        "Load a checkpoint of the model and of this optimizer on all ranks."
    )
