"""Numbers as people write them."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """``"12.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


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
