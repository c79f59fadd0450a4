"""One step on one device as each is shipped: meshmuon's default beside ``torch.optim.Muon``, whose products are
bfloat16.

Run it on a CPU that multiplies bfloat16: ``single_device.py`` compares float32 with float32, which is what other CPUs
compute in. "float32" is meshmuon as such a CPU runs it, with products in float32. All take turns within every round,
and with one thread the ratios are of process time. A second table has the worst error of each on spectra that are hard
to orthogonalise.

    python benchmarks/as_shipped.py
    python benchmarks/as_shipped.py --sets "4 × 768²" --rounds 25
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import common  # first: it sets what torch reads when it starts
import torch
import torch.optim._muon as torch_muon
from common import KELLER, LEAST, SPECTRA, Goal, Quartiles, Report, matrix_with, race, ratio
from contenders import DECAY, EPS, LR, STEPS, Contender, Model, enter, gpt_matrices, torch_float32, torch_shipped
from torch import Tensor, nn

from meshmuon import Muon
from meshmuon.ortho import orthogonalize
from meshmuon.torch_compat import cpu_multiplies_bfloat16

TORCH, DEFAULT, FLOAT32, KELLER_SHORT, TORCH_FLOAT32 = (
    "torch.optim.Muon",
    "meshmuon, default",
    "meshmuon, float32",
    "meshmuon, keller in bfloat16",
    "torch.optim.Muon, float32",
)
# matrices, and what the default's step ÷ torch's should be
SETS: dict[str, tuple[tuple[tuple[int, int], ...], float | None]] = {
    "8 × 64²": (((64, 64),) * 8, None),
    "8 × 128²": (((128, 128),) * 8, None),
    "8 × 256²": (((256, 256),) * 8, 1.0),
    "8 × 512²": (((512, 512),) * 8, 0.82),
    "4 × 768²": (((768, 768),) * 4, 0.75),
    "2 × 1024²": (((1024, 1024),) * 2, 0.75),
    "4 × (768 × 3072)": (((768, 3072),) * 4, 0.7),
    "4 × (2048 × 512)": (((2048, 512),) * 4, 0.7),
    "GPT-2 layer": (tuple(gpt_matrices(1, 768)), 0.7),
}
# of a large and a small direction in one coordinate plane; rounding may lose the small one, by the angle
ROTATIONS = 64


def _ours(params: list[nn.Parameter], **options: Any) -> Callable[[], object]:
    return Muon([{"params": params, "use_muon": True}], lr=LR, weight_decay=DECAY, none_grad=False, **options).step


CONTENDERS = (
    Contender(TORCH, torch_shipped),
    Contender(DEFAULT, _ours),
    Contender(FLOAT32, partial(_ours, compute_dtype=torch.float32)),
    Contender(KELLER_SHORT, partial(_ours, scheme="keller", compute_dtype=torch.bfloat16)),
    Contender(TORCH_FLOAT32, torch_float32),
)
ORTHOGONALISERS: dict[str, Callable[[Tensor], Tensor]] = {
    TORCH: lambda x: torch_muon._zeropower_via_newtonschulz(x.clone(), KELLER, STEPS, EPS).float(),
    DEFAULT: lambda x: orthogonalize(x, "auto"),
    FLOAT32: lambda x: orthogonalize(x, "auto", dtype=torch.float32),
    KELLER_SHORT: lambda x: orthogonalize(x, "keller", dtype=torch.bfloat16),
    TORCH_FLOAT32: lambda x: common.float32_newton_schulz(x, KELLER, STEPS, EPS),
}


def pair(angle: float, rows: int, cols: int) -> Tensor:
    """1 and ``LEAST`` in one coordinate plane, rotated; nothing else."""

    def turn(by: float) -> Tensor:
        return torch.tensor([[math.cos(by), -math.sin(by)], [math.sin(by), math.cos(by)]], dtype=torch.float64)

    x = torch.zeros(rows, cols, dtype=torch.float64)
    x[:2, :2] = (
        turn(angle) @ torch.diag(torch.tensor([1.0, 1.01 * LEAST], dtype=torch.float64)) @ turn(1.7 * angle + 0.3)
    )
    return x.float()


def errors(rows: int, cols: int) -> dict[str, dict[str, float]]:
    """By contender and spectrum: the largest distance from 1 at which a singular value that was not zero ends."""
    counts = {name: int(values(min(rows, cols)).count_nonzero()) for name, values in SPECTRA.items()}
    cases = {
        name: [(matrix_with(values(min(rows, cols)), rows, cols), counts[name])] for name, values in SPECTRA.items()
    }
    cases["pair"] = [(pair(math.pi * k / ROTATIONS, rows, cols), 2) for k in range(ROTATIONS)]

    def worst(orthogonalise: Callable[[Tensor], Tensor], matrices: Sequence[tuple[Tensor, int]]) -> float:
        ended = (torch.linalg.svdvals(orthogonalise(x).double())[:count] for x, count in matrices)
        return max(float((values - 1).abs().max()) for values in ended)

    return {name: {of: worst(how, cases[of]) for of in cases} for name, how in ORTHOGONALISERS.items()}


def measure(options: argparse.Namespace, report: Report) -> dict[str, Any]:
    if not cpu_multiplies_bfloat16():
        report.note(
            "This CPU has no units for bfloat16 that torch uses: meshmuon's default is float32, and torch's is slow."
        )
    steps = []
    for name in options.sets:
        shapes = tuple((n // 16, m // 16) for n, m in SETS[name][0]) if options.quick else SETS[name][0]
        entrants = [enter(contender, Model(name, name, shapes, len(shapes))) for contender in CONTENDERS]
        rounds = options.rounds or (2 if options.quick else 25)
        with report.progress(name, rounds) as advance:
            times = race({one.contender.name: one.step for one in entrants}, rounds, warmups=2, advance=advance)
        steps.append(
            {
                "set": name,
                "torch_ms": common.quartiles(times[TORCH].clock).median * 1e3,
                "ratio": {one: asdict(ratio(times[one].clock, times[TORCH].clock)) for one in times},
                "float32": asdict(ratio(times[FLOAT32].clock, times[TORCH_FLOAT32].clock)),
            }
        )
    sides = (16, 32) if options.quick else (256, 512)
    return {
        "steps": steps,
        "errors": {f"{n} × {m}": errors(n, m) for n, m in ((sides[0], sides[0]), (sides[0], sides[1]))},
    }


def show(results: dict[str, Any], report: Report) -> None:
    names = [contender.name for contender in CONTENDERS if contender.name != TORCH]
    rows = [
        (
            row["set"],
            f"{row['torch_ms']:.1f}",
            *(Quartiles(**row["ratio"][name]).text() for name in names),
            Quartiles(**row["float32"]).text(),
        )
        for row in results["steps"]
    ]
    columns = ("matrices", "torch, ms", *(f"{name} ÷" for name in names), "float32 on both sides")
    report.table("a step ÷ that of torch.optim.Muon as shipped (bfloat16)", columns, rows)
    for shape, of_shape in results["errors"].items():
        spectra = list(of_shape[TORCH])
        lines = [(name, *(f"{of[spectrum]:.3f}" for spectrum in spectra)) for name, of in of_shape.items()]
        report.table(f"largest distance from 1 of a singular value, {shape}", ("contender", *spectra), lines)


def goals_of(results: dict[str, Any], options: argparse.Namespace) -> list[Goal]:
    wanted = [
        Goal(f"{row['set']}: step ÷ torch's as shipped", row["ratio"][DEFAULT]["median"], most=SETS[row["set"]][1])
        for row in results["steps"]
        if SETS[row["set"]][1] is not None
    ]
    for shape, of_shape in results["errors"].items():
        for spectrum, error in of_shape[TORCH].items():
            share = round(of_shape[DEFAULT][spectrum], 2) / round(error, 2)
            wanted.append(Goal(f"{shape}, {spectrum}: worst error ÷ torch's, of two digits each", share, most=1.0))
    return wanted


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sets", nargs="+", default=list(SETS), choices=list(SETS), help="which matrices (default all)"
    )


if __name__ == "__main__":
    common.Benchmark("as_shipped", __doc__, measure, show, goals_of, add_options).main()
