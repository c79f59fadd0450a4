"""The same model with other options or on other meshes, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ..errors import ConfigError
from .build_report import choice_of, refused_choice
from .cluster import MuonOptions
from .report import ChoiceFigures
from .sharding import Sharding
from .simulation import Simulation, dtype_name
from .units import bytes_text


def compare_options(simulation: Simulation) -> list[ChoiceFigures]:
    """The options as they are, and each of them changed by itself."""
    rows = [choice_of(simulation, "as chosen", chosen=True)]
    for label, options in _other_options(simulation):
        rows.append(_row(simulation, label, simulation.sharding, options))
    return rows


def compare_meshes(simulation: Simulation, others: Sequence[Sharding]) -> list[ChoiceFigures]:
    """The mesh of ``simulation`` and ``others``."""
    rows = [choice_of(simulation, simulation.sharding.text, chosen=True)]
    rows.extend(_row(simulation, sharding.text, sharding, simulation.options) for sharding in others)
    return rows


def _row(simulation: Simulation, label: str, sharding: Sharding, options: MuonOptions) -> ChoiceFigures:
    try:
        other = Simulation.run(simulation.model, sharding, simulation.machine, options, simulation.workload)
    except ConfigError as error:
        return refused_choice(label, str(error))
    return choice_of(other, label, chosen=False)


def _other_options(simulation: Simulation) -> Iterator[tuple[str, MuonOptions]]:
    options, plan = simulation.options, simulation.stages[0].planned.plan
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
    for factor in (4, 0.25):
        budget = int(options.memory_budget * factor)
        yield f"memory_budget={bytes_text(budget)}", replace(options, memory_budget=budget)
