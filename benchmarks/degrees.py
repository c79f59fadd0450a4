"""Would polynomials of higher degree need fewer products than quintics? A study: nothing of it is part of meshmuon.

Every step is the best odd polynomial of its degree on the interval that the steps before leave, which is the best that
a composition of these degrees can do. First all compositions are searched for the cheapest that ends as near to 1 as so
many quintics do (``compositions.py``). Then the cheapest are run, in float32 and in bfloat16, on spectra that show
rounding, and timed, with the products that meshmuon's quintics use.

    python benchmarks/degrees.py
    python benchmarks/degrees.py --size 512 --rounds 5
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import common  # first: it sets what torch reads when it starts
import torch
from common import Goal, Quartiles, Report, Step, race, ratio
from compositions import (
    PRODUCTS,
    SMALLEST_ERROR,
    GramRunner,
    MatrixStep,
    OddPolynomial,
    cheapest,
    compose,
    counts_of,
    fronts_drawn,
    gram_products,
    least_flops,
    search,
)
from figures import log_axis
from torch import Tensor

from meshmuon import Workspace, polar_express
from meshmuon.ortho import Scratch, iterate
from meshmuon.ortho.kernels.products import BlockedProducts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEGREES = (3, 5, 7, 9, 13, 17, 19)
UP_TO_NINE = (3, 5, 7, 9)
EXTRA = ((17, 17, 17), (9, 9, 9, 9))  # run too: for no more products than the quintics a far smaller error
SAFETY, CUSHION = 0.01, 0.02  # of polar_express, by default
# in bfloat16: above its interval a polynomial of high degree grows so fast that 0.01 is no protection
COARSE_SAFETY = 0.06
LOW = 1e-3  # what the runs are made for
QUINTICS = 5
SAME = 1.25  # rounding errors within this factor of the quintics' count as the same, as in meshmuon.ortho.blocks
NEGLIGIBLE = 0.1  # of the polynomial's own distance from 1
MESHMUON = f"meshmuon, {QUINTICS} quintics"
HERE = "the same, run here"  # rounds X once and has the safety of the other degrees: deviations are compared with it
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@dataclass(frozen=True, slots=True)
class Contender:
    """A composition as it would be used: with the safety and the cushion of ``polar_express``."""

    name: str
    degrees: tuple[int, ...]
    polynomials: tuple[OddPolynomial, ...]
    error: float

    @classmethod
    def of(cls, degrees: Sequence[int], name: str | None = None, safety: float = SAFETY) -> Contender:
        """Made for singular values in [LOW, 1]."""
        polynomials, error = compose(degrees, LOW, safety, CUSHION)
        return cls(name or text_of(degrees), tuple(degrees), tuple(polynomials), error)

    @property
    def coarse(self) -> Contender:
        """For bfloat16."""
        return self if self.name == MESHMUON else Contender.of(self.degrees, self.name, COARSE_SAFETY)

    def blocks(self, form: str) -> tuple[int, ...]:
        """One for all steps, or one for each."""
        return (len(self.degrees),) if form == "gram" else (1,) * len(self.degrees)

    def runner(self, blocks: Sequence[int], dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """What orthogonalises a batch with these blocks: meshmuon's own iteration for its own quintics."""
        if self.name == MESHMUON:
            return MeshmuonRunner(blocks, dtype)
        return GramRunner(
            [MatrixStep.of(polynomial) for polynomial in self.polynomials], blocks, dtype, BlockedProducts()
        )

    def exact(self, values: Tensor) -> Tensor:
        """What becomes of singular values, in float64."""
        for polynomial in self.polynomials:
            t, factor = (values**2 - float(polynomial.centre)) / float(polynomial.radius), torch.zeros_like(values)
            for coefficient in reversed(polynomial.q):
                factor = factor * t + float(coefficient)
            values = values * factor
        return values


@dataclass(frozen=True, slots=True)
class Study:
    """What was searched and run.

    Attributes:
        compared: for so many quintics, the cheapest compositions that are as good.
        fronts: by lowest singular value, the best composition for each number of products.
        runs: times and deviations, by form and contender.
        steps: the numbers of each contender's polynomials.
        drawn: by name of a curve, compositions with their errors.
        size: n of the timed matrices.
    """

    compared: list[dict[str, Any]]
    fronts: dict[float, dict[int, tuple[tuple[int, ...], float]]]
    runs: list[dict[str, Any]]
    steps: dict[str, list[dict[str, Any]]]
    drawn: dict[str, dict[tuple[int, ...], float]]
    size: int


