"""Orthogonalisation schemes in turns: time, counted FLOPs and worst error of each, shape by shape.

Schemes make different updates, so each one is judged by two figures side by side: what it costs beside
``polar_express``, and how far from 1 its singular values end, measured by SVD on adversarial spectra of the very shape
that is timed.

With one thread the time is the process's own, which other processes do not lengthen.

    python benchmarks/schemes.py
    python benchmarks/schemes.py --sizes 256 768 --ratios 1 --schemes polar_express zolotarev
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import common  # first: it sets what torch reads when it starts
import torch
from common import Goal, Quartiles, Report, Samples, Step, prepare, race, ratio, worst_error

from meshmuon import orthogonalize
from meshmuon.ortho import Scheme, blocks_for, halley, orthogonalize_flops, resolve_scheme, scheme_for, zolotarev

DTYPE = torch.float32
REFERENCE = "polar_express"
LEAST_FLOPS = 3e8  # of a turn: small shapes are called so often that neither the clock nor a cold cache matters
MOST_OF_SVD = 1024  # rows up to which the error is measured
SCHEMES: dict[str, Scheme | str] = {
    "keller": "keller",
    REFERENCE: REFERENCE,
    "zolotarev, 2 poles": zolotarev(poles=2),
    "zolotarev": "zolotarev",
    "zolotarev, 4 poles": zolotarev(poles=4),
    "hybrid": "hybrid",
    "halley, 1 quintic": halley(quintics=1),
    "halley": "halley",
    "auto": "auto",
}


def chosen(name: str, n: int, m: int) -> Scheme:
    """The scheme that runs for an n × m matrix under this name."""
    scheme = scheme_for(resolve_scheme(SCHEMES[name], 5), n, m, DTYPE)
    assert isinstance(scheme, Scheme)
    return scheme


def flops(name: str, n: int, m: int) -> int:
    """Counted FLOPs of one matrix."""
    scheme = chosen(name, n, m)
    return orthogonalize_flops(n, m, scheme.steps, blocks_for(n, m, scheme, form="auto", dtype=DTYPE))


def step_of(name: str, x: torch.Tensor, calls: int) -> Step:
    call = prepare([x], chosen(name, *x.shape[1:]), DTYPE)

    def run() -> None:
        for _ in range(calls):
            call()

    return Step(run)


def measure_shape(batch: int, n: int, m: int, options: argparse.Namespace) -> dict[str, Any]:
    x = torch.randn(batch, n, m)
    calls = 1 if options.quick else math.ceil(LEAST_FLOPS / (batch * flops(REFERENCE, n, m)))
    steps = {name: step_of(name, x, calls) for name in options.schemes}
    times = race(steps, options.rounds or (2 if options.quick else 7), seconds=options.seconds)
    per_call = {name: Samples([s / calls for s in t.wall], [s / calls for s in t.cpu]) for name, t in times.items()}
    with_svd = batch == 1 and n <= MOST_OF_SVD
    return {
        "batch": batch,
        "n": n,
        "m": m,
        "schemes": {
            name: {
                **samples.facts(),
                "runs": f"{chosen(name, n, m).name}: {chosen(name, n, m).source}",
                "ratio": asdict(ratio(samples.clock, per_call[REFERENCE].clock)),
                "flops": flops(name, n, m),
                "worst_error": worst_error(partial(orthogonalize, scheme=chosen(name, n, m), dtype=DTYPE), n, m)
                if with_svd
                else None,
            }
            for name, samples in per_call.items()
        },
    }


def measure(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    shapes = [(1, n, round(n * aspect)) for n in options.sizes for aspect in options.ratios]
    shapes += [(64, n, 2 * n) for n in options.sizes if n <= 256]
    return [measure_shape(*shape, options) for shape in report.each(shapes, "{0[0]} × {0[1]} × {0[2]}".format)]


def show(results: Sequence[dict[str, Any]], report: Report) -> None:
    rows = []
    for result in results:
        reference = result["schemes"][REFERENCE]
        for name, facts in result["schemes"].items():
            error = facts["worst_error"]
            rows.append(
                (
                    f"{result['batch']} × {result['n']} × {result['m']}",
                    name,
                    f"{facts['cpu_s']['median'] * 1e3:.2f}",
                    Quartiles(**facts["ratio"]).text(digits=2),
                    f"{facts['flops'] / reference['flops']:.2f}",
                    "–" if error is None else f"{error:.4f}",
                )
            )
    report.table(
        f"schemes, float32; ratios to {REFERENCE}; worst error on [1e-3, 1] by SVD",
        ("batch × n × m", "scheme", "ms", "time ÷", "FLOPs ÷", "worst error"),
        rows,
    )


def goals_of(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Goal]:
    goals = []
    for result in results:
        auto, reference = (result["schemes"].get(name) for name in ("auto", REFERENCE))
        if auto is None:
            continue
        where = f"{result['batch']} × {result['n']} × {result['m']}"
        if result["n"] >= 256:
            most = 0.45 if result["n"] >= 512 else 0.6
            goals.append(
                Goal(f"{where}: time of auto ÷ {REFERENCE}", auto["ratio"]["median"], most=most, note=auto["runs"])
            )
        if auto["worst_error"] is not None:
            text = f"{where}: worst error of auto ÷ {REFERENCE}'s"
            goals.append(Goal(text, auto["worst_error"] / reference["worst_error"], most=1.0))
    return goals


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), help="some of the schemes (default all)")
    parser.add_argument("--sizes", type=int, nargs="+", default=None, help="n, the smaller side (default 64 to 2048)")
    parser.add_argument("--ratios", type=float, nargs="+", default=[1, 4], help="m ÷ n (default 1 4)")
    parser.add_argument("--seconds", type=float, default=40.0, help="no round of a shape starts later (default 40)")


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.sizes = options.sizes or ([16, 32] if options.quick else [64, 128, 256, 512, 768, 1024, 2048])
    unknown = [name for name in options.schemes if name not in SCHEMES]
    if unknown:
        parser.error(f"no scheme is called {unknown}; there are {list(SCHEMES)}")
    if REFERENCE not in options.schemes:
        options.schemes = [REFERENCE, *options.schemes]


if __name__ == "__main__":
    common.Benchmark("schemes", __doc__, measure, show, goals_of, add_options, settle_options).main()
