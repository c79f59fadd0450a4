"""What a check is, and how one ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from .context import Context

# Skipped if it does not apply here; not run if an earlier check broke the connection between ranks.
Status = Literal["passed", "failed", "skipped", "not run"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one rank found, or what follows from the figures of all. It must survive JSON, since ranks tell each other."""

    detail: str  # what was checked or measured, in one sentence
    problems: Sequence[str] = ()  # what is wrong on this rank; the check fails if any rank has a problem
    figures: Mapping[str, Any] = field(default_factory=dict)  # of a measurement
    skipped: bool = False
    raised: bool = False  # an exception ended it on this rank, so that ranks may be out of step


@dataclass(frozen=True, slots=True)
class Check:
    """Something that all ranks do at the same time.

    Attributes:
        name: for ``--only`` and ``--skip``.
        title: what it shows.
        advice: what to do if it fails; ``{name}`` in it stands for the name.
        run: called on every rank.
        summarise: called on rank 0 with the figures of all ranks, in their order; None if there are no figures.
        fewest_ranks: with fewer, it is skipped.
        advice_if_stuck: what to do if it does not come to its end on some rank.
    """

    name: str
    title: str
    advice: str
    run: Callable[[Context], Finding]
    summarise: Callable[[Context, Sequence[Mapping[str, Any]]], Finding] | None = None
    fewest_ranks: int = 1
    advice_if_stuck: str = (
        "Look at the ranks that are named: their logs, their devices (nvidia-smi, dmesg) and their links. Then run it again with "
        "--only {name}, and with a larger --limit if it was only slow."
    )

    def advice_for(self, *, stuck: bool) -> str:
        """The advice as users read it; ``stuck`` if it has not come to its end on some rank."""
        return (self.advice_if_stuck if stuck else self.advice).replace("{name}", self.name)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a check ended on all ranks together."""

    name: str
    title: str
    status: Status
    seconds: float
    detail: str
    advice: str = ""  # empty unless it failed
    figures: Mapping[str, Any] = field(default_factory=dict)


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 0-2 and 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    numbers = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def by_text(texts: Mapping[int, Sequence[str]]) -> str:
    """What ranks say, equal sentences once: "rank 0: a; ranks 1-3: b"."""
    ranks: dict[str, list[int]] = {}
    for rank, sentences in sorted(texts.items()):
        for sentence in sentences:
            ranks.setdefault(sentence, []).append(rank)
    return "; ".join(f"{ranks_text(saying)}: {sentence}" for sentence, saying in ranks.items())
