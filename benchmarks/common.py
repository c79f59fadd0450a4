"""What all benchmarks share: the run of a script, turns and medians, goals, and the files that a run leaves.

Importing this module first sets what torch reads when it starts.
"""

from __future__ import annotations

import os

# Some virtual machines advertise AMX but trap its instructions, which kills bfloat16 products on CPU.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX10_1_512")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own remarks
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # ranks share cores: threads that wait must sleep

import argparse
import io
import json
import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from meshmuon import Workspace
from meshmuon.ortho import (
    Orthogonalizer,
    Scheme,
    Scratch,
    blocks_for,
    call_scheme,
    iterate,
    reserve_scratch,
    scheme_for,
)
from meshmuon.ortho.kernels.products import products_for

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SCRATCH_RESULTS = ROOT / "runs" / "bench"
KELLER = (3.4445, -4.7750, 2.0315)

_Results = TypeVar("_Results")
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Median and quartiles of repeated measurements."""

    median: float
    low: float
    high: float
    count: int

    def text(self, scale: float = 1.0, digits: int = 3) -> str:
        """As ``median (low–high)``; without a spread when there is none."""
        middle = f"{self.median * scale:.{digits}f}"
        return middle if self.count < 2 else f"{middle} ({self.low * scale:.{digits}f}–{self.high * scale:.{digits}f})"


def quartiles(values: Sequence[float]) -> Quartiles:
    if len(values) < 2:
        return Quartiles(values[0], values[0], values[0], len(values))
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(middle, low, high, len(values))


@dataclass(frozen=True, slots=True)
class Step:
    """What is timed, and what is done before each time without being timed (fresh gradients)."""

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds of each round: on the clock, and of this process's CPU."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def clock(self) -> list[float]:
        """What ratios are made of: with one thread the CPU's seconds, which other processes do not lengthen."""
        return self.cpu if torch.get_num_threads() == 1 else self.wall

    def microseconds(self, count: int) -> dict[str, float]:
        """Medians per item of a step that works on ``count`` of them."""
        clocks = {"wall_us": self.wall, "cpu_us": self.cpu}
        return {name: quartiles(seconds).median / count * 1e6 for name, seconds in clocks.items()}

    def facts(self) -> dict[str, Any]:
        """As JSON has them."""
        return {"wall_s": asdict(quartiles(self.wall)), "cpu_s": asdict(quartiles(self.cpu))}


def race(
    steps: Mapping[str, Step],
    rounds: int,
    *,
    warmups: int = 1,
    seconds: float = math.inf,
    barrier: Callable[[], object] = lambda: None,
    shown: Callable[[str, Samples], None] = lambda name, samples: None,
    advance: Callable[[], object] = lambda: None,
) -> dict[str, Samples]:
    """Times all ``steps`` in turns, so that a busy machine slows all of them equally.

    Args:
        steps: the contenders.
        rounds: how often each has its turn. The order changes from round to round: none always follows the same one.
        warmups: rounds that are not counted.
        seconds: time after which no further round starts; the first one always runs.
        barrier: what all ranks do before a clock is read.
        shown: called with a contender's name and all of its samples whenever one is added.
        advance: called after each round, for a progress bar.
    """
    times = {name: Samples() for name in steps}
    names, begin = list(steps), time.perf_counter()
    for turn in range(-warmups, rounds):
        if turn > 0 and time.perf_counter() - begin > seconds:
            break
        for name in random.Random(turn).sample(names, len(names)):  # the same order on all ranks
            steps[name].before()
            barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name].run()
            barrier()
            if turn >= 0:
                times[name].wall.append(time.perf_counter() - wall)
                times[name].cpu.append(time.process_time() - cpu)
                shown(name, times[name])
        advance()
    return times


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> Quartiles:
    """``seconds`` ÷ ``reference``, round by round: what slows a whole round down cancels."""
    return quartiles([a / b for a, b in zip(seconds, reference, strict=True)])


