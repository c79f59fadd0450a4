"""Would polynomials of higher degree need fewer products than quintics? A study: nothing of it is part of meshmuon.

Every step is the best odd polynomial of its degree on the interval that the steps before leave, which is the best that a
composition of these degrees can do. First all compositions are searched for the cheapest that ends as near to 1 as so many
quintics do (``compositions.py``). Then the cheapest are run, in float32 and in bfloat16, on spectra that show rounding, and
timed, with the products that meshmuon's quintics use.

    python benchmarks/degrees.py
    python benchmarks/degrees.py --size 512 --rounds 5
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import common  # first: it sets what torch reads when it starts
import torch
from common import Goal, Quartiles, Report, Step, race, ratio
from compositions import (
    SMALLEST_ERROR,
    GramRunner,
    MatrixStep,
    OddPolynomial,
    cheapest,
    compose,
    counts_of,
    gram_products,
    least_flops,
    search,
)
from torch import Tensor

from meshmuon import Workspace, polar_express
from meshmuon.ortho import Scratch, iterate
from meshmuon.ortho.kernels import BlockedProducts

DEGREES = (3, 5, 7, 9, 13, 17, 19)
UP_TO_NINE = (3, 5, 7, 9)
EXTRA = ((17, 17, 17), (9, 9, 9, 9))  # run too: for no more products than the quintics a far smaller error
SAFETY, CUSHION = 0.01, 0.02  # of polar_express, by default
COARSE_SAFETY = 0.06  # in bfloat16: above its interval a polynomial of high degree grows so fast that 0.01 is no protection
LOW = 1e-3  # what the runs are made for
QUINTICS = 5
SAME = 1.25  # what rounding does may differ from the quintics by such a factor and count as the same, as in meshmuon.ortho.blocks
NEGLIGIBLE = 0.1  # of the polynomial's own distance from 1
MESHMUON = f"meshmuon, {QUINTICS} quintics"
HERE = "the same, run here"  # with the safety and the one rounding of X that the other degrees have: deviations are beside it
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
        return GramRunner([MatrixStep.of(one) for one in self.polynomials], blocks, dtype, BlockedProducts())

    def exact(self, values: Tensor) -> Tensor:
        """What becomes of singular values, in float64."""
        for polynomial in self.polynomials:
            t, found = (values**2 - float(polynomial.centre)) / float(polynomial.radius), torch.zeros_like(values)
            for coefficient in reversed(polynomial.q):
                found = found * t + float(coefficient)
            values = values * found
        return values


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


def deviations(contender: Contender, blocks: Sequence[int], dtype: torch.dtype, matrices: Sequence[Sample]) -> dict[str, float]:
    """By spectrum, the largest distance (2-norm) from what the same polynomial gives without rounding."""
    runner, found = contender.runner(blocks, dtype), dict.fromkeys((one.spectrum for one in matrices), 0.0)
    for one in matrices:
        difference = runner(one.matrix)[0].double() - (one.u * contender.exact(one.values)) @ one.v.mT
        finite = bool(difference.isfinite().all())
        size = float(torch.linalg.matrix_norm(difference, 2)) if finite else math.inf
        found[one.spectrum] = max(found[one.spectrum], size)
    return found


def cuts(steps: int) -> list[tuple[int, ...]]:
    """All ways to cut steps into blocks."""
    if steps == 0:
        return [()]
    return [(first, *rest) for first in range(1, steps + 1) for rest in cuts(steps - first)]


def measure(contenders: Sequence[Contender], form: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Times and deviations of one form: the Gram form on n × 4n, in one block, or the standard form on n × n."""
    n, m = options.size, options.size * (4 if form == "gram" else 1)
    x = torch.randn(1, n, m)
    times = race({one.name: Step(partial(one.runner(one.blocks(form), FLOAT32), x)) for one in contenders}, options.rounds)
    matrices = list(samples(options.small, 2 * options.small, options.seeds))
    reference = counts_of(contenders[0].degrees, len(contenders[0].blocks(form))).flops(n, m)
    results = []
    for one in contenders:
        counts = counts_of(one.degrees, len(one.blocks(form)))
        results.append(
            {
                "name": one.name,
                "degrees": one.degrees,
                "form": form,
                "shape": (n, m),
                "products": counts._asdict(),
                "flops_ratio": counts.flops(n, m) / reference,
                "time_ratio": asdict(ratio(times[one.name].clock, times[MESHMUON].clock)),
                **times[one.name].facts(),
                "float32": {"error": one.error, "off": deviations(one, one.blocks(form), FLOAT32, matrices)},
                "bfloat16": in_bfloat16(one.coarse, form, matrices),
            }
        )
    return results


