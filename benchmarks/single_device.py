"""One optimizer step on one device: meshmuon beside everyone else, on the matrices of four models.

Contenders take turns within every round, so that a busy machine slows all of them equally. Figures are ratios of one
run, round by round. A contender that should make the same update as meshmuon and does not is left out before the timing
starts.

Those with another scheme make another update. A second table has what is needed to judge them: the worst error that
each leaves on [1e-3, 1], measured by SVD on adversarial spectra; counted FLOPs; and the time beside rivals whose error
is equal or worse.

With one thread the ratios are of process time, which other processes do not lengthen.

    python benchmarks/single_device.py
    python benchmarks/single_device.py --models MoE ViT --rounds 9
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import common  # first: it sets what torch reads when it starts
import torch
from common import SHAPE, Goal, Quartiles, Report, Step, prepare, race, ratio
from contenders import (
    CONTENDERS,
    MODELS,
    OURS,
    QUICK_MODELS,
    TOLERANCE,
    Contender,
    Entrant,
    Model,
    available,
    differences,
    enter,
    error_by_svd,
)
from torch.utils.flop_counter import FlopCounterMode

from meshmuon import Muon, keller
from meshmuon.device import memory_budget_for
from meshmuon.ortho import scratch_bytes

ALONE = "orthogonalisation alone"
TORCH = "torch.optim.Muon, fp32"
AUTO = "meshmuon, auto"
POLAR_EXPRESS = "meshmuon, polar_express"
ROUNDING = 1.02  # errors this close are equal: they differ by rounding
SCALAR = 64  # bytes; the allocator's smallest block, which holds a number


@dataclass(frozen=True, slots=True)
class Allocations:
    """What one step allocated.

    Attributes:
        count: allocations larger than a number.
        numbers: allocations that hold a number or nothing.
        nbytes: bytes of all of them.
        peak: most bytes beyond those held before the step.
    """

    count: int
    numbers: int
    nbytes: int
    peak: int


def allocations_of(step: Callable[[], object]) -> Allocations:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for size in sizes:
        now += size
        peak = max(peak, now)
    taken = [size for size in sizes if size > 0]
    return Allocations(sum(s > SCALAR for s in taken), sum(s <= SCALAR for s in taken), sum(taken), peak)


def orthogonalisation_alone(model: Model) -> Step:
    """Orthogonalises all matrices, equal shapes together as far as the memory budget allows, and does nothing else."""
    matrices, scheme, batches = model.matrices, keller(), []
    for rows, cols in sorted(set(matrices)):
        left = matrices.count((rows, cols))
        most = max(1, memory_budget_for(None) // scratch_bytes(rows, cols, scheme.steps, torch.float32, torch.float32))
        while left:
            batches.append(torch.randn(min(left, most), rows, cols))
            left -= len(batches[-1])
    return Step(prepare(batches, scheme))


def enter_all(contenders: Sequence[Contender], model: Model) -> list[Entrant]:
    return [enter(contender, model) for contender in contenders if not (model.costly and contender.cheap_only)]


def check(entrants: list[Entrant], shown: Callable[[str], None]) -> tuple[list[Entrant], dict[str, float]]:
    """Leaves out every contender whose update should be meshmuon's and is not; the others, and all differences."""
    apart = differences(entrants)
    kept = []
    for entrant in entrants:
        contender = entrant.contender
        difference = apart.get(contender.name, 0.0)
        if difference <= TOLERANCE[contender.dtype]:
            kept.append(entrant)
        else:
            shown(f"{contender.name} is left out: its update is {difference:.1e} from meshmuon's.")
    return kept, apart


def extra_memory(entrant: Entrant, taken: Allocations) -> int:
    """Bytes beyond weights, gradients and state: scratch that is held, and what the step allocates meanwhile."""
    optimizer = getattr(entrant.step.run, "__self__", None)
    held = optimizer.workspace_bytes() if isinstance(optimizer, Muon) else 0
    return held + taken.peak


def two_waves(model: Model) -> int:
    """Twice the scratch of a batch: the budget, or what the largest matrix needs together with its result."""
    steps = keller().steps
    largest = max(
        scratch_bytes(rows, cols, steps, torch.float32, torch.float32) + 4 * rows * cols
        for rows, cols in model.matrices
    )
    return 2 * max(memory_budget_for(None), largest)


