"""Words for wrong names and numbers: what was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``" Did you mean x?"`` for the known name that looks most like ``name``; empty if none does."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def nearest(numbers: Iterable[int], wanted: int) -> str:
    """A few numbers around ``wanted``, as text: "16, 32 or 64"."""
    closest = sorted(sorted(numbers, key=lambda number: abs(number - wanted))[:3])
    words = [str(number) for number in closest]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