def in_bfloat16(one: Contender, form: str, matrices: Sequence[Sample]) -> dict[str, Any]:
    """As in float32, but the Gram form with the best of all cuts: nothing survives one block there."""
    tried = [cut for cut in cuts(len(one.degrees)) if max(cut) > 1] if form == "gram" else [one.blocks(form)]
    found = {cut: deviations(one, cut, BFLOAT16, matrices) for cut in tried}
    best = min(found, key=lambda cut: max(found[cut].values()))
    return {"error": one.error, "off": found[best], "blocks": best}


def compare(
    low: float, found: Mapping[tuple[int, ...], float], small: Mapping[tuple[int, ...], float], n: int
) -> list[dict[str, Any]]:
    """For so many quintics the cheapest composition that is as good: by products and by FLOPs."""
    results = []
    for count in (4, 5, 6, 8):
        quintics = (5,) * count
        if gram_products(quintics) > max(map(gram_products, found)) or (error := compose(quintics, low)[1]) < SMALLEST_ERROR:
            continue
        best, simple = cheapest(found, error, gram_products), cheapest(small, error, gram_products)
        flops = {}
        for times in (1, 4):
            cost = partial(least_flops, n=n, m=times * n)
            flops[times] = cheapest(found, error, cost), cost(cheapest(found, error, cost)) / cost(quintics)
        results.append(
            {
                "low": low,
                "quintics": count,
                "error": error,
                "products": gram_products(quintics),
                "cheapest": {"degrees": best, "products": gram_products(best), "error": found[best]},
                "up_to_nine": {"degrees": simple, "products": gram_products(simple), "error": small[simple]},
                "flops": {f"m={times}n": {"degrees": one, "ratio": share} for times, (one, share) in flops.items()},
            }
        )
    return results


def front(found: Mapping[tuple[int, ...], float]) -> dict[int, tuple[tuple[int, ...], float]]:
    """By number of products in Gram space: the best composition, where more products give a smaller error."""
    best: dict[int, tuple[tuple[int, ...], float]] = {}
    for one in sorted(found, key=lambda one: (gram_products(one), found[one])):
        if not best or found[one] < min(error for _, error in best.values()):
            best.setdefault(gram_products(one), (one, found[one]))
    return best


def show_search(compared: Sequence[dict[str, Any]], fronts: Mapping[float, Any], report: Report) -> None:
    columns = ("ℓ", "quintics", "error", "products", "cheapest as good", "degree ≤ 9", "FLOPs ÷ quintics', m = n", "m = 4n")
    rows = []
    for one in compared:
        named = [
            f"{one[key]['products']}: {text_of(one[key]['degrees'])} ({one[key]['error']:.2g})"
            for key in ("cheapest", "up_to_nine")
        ]
        flops = [f"{some['ratio']:.2f}: {text_of(some['degrees'])}" for some in one["flops"].values()]
        rows.append((f"{one['low']:g}", str(one["quintics"]), f"{one['error']:.3g}", str(one["products"]), *named, *flops))
    title = (
        "the cheapest composition whose worst |1 − p(x)| on [ℓ, 1] is that of so many quintics; products of n × n in one block"
    )
    report.table(title, columns, rows)
    for low, best in fronts.items():
        shown = [(str(products), text_of(one), f"{error:.3g}") for products, (one, error) in best.items() if error > 1e-12]
        report.table(
            f"the best for each number of n × n products in one block, ℓ = {low:g}", ("products", "degrees", "error"), shown
        )


def show_runs(runs: Sequence[dict[str, Any]], report: Report) -> None:
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
    for one in runs:
        counts, coarse = one["products"], one["bfloat16"]
        rows.append(
            (
                f"{one['form']}, {one['shape'][0]} × {one['shape'][1]}",
                one["name"],
                f"{counts['symmetric']} + {counts['full']}",
                str(counts["blocks"]),
                f"{one['flops_ratio']:.2f}",
                Quartiles(**one["time_ratio"]).text(digits=2),
                f"{one['float32']['error']:.3f}",
                f"{worst(one, 'float32'):.2g}",
                f"{coarse['error']:.3f}",
                f"{worst(one, 'bfloat16'):.2g}, blocks of {text_of(coarse['blocks'])}",
            )
        )
    title = f"runs, ℓ = {LOW:g}, ÷ meshmuon's quintics; off by: largest 2-norm distance from the same polynomial without rounding"
    report.table(title, columns, rows)
    report.note(
        f"safety {SAFETY:g} in float32 and for meshmuon, {COARSE_SAFETY:g} for the others in bfloat16; cushion {CUSHION:g}"
    )


