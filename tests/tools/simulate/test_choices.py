"""What a comparison of options suggests."""

from __future__ import annotations

from meshmuon.tools.simulate.advice import advice_from_choices
from meshmuon.tools.simulate.report import Figures


def row(label: str, seconds: float, *, refused: str = "") -> Figures:
    return Figures(label=label, chosen=label == "as chosen", seconds=seconds, memory=0, refused=refused)


def test_a_much_faster_option_is_named() -> None:
    (sentence,) = advice_from_choices([row("as chosen", 0.8), row('replicas="repeat"', 0.4), row("comm_dtype=float32", 0.9)])
    assert sentence.startswith('replicas="repeat" takes 400.00 ms instead of 800.00 ms, with 0 B of memory')
    assert "cost_model=" in sentence


def test_a_little_faster_refused_or_less_exact_is_not() -> None:
    slower = [row("memory_budget=256*2**20", 0.75), row('scheme="keller"', 0.1), row('replicas="share"', 0.0, refused="no")]
    assert advice_from_choices([row("as chosen", 0.8), *slower]) == []
    assert advice_from_choices([]) == []
