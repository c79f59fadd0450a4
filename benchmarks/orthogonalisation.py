"""Orthogonalisation by itself: time and counted FLOPs by scheme and form, beside the peak rate of a plain product.

Every round has one large square float32 product among the forms, so that "÷ peak" compares what the machine gave at
that moment. With one thread the time is the process's own, which other processes do not lengthen. Rates count the FLOPs
of the form in use (``meshmuon.ortho.orthogonalize_flops``), which torch's counter confirms here for small shapes.

    python benchmarks/orthogonalisation.py
    python benchmarks/orthogonalisation.py --sizes 768 --ratios 1 4 --batches 1 --rounds 15
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import common  # first: it sets what torch reads when it starts
import torch
from common import COLOURS, Goal, Quartiles, Report, Samples, Step, quartiles, race, ratio
from figures import log_axis
from torch.utils.flop_counter import FlopCounterMode

from meshmuon import Workspace, orthogonalize
from meshmuon.ortho import Scheme, blocks_for, orthogonalize_flops, resolve_scheme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMS = ("auto", "standard", "gram")
PEAK = "peak"
PEAK_SIZE = 1280
NOISE = 1.03  # slower than the standard form by more than this in three of four rounds is not noise
NOISE_OF_ONE = 1.10  # the same where there is a single round
DTYPE = torch.float32
LEAST_FLOPS = 3e8  # of a turn: small shapes are called so often that neither the clock nor a cold cache matters


@dataclass(frozen=True, slots=True)
class Case:
    """Matrices of one shape, orthogonalised by one scheme."""

    scheme: str
    n: int
    m: int
    batch: int

    def resolved(self) -> Scheme:
        """The scheme that the name stands for."""
        scheme = resolve_scheme(self.scheme, 5)
        assert isinstance(scheme, Scheme)
        return scheme

    def blocks(self, form: str) -> tuple[int, ...]:
        """How the steps are cut into blocks."""
        return blocks_for(self.n, self.m, self.resolved(), form=form, dtype=DTYPE)

    def flops(self, form: str) -> int:
        """Counted FLOPs of the whole batch."""
        return self.batch * orthogonalize_flops(self.n, self.m, self.resolved().steps, self.blocks(form))

    @property
    def nbytes(self) -> int:
        """Input, result and scratch, roughly."""
        return 4 * self.batch * (3 * self.n * self.m + 5 * self.n**2)

    def __str__(self) -> str:
        return f"{self.scheme} {self.batch} × {self.n} × {self.m}"


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """All shapes with the first scheme; the other schemes, whose products are the same, for single matrices and two
    ratios.
    """
    for place, scheme in enumerate(options.schemes):
        for n in options.sizes:
            for aspect in options.ratios if place == 0 else [r for r in options.ratios if r in (1, 4)]:
                for batch in options.batches if place == 0 else options.batches[:1]:
                    yield Case(scheme, n, round(n * aspect), batch)


def peak_step(size: int) -> Step:
    a, b, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    return Step(lambda: torch.mm(a, b, out=out))


def form_step(case: Case, form: str, x: torch.Tensor, out: torch.Tensor, calls: int) -> Step:
    scheme, workspace = resolve_scheme(case.scheme, 5), Workspace()

    def run() -> None:
        for _ in range(calls):
            orthogonalize(x, scheme, form=form, dtype=DTYPE, out=out, workspace=workspace)

    return Step(run)


def confirmed_by_torch(case: Case) -> bool:
    """Whether torch's counter finds the FLOPs that the formula says, in every form."""
    x = torch.randn(case.n, case.m)
    for form in FORMS:
        case.blocks(form)  # found by simulation when it is first asked, whose products are not to be counted
        with FlopCounterMode(display=False) as counter:
            orthogonalize(x, resolve_scheme(case.scheme, 5), form=form, dtype=DTYPE)
        if counter.get_total_flops() * case.batch != case.flops(form):
            return False
    return True


