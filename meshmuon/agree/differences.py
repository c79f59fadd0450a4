"""What ranks tell each other when they disagree, and the error that all of them then raise.

Every function that compares notes gives the same result on every rank, since all ranks have the same notes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .. import errors
from ..errors import GradientError, MeshmuonError, PlanMismatchError, StateError
from ..layout import Layout
from ..transport import sendable
from .descriptions import BY_UNITS
from .identity import Pairing, Place
from .node_view import NodeView

# The state of a parameter on a rank: it would start at zero, it exists, or this rank does not keep it.
ABSENT, PRESENT, ELSEWHERE = "0", "1", "-"
_SHOWN = 4  # differences that an error names
_T = TypeVar("_T")
_NO_PAIRING, _ALONE = Pairing(), Place(0, 1)


@sendable
@dataclass(frozen=True, slots=True)
class Note:
    """One rank's view of a step."""

    # class and text of what keeps the rank from stepping; all other fields are empty then
    failure: tuple[str, str] | None
    options: str = ""  # those of the optimizer that shape a plan
    # name and description of each shared parameter; must be equal on all ranks
    parameters: tuple[tuple[str, str], ...] = ()
    has_grad: tuple[bool, ...] = ()  # which of these parameters have a gradient on this rank
    idle_steps: tuple[int, ...] = ()  # of each of them, as ``PlannedSet.idle_steps`` counts them
    # from which position on which hold: ((0, "lr=0.1"), (5, "lr=0.2"))
    hyperparameters: tuple[tuple[int, str], ...] = ()
    pairing: Pairing = _NO_PAIRING
    place: Place = _ALONE
    # what the rank knows of nodes; the first note of ranks that disagree has nothing else
    node_view: NodeView | None = None
    state: str = ""  # one letter per parameter, ABSENT, PRESENT or ELSEWHERE: "110-"


def raise_failures(notes: Mapping[int, Note], own_failure: Exception | None) -> None:
    """Raises the failure of the first rank that has one, on every rank and with the same text, from this rank's own
    failure.
    """
    for rank, note in sorted(notes.items()):
        if note.failure is not None:
            kind, text = note.failure
            if not hasattr(errors, kind):
                text = f"{kind}: {text}"
            raise getattr(errors, kind, MeshmuonError)(f"rank {rank}: {text}") from own_failure


def other_optimizer(notes: Mapping[int, Note]) -> PlanMismatchError | None:
    """The error for ranks that step different optimizers, as far as they can know.

    Two ranks that both have a shared id compare their ids. Otherwise they compare the positions of their optimizers
    among those that look the same, provided that both ranks have equally many.
    """
    for rank, note in sorted(notes.items()):
        for other in sorted(earlier for earlier in notes if earlier < rank):
            ids = {note.pairing.shared_id, notes[other].pairing.shared_id}
            place, other_place = note.place, notes[other].place
            misplaced = place.lookalikes == other_place.lookalikes and place != other_place
            if misplaced if 0 in ids else len(ids) == 2:
                return PlanMismatchError(
                    f"rank {rank} steps another optimizer than rank {other}, and gradients of different parameters "
                    "would be mixed. Step several optimizers in the same order on every rank, and each equally often."
                )
    return None


def other_step(notes: Mapping[int, Note]) -> PlanMismatchError | None:
    """The error for ranks that have stepped the same optimizer a different number of times."""
    steps = {rank: note.pairing.steps for rank, note in notes.items()}
    if len({note.pairing.shared_id for note in notes.values()}) > 1 or len(set(steps.values())) == 1:
        return None
    usual_rank, usual = _usual(steps)
    rank = min(rank for rank, count in steps.items() if count != usual)
    return PlanMismatchError(
        f"rank {rank} is at call {steps[rank]} of this optimizer's step() since the ranks first stepped it together, "
        f"rank {usual_rank} at call {usual}: calls have ended on one rank alone, in its closure for example, and "
        "gradients of different batches would be mixed. Call step() equally often on every rank, and prepare() on all "
        "ranks or on none."
    )


