"""Figures that read on light and on dark pages: no background, grey text, colours of middle brightness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GREY = "#7a7a7a"  # 4.3 times as bright as Furo's dark page, and white is 4.3 times as bright
_TEXT = (
    "text.color",
    "axes.labelcolor",
    "axes.titlecolor",
    "axes.edgecolor",
    "xtick.color",
    "ytick.color",
    "grid.color",
)
STYLE: dict[Any, Any] = {
    **dict.fromkeys(_TEXT, GREY),
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor", "legend.facecolor"), "none"),
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.4,
    "legend.frameon": False,
}


@contextmanager
def drawing(path: Path, size: tuple[float, float], dpi: int) -> Iterator[Figure]:
    """A figure of ``size`` inches, written to ``path`` at the end of the ``with``."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, dpi=dpi)