def worst(run: Mapping[str, Any], dtype: str) -> float:
    return float(max(run[dtype]["off"].values()))


def goals_of(compared: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> list[Goal]:
    """Of the cheapest composition, and the cheapest of low degree: what they must reach before they are worth building."""
    one = next(some for some in compared if some["low"] == LOW and some["quintics"] == QUINTICS)
    goals = []
    for name, products in ((text_of(one[key]["degrees"]), one[key]["products"]) for key in ("cheapest", "up_to_nine")):
        goals.append(Goal(f"{name}: products, as good as {QUINTICS} quintics", products, most=one["products"] - 1))
        for form in ("gram", "standard"):
            quintics, found = (next(run for run in runs if (run["form"], run["name"]) == (form, some)) for some in (HERE, name))
            goals.append(Goal(f"{name}: time ÷ quintics, {form}", found["time_ratio"]["median"], most=0.95))
            for dtype in ("float32", "bfloat16"):
                allowed = max(SAME * worst(quintics, dtype), NEGLIGIBLE * found[dtype]["error"])
                goals.append(Goal(f"{name}: off by, {form}, {dtype}", worst(found, dtype), most=float(f"{allowed:.2g}")))
    return goals


def plot(searches: Mapping[str, Mapping[tuple[int, ...], float]], n: int, figure: Any) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    costs = (
        (left, "n × n products, one block", gram_products),
        (right, "FLOPs ÷ 2n³, m = 4n", lambda one: least_flops(one, n, 4 * n) / 2 / n**3),
    )
    for axes, label, cost in costs:
        for name, found in searches.items():
            points: list[tuple[float, float]] = []
            for one in sorted(found, key=lambda one: (cost(one), found[one])):
                if found[one] < (points[-1][1] if points else 1.0):
                    points.append((cost(one), found[one]))
            axes.plot(*zip(*points, strict=True), marker="o", ms=3, label=name, drawstyle="steps-post")
        axes.set_yscale("log")
        axes.set_ylim(1e-10, 1.5)
        axes.set_xlabel(label)
    left.set_ylabel(f"worst |1 − p(x)| on [{LOW:g}, 1]")
    left.legend(frameon=False, fontsize=7)


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--size", type=int, default=None, help="n of the timed matrices (default 768)")
    parser.add_argument("--small", type=int, default=None, help="n of the matrices of known spectrum (default 256)")
    parser.add_argument("--seeds", type=int, default=None, help="matrices per spectrum (default 3)")
    options = parser.parse_args()
    options.size = options.size or (48 if options.quick else 768)
    options.small = options.small or (24 if options.quick else 256)
    options.seeds = options.seeds or (1 if options.quick else 3)
    options.rounds = options.rounds or (2 if options.quick else 9)
    torch.set_num_threads(options.threads)
    report = Report("degrees", options)
    budgets = {LOW: 17} if options.quick else {LOW: 29, 1e-2: 21}
    searches = {low: search(low, budget, DEGREES) for low, budget in budgets.items()}
    simple = {low: search(low, budget, UP_TO_NINE) for low, budget in budgets.items()}
    compared = [one for low in budgets for one in compare(low, searches[low], simple[low], options.size)]
    fronts = {low: front(found) for low, found in searches.items()}
    show_search(compared, fronts, report)
    first = next(one for one in compared if one["low"] == LOW and one["quintics"] == QUINTICS)
    chosen = dict.fromkeys((tuple(first["cheapest"]["degrees"]), *EXTRA, tuple(first["up_to_nine"]["degrees"])))
    quintics = (5,) * QUINTICS
    contenders = [Contender.of(quintics, MESHMUON), Contender.of(quintics, HERE), *map(Contender.of, chosen)]
    runs = [run for form in ("gram", "standard") for run in measure(contenders, form, options)]
    show_runs(runs, report)
    steps = {one.name: [asdict(MatrixStep.of(step)) for step in one.polynomials] for one in contenders[2:]}
    results = {
        "compared": compared,
        "fronts": {str(low): list(best.values()) for low, best in fronts.items()},
        "runs": runs,
        "steps": steps,
    }
    drawn = {"all degrees": searches[LOW], "degrees up to 9": simple[LOW], "quintics": search(LOW, budgets[LOW], (5,))}
    report.finish(results, goals_of(compared, runs), lambda figure: plot(drawn, options.size, figure), (10, 4))


if __name__ == "__main__":
    main()
