"""Numbers as people write them, and words for wrong ones: what was probably meant."""

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


def seconds_text(seconds: float) -> str:
    """``"12.5 ms"``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def count_text(number: float) -> str:
    """``"8.03B"``, with three digits."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(number) >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def flops_text(number: float) -> str:
    """``"1.2 PFLOP"``."""
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}FLOP"
    return f"{number:.0f} FLOP"