def raise_lost_state(
    names: Sequence[str],
    notes: Mapping[int, Note],
    gather_begun: Callable[[list[int]], Mapping[int, Sequence[int]]],
    *,
    kept_by_owners: bool,
) -> None:
    """Raises if a parameter that is stepped has state on some ranks and none on others that should have it.

    A state of zeros is the same as none: for the positions of such parameters, ``gather_begun`` returns, by rank, those
    whose state is more than that. Where owners alone keep state, no other rank has a copy to compare with: it counts as
    lost if owners of other parameters still have theirs.
    """
    states, positions = sorted((rank, note.state) for rank, note in notes.items()), range(len(names))
    present, absent = (
        [[rank for rank, state in states if state[k] == letter] for k in positions] for letter in (PRESENT, ABSENT)
    )
    active = [any(note.has_grad[k] for note in notes.values()) for k in positions]
    differing = [k for k in positions if active[k] and present[k] and absent[k]]
    lost = [(k, rank) for rank, begun in sorted(gather_begun(differing).items()) for k in begun] if differing else []
    if kept_by_owners:
        kept = [present[k][0] for k in positions if 0 < len(present[k]) < len(notes) and not absent[k]]
        alone = [k for k in positions if active[k] and 0 < len(absent[k]) < len(notes) and not present[k]]
        lost += [(k, kept[0]) for k in alone if kept]
    for k, rank in lost:
        raise StateError(
            f"{names[k]} has no state on rank {absent[k][0]} and would restart there from zero, while rank {rank} has "
            "state and would continue. Load a checkpoint on every rank. To restart it on purpose, delete its entry in "
            "optimizer.state on every rank."
        )


def raise_other_progress(names: Sequence[str], progress: Mapping[int, Sequence[str]]) -> None:
    """Raises if ranks have loaded states of different steps; ``progress`` is ``StatePresence.progress`` of each
    rank.
    """
    first = min(progress)
    for position, name in enumerate(names):
        texts = {rank: of_rank[position] or "no steps" for rank, of_rank in sorted(progress.items())}
        for rank, text in texts.items():
            if text != texts[first]:
                raise StateError(
                    f"{name}: the state of rank {first} has {texts[first]}, that of rank {rank} {text}. The ranks "
                    "have loaded states of different steps: load the same checkpoint on every rank."
                )


def raise_mismatch(notes: Mapping[int, Note]) -> None:
    """Raises if ranks have different parameters, options or hyperparameters; names a rank and the first difference.

    What most ranks have counts as usual, and the first of these ranks as the usual rank, with which the error compares.
    """
    usual_rank, _ = _usual(
        {rank: (note.options, note.parameters, note.hyperparameters) for rank, note in notes.items()}
    )
    usual = notes[usual_rank]
    for rank, note in sorted(notes.items()):
        if note.options != usual.options:
            text, usual_text = _what_differs(note.options, usual.options)
            raise PlanMismatchError(
                f"rank {rank} was given {text}, rank {usual_rank} {usual_text}: give all ranks the same options."
            )
        if note.parameters != usual.parameters:
            raise PlanMismatchError(_first_difference(rank, note.parameters, usual_rank, usual.parameters))
        for index in sorted({start for start, _ in (*note.hyperparameters, *usual.hyperparameters)}):
            text, usual_text = _text_at(note.hyperparameters, index), _text_at(usual.hyperparameters, index)
            if text != usual_text:
                text, usual_text = _what_differs(text, usual_text)
                raise PlanMismatchError(
                    f"{note.parameters[index][0]}: rank {rank} steps it with {text}; rank {usual_rank} with "
                    f"{usual_text}. Set the same hyperparameters on every rank."
                )


def _what_differs(*texts: str) -> tuple[str, ...]:
    """What only one of two texts says: ("lr=0.2", "lr=0.1") of "lr=0.2, betas=(0.9, 0.95)" and "lr=0.1, betas=(0.9,
    0.95)".
    """
    items = [_items(text) for text in texts]
    own = [[item for item in items[k] if item not in items[1 - k]] for k in range(2)]
    more = [f" and {len(only) - _SHOWN} more" if len(only) > _SHOWN else "" for only in own]
    return tuple((", ".join(only[:_SHOWN]) or "no such option") + rest for only, rest in zip(own, more, strict=True))


def _items(text: str) -> list[str]:
    """What commas separate, except inside brackets."""
    items, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items]


def _text_at(hyperparameters: Sequence[tuple[int, str]], index: int) -> str:
    return next((text for start, text in reversed(hyperparameters) if start <= index), "")