def memory_rows(entrants: list[Entrant], model: Model) -> dict[str, dict[str, Any]]:
    """What a step after the second allocates, by contender."""
    rows = {}
    for entrant in entrants:
        if model.costly and entrant.contender.name != OURS:
            continue
        entrant.step.before()  # check and race have made at least two steps
        taken = allocations_of(entrant.step.run)
        extra = extra_memory(entrant, taken)
        rows[entrant.contender.name] = {
            **asdict(taken),
            "extra": extra,
            "extra_over_two_waves": extra / two_waves(model),
        }
    return rows


def flops_of(entrant: Entrant) -> int:
    """FLOPs of the products of a step, by torch's counter."""
    entrant.step.before()
    with FlopCounterMode(display=False) as counter:
        entrant.step.run()
    return int(counter.get_total_flops())


def measure_model(
    model: Model, contenders: Sequence[Contender], errors: dict[str, float], options: argparse.Namespace, report: Report
) -> dict[str, Any]:
    entrants, apart = check(enter_all(contenders, model), report.note)
    steps = {entrant.contender.name: entrant.step for entrant in entrants}
    steps[ALONE] = orthogonalisation_alone(model)
    rounds = options.rounds or (2 if options.quick else 9)
    seconds = options.seconds * (2.0 if model.costly else 1.0)
    with report.progress(model.name, rounds) as advance:
        times = race(steps, rounds, warmups=0 if model.costly else 1, seconds=seconds, advance=advance)
    return {
        "model": model.name,
        "about": model.about,
        "matrices": len(model.matrices),
        "steps": {name: samples.facts() for name, samples in times.items()},
        "ratio": {name: asdict(ratio(times[OURS].clock, samples.clock)) for name, samples in times.items()},
        "difference": apart,
        "worst_error": {name: errors[name] for name in steps if name in errors},
        "flops": {entrant.contender.name: flops_of(entrant) for entrant in entrants if entrant.contender.is_muon},
        "seconds": {name: samples.clock for name, samples in times.items()},
        "memory": memory_rows(entrants, model),
        "host": host(model, contenders, options),
    }


def host(model: Model, contenders: Sequence[Contender], options: argparse.Namespace) -> dict[str, Any]:
    """µs per matrix of a step on as many 8×8 matrices as the whole model has: only dispatch is left."""
    tiny = Model(model.name, "8×8", ((8, 8),) * model.count, model.count)
    steps = {contender.name: enter(contender, tiny).step for contender in contenders}
    times = race(steps, options.rounds or (2 if options.quick else 15), warmups=3, seconds=8.0)
    return {name: samples.microseconds(model.count) for name, samples in times.items()}


def rivals(result: dict[str, Any], least_error: float = 0.0) -> list[str]:
    """The measured float32 contenders that are not ours and leave at least this error, the fastest first."""
    names = [c.name for c in CONTENDERS if c.dtype == "fp32" and c.is_muon and not c.name.startswith(OURS)]
    measured = [
        name for name in names if name in result["steps"] and result["worst_error"][name] * ROUNDING >= least_error
    ]
    return sorted(measured, key=lambda name: float(result["steps"][name]["cpu_s"]["median"]))


def time_ratio(result: dict[str, Any], name: str, rival: str) -> Quartiles:
    """The time of a contender ÷ another's, round by round."""
    return ratio(result["seconds"][name], result["seconds"][rival])


def show_accuracy(result: dict[str, Any], report: Report) -> None:
    """All that orthogonalise, with what their schemes cost and leave."""
    schemes = {c.name: c.scheme for c in CONTENDERS}
    rows = []
    for name, flops in result["flops"].items():
        error = result["worst_error"][name]
        comparable = [rival for rival in rivals(result, error) if rival != name]
        rows.append(
            (
                name,
                schemes[name],
                f"{error:.3f}",
                f"{flops / 1e9:.2f}",
                f"{flops / result['flops'][OURS]:.2f}",
                time_ratio(result, name, OURS).text(),
                f"{time_ratio(result, name, comparable[0]).text()} {comparable[0]}" if comparable else "–",
            )
        )
    report.table(
        f"{result['model']}: what each scheme costs and leaves",
        (
            "contender",
            "scheme",
            "worst error",
            "GFLOPs",
            f"FLOPs ÷ {OURS}",
            f"time ÷ {OURS}",
            "time ÷ fastest, error equal or worse",
        ),
        rows,
    )


