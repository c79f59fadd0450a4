"""The same model with other options or on other meshes, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ...errors import ConfigError
from .cluster import MuonOptions
from .report import Figures, choice_of, refused_choice
from .sharding import Sharding
from .simulation import Simulation, dtype_name

_MUCH_WAITING = 0.1  # of a step: what a choice could save at most, if it is to be worth a word


def compare_options(simulation: Simulation, *, all_of_them: bool) -> list[Figures]:
    """The options as they are, and each of them changed by itself; or only what is likely to make a step faster."""
    rows = [choice_of(simulation, "as chosen", chosen=True)]
    for label, options in _other_options(simulation) if all_of_them else _likely_faster(simulation):
        rows.append(_row(simulation, label, simulation.sharding, options))
    return rows


def _likely_faster(simulation: Simulation) -> Iterator[tuple[str, MuonOptions]]:
    """Fewer and larger waves, where a step has several and waits for them. Each choice plans again, so that there is one."""
    timeline, plan = simulation.slowest.timeline, simulation.slowest.plan
    if len(plan.wave_lanes) > 1 and timeline.waited_for + timeline.parts.get("others", 0.0) > _MUCH_WAITING * timeline.seconds:
        yield _with_budget(simulation.options, 4)


def _with_budget(options: MuonOptions, factor: float) -> tuple[str, MuonOptions]:
    budget = int(options.memory_budget * factor)
    text = str(budget) if budget % 2**20 else f"{budget >> 20}*2**20"  # as ``Muon`` takes it
    return f"memory_budget={text}", replace(options, memory_budget=budget)


def compare_meshes(simulation: Simulation, others: Sequence[Sharding]) -> list[Figures]:
    """The mesh of ``simulation`` and ``others``."""
    rows = [choice_of(simulation, simulation.sharding.text, chosen=True)]
    rows.extend(_row(simulation, sharding.text, sharding, simulation.options) for sharding in others)
    return rows


def _row(simulation: Simulation, label: str, sharding: Sharding, options: MuonOptions) -> Figures:
    try:
        other = Simulation.run(simulation.model, sharding, simulation.machine, options, simulation.workload)
    except ConfigError as error:
        return refused_choice(label, str(error))
    return choice_of(other, label, chosen=False)


def _other_options(simulation: Simulation) -> Iterator[tuple[str, MuonOptions]]:
    options, plan = simulation.options, simulation.stages[0].plan
    if any(sharded.replicas > 1 for param in plan.params for sharded in param.sharded_matrices(param.layouts[0])[:1]):
        for replicas in ("share", "repeat"):
            if replicas != options.replicas:
                yield f'replicas="{replicas}"', replace(options, replicas=replicas)
    used = {param.itemsize for param in plan.params}
    for dtype in (torch.bfloat16, torch.float32):
        if used != {dtype.itemsize}:
            yield f"comm_dtype={dtype_name(dtype)}", replace(options, comm_dtype=dtype)
    for scheme in ("polar_express", "keller"):
        if scheme != options.scheme:
            yield f'scheme="{scheme}"', replace(options, scheme=scheme)
    yield from (_with_budget(options, factor) for factor in (4, 0.25))