def schedule(case: Case, peak_rate: float, most: float) -> tuple[tuple[str, ...], int] | None:
    """The forms to run and how often, by what they should take; None for a case that would take too long."""
    forms: tuple[str, ...] = FORMS
    seconds = sum(case.flops(form) for form in forms) / peak_rate * 1.3
    if seconds > 4:  # auto is one of the other two: run it and the standard form only
        forms = FORMS[:2]
        seconds = sum(case.flops(form) for form in forms) / peak_rate * 1.3
    if seconds > most:
        return None
    return forms, 1 if seconds > 10 else 2 if seconds > 4 else max(3, min(9, math.ceil(0.6 / seconds)))


def measure_case(case: Case, forms: Sequence[str], rounds: int, peak_size: int, most_calls: int) -> dict[str, Any]:
    x = torch.randn(case.batch, case.n, case.m)
    out = torch.empty_like(x)
    calls = min(most_calls, math.ceil(LEAST_FLOPS / case.flops("auto")))
    steps = {form: form_step(case, form, x, out, calls) for form in forms}
    times = race({PEAK: peak_step(peak_size), **steps}, rounds, warmups=1 if rounds > 2 else 0)
    for form in forms:
        times[form] = Samples([s / calls for s in times[form].wall], [s / calls for s in times[form].cpu])
    peak_rates = [2 * peak_size**3 / second for second in times[PEAK].clock]
    return {
        **asdict(case),
        "rounds": rounds,
        "calls": calls,
        "peak_gflops": quartiles(peak_rates).median / 1e9,
        "auto_blocks": case.blocks("auto"),
        "auto_over_standard": asdict(ratio(times["auto"].clock, times["standard"].clock)),
        "slower_than_standard": slower(case, times["auto"], times["standard"]),
        "forms": {form: form_facts(case, form, times[form], peak_rates) for form in forms},
    }


def form_facts(case: Case, form: str, samples: Samples, peak_rates: Sequence[float]) -> dict[str, Any]:
    flops = case.flops(form)
    shares = [flops / second / peak for second, peak in zip(samples.clock, peak_rates, strict=True)]
    return {
        **samples.facts(),
        "flops": flops,
        "gflops_per_s": flops / quartiles(samples.clock).median / 1e9,
        "of_peak": asdict(quartiles(shares)),
    }


def slower(case: Case, auto: Samples, standard: Samples) -> bool:
    """Whether auto is slower than the standard form by more than noise; False where it is the standard form."""
    if case.blocks("auto") == case.blocks("standard"):
        return False
    slowdown = ratio(auto.clock, standard.clock)
    return slowdown.low > (NOISE if slowdown.count > 2 else NOISE_OF_ONE)


def show(results: Sequence[dict[str, Any]], report: Report) -> None:
    columns = (
        "scheme",
        "batch",
        "n × m",
        "rounds",
        "auto ms",
        "auto ÷ standard",
        "FLOPs auto ÷ std",
        "auto ÷ peak",
        "std ÷ peak",
        "gram ÷ peak",
    )
    rows = []
    for result in results:
        forms = result["forms"]
        share = [Quartiles(**forms[f]["of_peak"]).text(digits=2) if f in forms else "–" for f in FORMS]
        rows.append(
            (
                result["scheme"],
                str(result["batch"]),
                f"{result['n']} × {result['m']}",
                str(result["rounds"]),
                f"{forms['auto']['cpu_s']['median'] * 1e3:.2f}",
                Quartiles(**result["auto_over_standard"]).text(digits=2)
                + (" SLOWER" if result["slower_than_standard"] else ""),
                f"{forms['auto']['flops'] / forms['standard']['flops']:.2f}",
                *share,
            )
        )
    report.table(
        "orthogonalisation, float32; ÷ peak: counted FLOP/s of the form ÷ FLOP/s of a large square product",
        columns,
        rows,
    )


