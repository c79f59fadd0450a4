"""Axes of the benchmarks' figures carry plain numbers, on white."""

from __future__ import annotations

from pathlib import Path

import pytest
from figures import draw, log_axis, plain_number
from matplotlib.figure import Figure
from matplotlib.image import imread


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.001, "0.001"),
        (0.25, "0.25"),
        (1.5, "1.5"),
        (64, "64"),
        (4096, "4,096"),
        (1e5, "100,000"),
        (2e7, "2·10⁷"),
        (1e-6, "10⁻⁶"),
    ],
)
def test_plain_numbers(value: float, shown: str) -> None:
    assert plain_number(value) == shown


def test_a_logarithmic_axis_and_the_background(tmp_path: Path) -> None:
    labels: list[str] = []

    def plot(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot([64, 4096], [0.5, 20])
        log_axis(axes, "x", [64.0, 4096.0])
        log_axis(axes, "y")
        figure.draw_without_rendering()
        labels.extend(text.get_text() for axis in (axes.xaxis, axes.yaxis) for text in axis.get_ticklabels())

    draw(plot, (3, 2), tmp_path / "a.png")
    assert {"64", "4,096", "0.5", "1", "2", "10"} <= set(labels)
    assert (imread(tmp_path / "a.png")[0, 0] == 1).all()  # white and opaque
