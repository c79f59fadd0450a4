"""How the benchmarks' figures look: grey on nothing, to read on light and on dark pages, with plain numbers on the
axes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TEXT = ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color")
STYLE: dict[Any, Any] = {
    **dict.fromkeys(_TEXT, "#7a7a7a"),
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), "none"),
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
}
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def plain_number(value: float) -> str:
    """A tick as people write it: 0.25, 64, 10,000; powers of ten only where a row of zeros would have to be counted.

    >>> [plain_number(value) for value in (0.001, 0.25, 64, 4096, 100000, 1e-6)]
    ['0.001', '0.25', '64', '4,096', '100,000', '10⁻⁶']
    """
    if value and not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        power = "10" + str(int(exponent)).translate(_SUPERSCRIPTS)
        return power if float(mantissa) == 1 else f"{float(mantissa):g}·{power}"
    return f"{value:,.4f}".rstrip("0").rstrip(".") if abs(value) < 10 else f"{value:,.0f}"


def log_axis(axes: Axes, which: str, ticks: list[float] | None = None) -> None:
    """A logarithmic axis, ``"x"`` or ``"y"``, with plain numbers at ``ticks``, or at 1, 2 and 5 times the powers of
    ten.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log") if which == "x" else axes.set_yscale("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    narrow = high / low < 1e3
    axis.set_major_locator(
        FixedLocator(ticks) if ticks else LogLocator(subs=(1.0, 2.0, 5.0) if narrow else (1.0,), numticks=12)
    )
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def draw(plot: Callable[[Figure], None], size: tuple[float, float], path: Path) -> None:
    """Lets ``plot`` draw on a figure of ``size`` inches and writes it."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        plot(figure)
        figure.savefig(path, dpi=130)