def raise_other_plan(plans: Mapping[int, tuple[int, Sequence[tuple[str, str]]]]) -> None:
    """Raises if ranks made different plans from the same parameters; names the first matrix that they treat
    differently.

    ``plans`` has, by rank, the fingerprint of its proposal and its ``owner_assignments``.
    """
    usual_rank, usual = _usual({rank: fingerprint for rank, (fingerprint, _) in plans.items()})
    for rank, (fingerprint, assignments) in sorted(plans.items()):
        if fingerprint != usual:
            pairs = zip(assignments, plans[usual_rank][1], strict=False)
            whole_plans = (("the plan", str(fingerprint)), ("the plan", str(usual)))  # if the assignments do not differ
            (name, text), (_, usual_text) = next((pair for pair in pairs if pair[0] != pair[1]), whole_plans)
            raise PlanMismatchError(
                f"{name}: rank {rank} plans {text}, rank {usual_rank} plans {usual_text}, from the same parameters. "
                "Use one version of meshmuon on all ranks."
            )


def _usual(values: Mapping[int, _T]) -> tuple[int, _T]:
    """The first rank that has what most ranks have, and what that is; of equally frequent values the first."""
    usual = Counter(value for _, value in sorted(values.items(), key=lambda item: item[0])).most_common(1)[0][0]
    return min(rank for rank, value in values.items() if value == usual), usual


def _first_difference(
    rank: int, params: Sequence[tuple[str, str]], usual_rank: int, usual: Sequence[tuple[str, str]]
) -> str:
    for (name, text), (usual_name, usual_text) in zip(params, usual, strict=False):
        if name != usual_name:
            return (
                f"{usual_name}: rank {rank} has {name} in its place, rank {usual_rank} has {usual_name}. The "
                "parameters differ, or are in another order: build the same groups on every rank, and freeze the same "
                "parameters."
            )
        if text != usual_text:
            remedy = (
                "Not all of these CPUs multiply bfloat16: pass compute_dtype=torch.float32 on every rank."
                if (BY_UNITS in text) != (BY_UNITS in usual_text)
                else "Build the optimizer after every rank has sharded the model in the same way, with the same "
                "options for each "
                "group."
            )
            text, usual_text = _what_differs(text, usual_text)
            return f"{name}: rank {rank} has {text}; rank {usual_rank} has {usual_text}. {remedy}"
    longer, more = (rank, params) if len(params) > len(usual) else (usual_rank, usual)
    shorter = usual_rank if longer == rank else rank
    name = more[min(len(params), len(usual))][0]
    todo = "Add the same groups on every rank, and freeze the same parameters."
    return f"{name}: rank {longer} has it, rank {shorter} does not. {todo}"


def raise_unequal_replicas(
    has_grad_by_rank: Mapping[int, Sequence[bool]], parameters: Sequence[tuple[str, Sequence[Layout]]]
) -> None:
    """Raises if some holders of the same elements have a gradient and others have none: their replicas would diverge.

    Ranks that hold different elements may differ. A rank without a gradient then contributes zeros for its elements.
    ``has_grad_by_rank`` says which of the ``parameters`` (names and layouts) have a gradient on each rank.
    """
    for index, (name, layouts) in enumerate(parameters):
        if len({flags[index] for flags in has_grad_by_rank.values()}) == 1:
            continue
        for layout in layouts:
            for holders in layout.holders().values():
                compared = [rank for rank in holders if rank in has_grad_by_rank]
                having = [rank for rank in compared if has_grad_by_rank[rank][index]]
                lacking = [rank for rank in compared if not has_grad_by_rank[rank][index]]
                if having and lacking:
                    raise GradientError(
                        f"{name} has a gradient on rank {having[0]} and none on rank {lacking[0]}, which hold the "
                        "same elements. Replicas must have equal gradients: reduce them before step(), or set p.grad "
                        "= torch.zeros_like(p)."
                    )


def failure_for_other_ranks(failure: Exception, diverged: bool) -> MeshmuonError:
    """The error that the other ranks raise for a step that failed on this one; a StateError if replicas have
    ``diverged``.
    """
    text = f"{type(failure).__name__}: {failure}"
    if not diverged:
        return MeshmuonError(f"the step before this one failed: {text}")
    return StateError(
        f"an earlier step failed on this rank alone ({text}), so its parameters no longer equal those of the other "
        "ranks. Load a checkpoint of the model and of this optimizer on all ranks."
    )