class MeshmuonRunner:
    """meshmuon's quintics with given blocks."""

    def __init__(self, blocks: Sequence[int], dtype: torch.dtype) -> None:
        self._steps, self._blocks, self._dtype = polar_express(LOW, QUINTICS, SAFETY, CUSHION).steps, blocks, dtype
        self._workspace = Workspace()

    def __call__(self, x: Tensor) -> Tensor:
        """Of (batch, n, m); the result lives in the workspace."""
        result = self._workspace.take("result", tuple(x.shape), x.dtype, x.device)
        iterate(x, self._steps, self._blocks, Scratch(self._workspace, x, self._dtype, result), BlockedProducts())
        return result


def text_of(degrees: Sequence[int]) -> str:
    return "·".join(map(str, degrees))


@dataclass(frozen=True, slots=True)
class Sample:
    """A matrix of known singular values, u·diag(values)·vᵀ, of norm 1."""

    spectrum: str
    u: Tensor
    values: Tensor
    v: Tensor

    @property
    def matrix(self) -> Tensor:
        """As a float32 batch of one."""
        return ((self.u * self.values) @ self.v.mT).float().unsqueeze(0)


def samples(n: int, m: int, seeds: int) -> Iterator[Sample]:
    """Spectra that show what rounding does: random matrices alone hide it."""
    for seed in range(seeds):
        torch.manual_seed(seed)
        spectra = {
            "one 1, the rest 1e-3": torch.cat([torch.ones(1), torch.full((n - 1,), 1e-3)]),
            "half 1, half 1e-2": torch.cat([torch.ones(n // 2), torch.full((n - n // 2,), 1e-2)]),
            "half 1, half 0": torch.cat([torch.ones(n // 2), torch.zeros(n - n // 2)]),
            "log-spaced to 1e-3": torch.logspace(0, -3, n),
            "random matrix": torch.linalg.svdvals(torch.randn(n, m)),
        }
        for spectrum, values in spectra.items():
            u, v = (torch.linalg.qr(torch.randn(rows, n, dtype=torch.float64))[0] for rows in (n, m))
            yield Sample(spectrum, u, values.double() / values.double().norm(), v)


def deviations(
    contender: Contender, blocks: Sequence[int], dtype: torch.dtype, matrices: Sequence[Sample]
) -> dict[str, float]:
    """By spectrum, the largest distance (2-norm) from what the same polynomial gives without rounding."""
    runner, worst = contender.runner(blocks, dtype), dict.fromkeys((sample.spectrum for sample in matrices), 0.0)
    for sample in matrices:
        difference = runner(sample.matrix)[0].double() - (sample.u * contender.exact(sample.values)) @ sample.v.mT
        finite = bool(difference.isfinite().all())
        size = float(torch.linalg.matrix_norm(difference, 2)) if finite else math.inf
        worst[sample.spectrum] = max(worst[sample.spectrum], size)
    return worst


def cuts(steps: int) -> list[tuple[int, ...]]:
    """All ways to cut steps into blocks."""
    if steps == 0:
        return [()]
    return [(first, *rest) for first in range(1, steps + 1) for rest in cuts(steps - first)]


def measure_form(contenders: Sequence[Contender], form: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Times and deviations of one form: the Gram form on n × 4n, in one block, or the standard form on n × n."""
    n, m = options.size, options.size * (4 if form == "gram" else 1)
    x = torch.randn(1, n, m)
    steps = {
        contender.name: Step(partial(contender.runner(contender.blocks(form), FLOAT32), x)) for contender in contenders
    }
    times = race(steps, options.rounds)
    matrices = list(samples(options.small, 2 * options.small, options.seeds))
    reference = counts_of(contenders[0].degrees, len(contenders[0].blocks(form))).flops(n, m)
    results = []
    for contender in contenders:
        blocks = contender.blocks(form)
        counts = counts_of(contender.degrees, len(blocks))
        results.append(
            {
                "name": contender.name,
                "degrees": contender.degrees,
                "form": form,
                "shape": (n, m),
                "products": counts._asdict(),
                "flops_ratio": counts.flops(n, m) / reference,
                "time_ratio": asdict(ratio(times[contender.name].clock, times[MESHMUON].clock)),
                **times[contender.name].facts(),
                "float32": {"error": contender.error, "off": deviations(contender, blocks, FLOAT32, matrices)},
                "bfloat16": in_bfloat16(contender.coarse, form, matrices),
            }
        )
    return results


def in_bfloat16(contender: Contender, form: str, matrices: Sequence[Sample]) -> dict[str, Any]:
    """As in float32, but the Gram form with the best of all cuts: nothing survives one block there."""
    tried = (
        [cut for cut in cuts(len(contender.degrees)) if max(cut) > 1] if form == "gram" else [contender.blocks(form)]
    )
    off = {cut: deviations(contender, cut, BFLOAT16, matrices) for cut in tried}
    best = min(off, key=lambda cut: max(off[cut].values()))
    return {"error": contender.error, "off": off[best], "blocks": best}


def compare(
    low: float, errors: Mapping[tuple[int, ...], float], small: Mapping[tuple[int, ...], float], n: int
) -> list[dict[str, Any]]:
    """For so many quintics the cheapest composition that is as good: by products and by FLOPs."""
    results = []
    for count in (4, 5, 6, 8):
        quintics = (5,) * count
        if (
            gram_products(quintics) > max(map(gram_products, errors))
            or (error := compose(quintics, low)[1]) < SMALLEST_ERROR
        ):
            continue
        best, simple = cheapest(errors, error, gram_products), cheapest(small, error, gram_products)
        flops = {}
        for times in (1, 4):
            cost = partial(least_flops, n=n, m=times * n)
            chosen = cheapest(errors, error, cost)
            flops[times] = chosen, cost(chosen) / cost(quintics)
        results.append(
            {
                "low": low,
                "quintics": count,
                "error": error,
                "products": gram_products(quintics),
                "cheapest": {"degrees": best, "products": gram_products(best), "error": errors[best]},
                "up_to_nine": {"degrees": simple, "products": gram_products(simple), "error": small[simple]},
                "flops": {
                    f"m={times}n": {"degrees": chosen, "ratio": share} for times, (chosen, share) in flops.items()
                },
            }
        )
    return results


def front(errors: Mapping[tuple[int, ...], float]) -> dict[int, tuple[tuple[int, ...], float]]:
    """By number of products in Gram space: the best composition, where more products give a smaller error."""
    best: dict[int, tuple[tuple[int, ...], float]] = {}
    for degrees in sorted(errors, key=lambda degrees: (gram_products(degrees), errors[degrees])):
        if not best or errors[degrees] < min(error for _, error in best.values()):
            best.setdefault(gram_products(degrees), (degrees, errors[degrees]))
    return best


def show_search(compared: Sequence[dict[str, Any]], fronts: Mapping[float, Any], report: Report) -> None:
    columns = (
        "ℓ",
        "quintics",
        "error",
        "products",
        "cheapest as good",
        "degree ≤ 9",
        "FLOPs ÷ quintics', m = n",
        "m = 4n",
    )
    rows = []
    for row in compared:
        named = [
            f"{row[key]['products']}: {text_of(row[key]['degrees'])} ({row[key]['error']:.2g})"
            for key in ("cheapest", "up_to_nine")
        ]
        flops = [f"{cost['ratio']:.2f}: {text_of(cost['degrees'])}" for cost in row["flops"].values()]
        rows.append(
            (f"{row['low']:g}", str(row["quintics"]), f"{row['error']:.3g}", str(row["products"]), *named, *flops)
        )
    title = (
        "the cheapest composition whose worst |1 − p(x)| on [ℓ, 1] is that of so many quintics; products of n × n in "
        "one block"
    )
    report.table(title, columns, rows)
    for low, best in fronts.items():
        shown = [
            (str(products), text_of(degrees), f"{error:.3g}")
            for products, (degrees, error) in best.items()
            if error > 1e-12
        ]
        report.table(
            f"the best for each number of n × n products in one block, ℓ = {low:g}",
            ("products", "degrees", "error"),
            shown,
        )


def show(study: Study, report: Report) -> None:
    """The runs; what the search found is shown before they begin."""
    columns = (
        "form, n × m",
        "steps",
        "n × n: sym. + full",
        "blocks",
        "FLOPs ÷",
        "time ÷",
        "error",
        "float32 off by",
        "bfloat16: error",
        "off by",
    )
    rows = []
    for run in study.runs:
        counts, coarse = run["products"], run["bfloat16"]
        rows.append(
            (
                f"{run['form']}, {run['shape'][0]} × {run['shape'][1]}",
                run["name"],
                f"{counts['symmetric']} + {counts['full']}",
                str(counts["blocks"]),
                f"{run['flops_ratio']:.2f}",
                Quartiles(**run["time_ratio"]).text(digits=2),
                f"{run['float32']['error']:.3f}",
                f"{worst(run, 'float32'):.2g}",
                f"{coarse['error']:.3f}",
                f"{worst(run, 'bfloat16'):.2g}, blocks of {text_of(coarse['blocks'])}",
            )
        )
    title = (
        f"runs, ℓ = {LOW:g}, ÷ meshmuon's quintics; off by: largest 2-norm distance from the same polynomial without "
        "rounding"
    )
    report.table(title, columns, rows)
    report.note(
        f"safety {SAFETY:g} in float32 and for meshmuon, {COARSE_SAFETY:g} for the others in bfloat16; cushion "
        f"{CUSHION:g}"
    )


def worst(run: Mapping[str, Any], dtype: str) -> float:
    return float(max(run[dtype]["off"].values()))


def goals_of(study: Study, options: argparse.Namespace) -> list[Goal]:
    """What the cheapest composition, and the cheapest of low degree, must reach before they are worth building."""
    row = next(row for row in study.compared if row["low"] == LOW and row["quintics"] == QUINTICS)
    runs = {(run["form"], run["name"]): run for run in study.runs}
    goals = []
    for name, products in ((text_of(row[key]["degrees"]), row[key]["products"]) for key in ("cheapest", "up_to_nine")):
        goals.append(Goal(f"{name}: products, as good as {QUINTICS} quintics", products, most=row["products"] - 1))
        for form in ("gram", "standard"):
            quintics, run = runs[form, HERE], runs[form, name]
            goals.append(Goal(f"{name}: time ÷ quintics, {form}", run["time_ratio"]["median"], most=0.95))
            for dtype in ("float32", "bfloat16"):
                allowed = max(SAME * worst(quintics, dtype), NEGLIGIBLE * run[dtype]["error"])
                goals.append(Goal(f"{name}: off by, {form}, {dtype}", worst(run, dtype), most=float(f"{allowed:.2g}")))
    return goals


def plot(results: dict[str, Any], figure: Figure) -> None:
    figure.suptitle("Error of the best composition at each cost (lower is better)")
    for axes, (label, curves) in zip(figure.subplots(1, 2, sharey=True), results["drawn"].items(), strict=True):
        for name, points in curves.items():
            axes.plot(*zip(*points, strict=True), marker="o", ms=3, label=name, drawstyle="steps-post")
        axes.set_ylim(1e-10, 1.5)
        log_axis(axes, "y", [10.0**-power for power in range(0, 11, 2)])
        axes.set_xlabel(label)
        if label == PRODUCTS:
            axes.set_ylabel(f"worst |1 − p(x)| on [{LOW:g}, 1]")
            axes.legend()


def measure(options: argparse.Namespace, report: Report) -> Study:
    budgets = {LOW: 17} if options.quick else {LOW: 29, 1e-2: 21}
    searches = {low: search(low, budget, DEGREES) for low, budget in budgets.items()}
    simple = {low: search(low, budget, UP_TO_NINE) for low, budget in budgets.items()}
    compared = [row for low in budgets for row in compare(low, searches[low], simple[low], options.size)]
    fronts = {low: front(errors) for low, errors in searches.items()}
    show_search(compared, fronts, report)
    first = next(row for row in compared if row["low"] == LOW and row["quintics"] == QUINTICS)
    chosen = dict.fromkeys((tuple(first["cheapest"]["degrees"]), *EXTRA, tuple(first["up_to_nine"]["degrees"])))
    quintics = (5,) * QUINTICS
    contenders = [Contender.of(quintics, MESHMUON), Contender.of(quintics, HERE), *map(Contender.of, chosen)]
    runs = [run for form in ("gram", "standard") for run in measure_form(contenders, form, options)]
    steps = {
        contender.name: [asdict(MatrixStep.of(step)) for step in contender.polynomials] for contender in contenders[2:]
    }
    drawn = {"all degrees": searches[LOW], "degrees up to 9": simple[LOW], "quintics": search(LOW, budgets[LOW], (5,))}
    return Study(compared, fronts, runs, steps, drawn, options.size)


def to_json(study: Study) -> object:
    fronts = {str(low): list(best.values()) for low, best in study.fronts.items()}
    drawn = fronts_drawn(study.drawn, study.size)
    return {"compared": study.compared, "fronts": fronts, "runs": study.runs, "steps": study.steps, "drawn": drawn}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=None, help="n of the timed matrices (default 768)")
    parser.add_argument("--small", type=int, default=None, help="n of the matrices of known spectrum (default 256)")
    parser.add_argument("--seeds", type=int, default=None, help="matrices per spectrum (default 3)")


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.size = options.size or (48 if options.quick else 768)
    options.small = options.small or (24 if options.quick else 256)
    options.seeds = options.seeds or (1 if options.quick else 3)
    options.rounds = options.rounds or (2 if options.quick else 9)


BENCHMARK = common.Benchmark(
    "degrees",
    __doc__,
    measure,
    show,
    goals_of,
    plot,
    (10, 4),
    add_options=add_options,
    settle_options=settle_options,
    to_json=to_json,
)

if __name__ == "__main__":
    BENCHMARK.main()