def show_model(result: dict[str, Any], report: Report) -> None:
    dtypes = {contender.name: contender.dtype for contender in CONTENDERS}
    rows = []
    for name, step in result["steps"].items():
        memory, host_time = result["memory"].get(name), result["host"].get(name)
        rows.append(
            (
                name,
                dtypes.get(name, "fp32"),
                Quartiles(**step["wall_s"]).text(1e3, 1),
                Quartiles(**result["ratio"][name]).text(),
                f"{result['difference'][name]:.0e}" if name in result["difference"] else "–",
                f"{host_time['wall_us']:.1f}" if host_time else "–",
                f"{memory['count']} + {memory['numbers']}" if memory else "–",
                f"{memory['extra'] / 2**20:.1f}" if memory else "–",
            )
        )
    columns = (
        "contender",
        "dtype",
        "step, ms",
        "meshmuon ÷",
        "difference",
        "host µs/matrix",
        "allocations + numbers",
        "extra MiB",
    )
    report.table(f"{result['model']}: {result['about']} ({result['matrices']} matrices)", columns, rows)


def goals_of(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Goal]:
    goals = []
    for result in results:
        fastest = rivals(result)[0]
        ours, where = result["memory"][OURS], result["model"]
        host_us = result["host"][OURS]["cpu_us"]
        goals += [
            Goal(
                f"{where}: step ÷ fastest fp32 contender",
                result["ratio"][fastest]["median"],
                most=0.5,
                note=f"beside {fastest}",
            ),
            Goal(
                f"{where}: host µs per matrix", host_us, most=15, note="process time, 8×8 matrices of the whole model"
            ),
            Goal(
                f"{where}: allocations of a step after the second",
                ours["count"],
                most=0,
                note=f"and {ours['numbers']} numbers",
            ),
            Goal(f"{where}: extra memory ÷ two waves", ours["extra_over_two_waves"], most=1),
            *goals_of_auto(result),
        ]
    return goals


def goals_of_auto(result: dict[str, Any]) -> list[Goal]:
    """``scheme="auto"`` beside rivals whose error is equal or worse."""
    where, error = result["model"], result["worst_error"]
    fastest = rivals(result, error[AUTO])[0]
    return [
        Goal(f"{where}: worst error of auto ÷ polar_express's", error[AUTO] / error[POLAR_EXPRESS], most=ROUNDING),
        Goal(
            f"{where}: step with auto ÷ {TORCH}",
            time_ratio(result, AUTO, TORCH).median,
            most=0.5 if where == "MoE" else 0.35,
        ),
        Goal(
            f"{where}: step with auto ÷ fastest of equal or worse error",
            time_ratio(result, AUTO, fastest).median,
            most=0.5,
            note=f"beside {fastest}",
        ),
    ]


def measure(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    contenders = available(report.note)
    shape = (16, 32) if options.quick else SHAPE
    errors = {contender.name: error_by_svd(contender, *shape) for contender in contenders if contender.is_muon}
    results = []
    for model in models_for(options):
        results.append(measure_model(model, contenders, errors, options, report))
        show_model(results[-1], report)
        show_accuracy(results[-1], report)
    return results


def show(results: Sequence[dict[str, Any]], report: Report) -> None:
    """The tables are shown while measuring; what is left is how contenders differ."""
    for contender in CONTENDERS:
        if contender.differs and contender.name in results[0]["host"]:
            report.note(f"{contender.name}: {contender.differs}")


def models_for(options: argparse.Namespace) -> list[Model]:
    known = QUICK_MODELS if options.quick else MODELS
    return [model for model in known if options.models is None or model.name in options.models]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=None, help="names of models (default all)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="no round starts later, per model (default 20, twice where costly)"
    )


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not models_for(options):
        known = [model.name for model in (QUICK_MODELS if options.quick else MODELS)]
        parser.error(f"no model is called {options.models}; there are {known}")


if __name__ == "__main__":
    common.Benchmark("single_device", __doc__, measure, show, goals_of, add_options, settle_options).main()