def goals_of(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Goal]:
    large = [result for result in results if result["n"] >= 512]
    lowest = min(large, key=lambda result: float(result["forms"]["auto"]["of_peak"]["median"]), default=None)
    shares = [result["forms"]["auto"]["of_peak"]["median"] for result in large]
    flagged = [
        f"{result['scheme']} {result['batch']} × {result['n']} × {result['m']} "
        f"({result['auto_over_standard']['median']:.2f})"
        for result in results
        if result["slower_than_standard"]
    ]
    where = (
        f"lowest at {lowest['batch']} × {lowest['n']} × {lowest['m']}; median {quartiles(shares).median:.2f}"
        if lowest
        else ""
    )
    return [
        Goal(
            "achieved ÷ peak at every n ≥ 512",
            lowest["forms"]["auto"]["of_peak"]["median"] if lowest else None,
            least=0.85,
            note=where,
        ),
        Goal("shapes where auto is slower than the standard form", len(flagged), most=0, note=", ".join(flagged)),
    ]


def plot(results: Sequence[dict[str, Any]], figure: Figure) -> None:
    axes = figure.subplots()
    first = [
        result
        for result in results
        if result["scheme"] == results[0]["scheme"] and result["batch"] == results[0]["batch"]
    ]
    for aspect in sorted({result["m"] / result["n"] for result in first}):
        curve = [result for result in first if result["m"] / result["n"] == aspect]
        shares = [result["forms"]["auto"]["of_peak"]["median"] for result in curve]
        axes.plot([result["n"] for result in curve], shares, marker="o", ms=3, label=f"m/n = {aspect:g}")
    axes.axhline(0.85, color=COLOURS["line"], lw=0.8, ls="--")
    log_axis(axes, "x", sorted({float(result["n"]) for result in first}))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("n, of m × n matrices")
    axes.set_ylabel("counted FLOP/s ÷ those of the fastest product")
    axes.set_title("Use of the machine, form auto (goal: 0.85)")
    axes.legend()


def measure(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    small = [case for case in cases(options) if case.n <= 512 and case.batch == options.batches[0]]
    agreed = [confirmed_by_torch(case) for case in small]
    report.note(f"torch's FLOP counter agrees with the formula for {sum(agreed)} of {len(agreed)} shapes up to n = 512")
    size = 256 if options.quick else PEAK_SIZE
    start = race({PEAK: peak_step(size)}, 3)[PEAK]
    peak_rate = 2 * size**3 / min(start.clock)
    results = []
    by_size = sorted(cases(options), key=lambda case: (case.scheme != options.schemes[0], case.n, case.m, case.batch))
    for case in report.each(by_size, str):
        planned = schedule(case, peak_rate, options.most_seconds)
        if case.nbytes > options.most_bytes:
            report.note(f"left out, {case}: more than {options.most_bytes >> 20} MiB")
        elif planned is None or (case.batch > 1 and case.batch * case.n**2 * case.m > options.most_batched):
            report.note(f"left out, {case}: too long")
        else:
            results.append(
                measure_case(case, planned[0], options.rounds or planned[1], size, 2 if options.quick else 100)
            )
    return results


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schemes", nargs="+", default=["polar_express", "keller"], help="names of schemes; all shapes with the first"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=None, help="n, the smaller side (default 64 to 4096)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[1, 1.5, 4, 8], help="m ÷ n (default 1 1.5 4 8)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="matrices at once (default 1 8 64)")
    parser.add_argument(
        "--most-seconds", type=float, default=35.0, help="no case whose round should take longer (default 35)"
    )
    parser.add_argument(
        "--most-bytes", type=int, default=2 << 30, help="no case that needs more memory (default 2 GiB)"
    )
    parser.add_argument(
        "--most-batched", type=float, default=6e9, help="no batch with more batch·n²·m (default 6e9, about a second)"
    )


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.sizes = options.sizes or ([16, 64] if options.quick else [64, 128, 256, 512, 1024, 2048, 4096])
    options.batches = [1, 3] if options.quick and options.batches == [1, 8, 64] else options.batches


BENCHMARK = common.Benchmark(
    "orthogonalisation",
    __doc__,
    measure,
    show,
    goals_of,
    plot,
    (7, 4),
    add_options=add_options,
    settle_options=settle_options,
)

if __name__ == "__main__":
    BENCHMARK.main()