def float32_newton_schulz(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """What torch.optim.Muon computes, with float32 instead of bfloat16 products."""
    a, b, c = coefficients
    x = grad.mT if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if grad.size(0) > grad.size(1) else x


# How far from orthogonal an update ends: measured by SVD, on spectra in [1e-3, 1] relative to the Frobenius norm, the
# range that all schemes promise to bring near 1.
LEAST = 1e-3  # smallest singular value ÷ Frobenius norm
SHAPE = (256, 512)


def _log_spaced(count: int) -> Tensor:
    """From the largest down to ``LEAST``, equal factors apart."""
    low, high = -8.0, 0.0  # of log10(smallest ÷ largest): find the ratio at which the smallest is LEAST of the norm
    for _ in range(60):
        middle = (low + high) / 2
        values = torch.logspace(0, middle, count, dtype=torch.float64)
        low, high = (middle, high) if values[-1] / values.norm() < LEAST else (low, middle)
    return torch.logspace(0, high, count, dtype=torch.float64)


def _spiked(count: int) -> Tensor:
    """One large value; all others are as small as the schemes allow."""
    values = torch.full((count,), LEAST * 1.01, dtype=torch.float64)
    values[0] = (1 - float(values[1:].square().sum())) ** 0.5
    return values


def _two_levels(count: int) -> Tensor:
    """A quarter large and equal, the rest small and equal."""
    values = torch.ones(count, dtype=torch.float64)
    values[count // 4 :] = 1.05 * LEAST * (count // 4) ** 0.5
    return values


def _low_rank(count: int) -> Tensor:
    """A quarter of the directions log-spaced, the others exactly zero."""
    values = torch.zeros(count, dtype=torch.float64)
    values[: count // 4] = _log_spaced(count // 4)
    return values


SPECTRA: dict[str, Callable[[int], Tensor]] = {
    "log-spaced": _log_spaced,
    "spiked": _spiked,
    "two levels": _two_levels,
    "low rank": _low_rank,
}


def matrix_with(values: Tensor, rows: int, cols: int, seed: int = 0) -> Tensor:
    """A rows × cols float32 matrix with these singular values and random directions."""
    generator = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64, generator=generator))
    right, _ = torch.linalg.qr(torch.randn(cols, len(values), dtype=torch.float64, generator=generator))
    matrix: Tensor = (left * (values / values.norm())) @ right.mT
    return matrix.float()


def worst_error(orthogonalise: Callable[[Tensor], Tensor], rows: int = SHAPE[0], cols: int = SHAPE[1]) -> float:
    """The largest distance from 1 at which a singular value ends, over all spectra; zero directions do not count."""
    worst = 0.0
    for spectrum in SPECTRA.values():
        values = spectrum(min(rows, cols))
        update = orthogonalise(matrix_with(values, rows, cols))
        ended = torch.linalg.svdvals(update.double())[: int(values.count_nonzero())]
        worst = max(worst, float((ended - 1).abs().max()))
    return worst


def prepare(
    batches: Sequence[Tensor], scheme: Scheme | Orthogonalizer, dtype: torch.dtype = torch.float32
) -> Callable[[], None]:
    """What orthogonalises all batches, (count, rows, cols), into memory of its own; they share one workspace."""
    workspace, outs = Workspace(), [torch.empty_like(batch) for batch in batches]
    chosen = [scheme_for(scheme, batch.size(1), batch.size(2), dtype) for batch in batches]
    for batch, own in zip(batches, chosen, strict=True):
        reserve_scratch(batch, own, form="auto", dtype=dtype, workspace=workspace)
    calls = [_call(batch, out, own, dtype, workspace) for batch, out, own in zip(batches, outs, chosen, strict=True)]

    def run() -> None:
        for call in calls:
            call()

    return run


def _call(
    batch: Tensor, out: Tensor, scheme: Scheme | Orthogonalizer, dtype: torch.dtype, workspace: Workspace
) -> Callable[[], None]:
    if not isinstance(scheme, Scheme):

        def call() -> None:
            out.copy_(call_scheme(scheme, batch))

    else:
        scratch, products = Scratch(workspace, batch, dtype, out), products_for(batch.device)
        blocks = blocks_for(batch.size(1), batch.size(2), scheme, form="auto", dtype=dtype)

        def call() -> None:
            iterate(batch, scheme.steps, blocks, scratch, products)

    return call


@dataclass(frozen=True, slots=True)
class Goal:
    """One line at the end of a run: a figure and what it should be."""

    text: str
    figure: float | None
    most: float | None = None
    least: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """``reached``, ``missed``, or ``not measured``."""
        if self.figure is None or math.isnan(self.figure):
            return "not measured"
        kept = (self.most is None or self.figure <= self.most) and (self.least is None or self.figure >= self.least)
        return "reached" if kept else "missed"

    def __str__(self) -> str:
        figure = "" if self.figure is None else f", {self.figure:.3g}"
        limit = f" (at most {self.most:g})" if self.most is not None else f" (at least {self.least:g})"
        return f"goal {self.text}{limit}: {self.verdict}{figure}{'; ' + self.note if self.note else ''}"


def machine_facts(threads: int) -> dict[str, Any]:
    """What a reader must know about the machine; no host names, no paths."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "blas": "MKL" if torch._C.has_mkl else "not MKL",
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "not set"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": threads,
    }


class Report:
    """What a run shows and leaves: tables on the screen and as text, figures as JSON, and a line per goal."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.console = Console(width=170)
        default = SCRATCH_RESULTS if options.quick else RESULTS
        self.folder: Path = options.out or default
        self.facts: dict[str, Any] = {
            "machine": machine_facts(options.threads),
            "options": {
                key: str(value) if isinstance(value, Path) else value
                for key, value in vars(options).items()
                if key != "out"
            },
            "load_before": os.getloadavg()[0],
        }
        self._tables: list[Table] = []
        self._notes: list[str] = []
        self._begin = time.perf_counter()

    def table(self, title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
        """Shows a table and keeps it for the text file."""
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)
        self._tables.append(table)

    def note(self, text: str) -> None:
        """Shows a line that belongs to the figures and keeps it for the text file."""
        self.console.print(text, markup=False, highlight=False)
        self._notes.append(text)

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[Callable[..., None]]:
        """A progress bar; yields what advances it by one, or only changes its ``description=`` when given one."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(description, total=total)

            def advance(description: str | None = None) -> None:
                if description is None:
                    bar.advance(task)
                else:
                    bar.update(task, description=description)

            yield advance

    def each(self, items: Sequence[_Item], label: Callable[[_Item], str]) -> Iterator[_Item]:
        """The items one after the other, with a progress bar that names the current one."""
        with self.progress("", len(items)) as advance:
            for item in items:
                advance(description=label(item))
                yield item
                advance()

    def finish(self, results: object, goals: Sequence[Goal]) -> None:
        """Writes everything."""
        self.facts |= {
            "load_after": os.getloadavg()[0],
            "seconds": round(time.perf_counter() - self._begin, 1),
            "notes": self._notes,
            "goals": [{**asdict(goal), "verdict": goal.verdict} for goal in goals],
            "results": results,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self.folder / self.name
        text = json.dumps(self.facts, indent=1, ensure_ascii=False, default=asdict)
        place.with_suffix(".json").write_text(text + "\n")
        place.with_suffix(".txt").write_text(self._text(goals))
        self.console.print(self._machine_line(), markup=False, highlight=False)
        if self.facts["options"]["quick"]:
            self.console.print("--quick shows that everything runs: its figures mean nothing.")
        for goal in goals:
            self.console.print(str(goal), markup=False, highlight=False, soft_wrap=True)
        shown = self.folder.relative_to(ROOT) if self.folder.is_relative_to(ROOT) else self.folder
        self.console.print(f"wrote {shown}/{self.name}.json and .txt", soft_wrap=True)

    def _machine_line(self) -> str:
        facts = self.facts["machine"]
        load = f"load {self.facts['load_before']:.1f} before, {self.facts['load_after']:.1f} after"
        return f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}, {facts['threads']} thread(s), {load}"

    def _text(self, goals: Sequence[Goal]) -> str:
        page = Console(width=170, file=io.StringIO(), color_system=None)
        for table in self._tables:
            page.print(table)
        for line in (*self._notes, self._machine_line(), *map(str, goals)):
            page.print(line, markup=False, highlight=False, soft_wrap=True)
        assert isinstance(page.file, io.StringIO)
        return page.file.getvalue()


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, seconds: shows that it runs, measures nothing"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads, per process (default 1)")
    parser.add_argument("--rounds", type=int, default=None, help="most turns per contender")
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="folder of the results (default benchmarks/results, with --quick runs/bench)",
    )
    return parser


@dataclass(frozen=True, slots=True)
class Benchmark(Generic[_Results]):
    """A script: what it measures, how it shows the results, and which goals it checks, in this order.

    Attributes:
        name: name of the script and of its files.
        about: its docstring, shown by ``--help``.
        measure: from the options to the results: plain data or dataclasses. It may show tables as they become complete.
        show: adds tables and notes to the report.
        goals: figures beside what they should be.
        add_options: adds options to those that all benchmarks have.
        settle_options: fills in defaults that depend on ``--quick``, and refuses what makes no sense.
    """

    name: str
    about: str | None
    measure: Callable[[argparse.Namespace, Report], _Results]
    show: Callable[[_Results, Report], None]
    goals: Callable[[_Results, argparse.Namespace], list[Goal]]
    add_options: Callable[[argparse.ArgumentParser], None]
    settle_options: Callable[[argparse.ArgumentParser, argparse.Namespace], None] = lambda parser, options: None

    def main(self) -> None:
        """Runs the benchmark with the options of the command line."""
        parser = make_parser(self.about)
        self.add_options(parser)
        options = parser.parse_args()
        self.settle_options(parser, options)
        torch.set_num_threads(options.threads)
        report = Report(self.name, options)
        results = self.measure(options, report)
        self.show(results, report)
        report.finish(results, self.goals(results, options))
