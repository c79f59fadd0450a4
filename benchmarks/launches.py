"""What a rank does in a step on a GPU: kernels that it launches, bytes that they move, operations of the host.

Counted: no GPU is needed, nothing is timed.

For the models of ``meshmuon plan`` the launches follow from the plan, with batches for the memory of an H100. Small
programs run on the stand-ins of ``tests/support/happens_before``, which also count bytes and operations of the host;
tests compare both ways on every rank.

    python benchmarks/launches.py
    python benchmarks/launches.py --hardware b200
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import common  # first: it sets what torch reads when it starts
import torch
from common import Goal, Report

from meshmuon.tools.predict.launches import Launches
from meshmuon.tools.simulate.description import load_model
from meshmuon.tools.simulate.inputs import load_machine
from meshmuon.tools.simulate.sharding import MeshAxes
from meshmuon.tools.simulate.simulation import MuonOptions, SimulatedStage, plan_cluster

sys.path.insert(0, str(common.ROOT))  # for the stand-ins

from torch.distributed.tensor import Shard

from tests.support.happens_before.launches import CountedStep, count_launches
from tests.support.happens_before.programs import Program, ProgramParam

# model, mesh, launches per rank and step at most
MODELS = (
    ("llama3-8b", "dp_shard=64", 350),
    ("qwen3-235b-a22b", "dp_shard=128", 1200),
    ("kimi-k2", "dp_shard=128,ep=128", 2500),
)
ROWS, BFLOAT16, FLOAT32 = (Shard(0),), torch.bfloat16, torch.float32


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.models = MODELS[:1] if options.quick else MODELS


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hardware", default="h100", help="a machine of meshmuon plan; its memory decides the batches")


def measure(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    machine = load_machine(options.hardware)
    rows = []
    for name, mesh, most in report.each(options.models, lambda model: str(model[0])):
        muon = MuonOptions(param_dtype=BFLOAT16)
        model, axes = load_model(name), MeshAxes.parse(mesh)
        (planned,) = plan_cluster(model, axes, muon, machine)
        stage = SimulatedStage.of(planned, machine, muon)
        rank, largest = max(stage.launches.items(), key=lambda item: item[1].total)
        matrices = sum(rank in task.sharded.holdings for task in planned.plan.tasks)  # that it holds, whole or a piece
        rows.append({"case": f"{model.title}, {mesh}", "most": most, **facts_of(largest, matrices)})
    return rows + small_cases()


def facts_of(launches: Launches, matrices: int) -> dict[str, Any]:
    beside = launches.total - launches.products
    sizes = [size for size, _, _ in launches.batches.elements()]
    return {
        "launches": launches.total,
        "products": launches.products,
        "beside": beside,
        "per_matrix": launches.total / matrices,
        "beside_per_matrix": beside / matrices,
        "batches": len(sizes),
        "batch_sizes": [min(sizes), max(sizes)],
    }


def weights(dtype: torch.dtype, count: int = 16) -> tuple[ProgramParam, ...]:
    shapes = [(16, 32), (16, 8)]
    return tuple(ProgramParam(f"layers.{k}.weight", shapes[k % 2], ROWS, dtype=dtype) for k in range(count))


def counted_step(params: tuple[ProgramParam, ...], **options: Any) -> CountedStep:
    """Of the first of two ranks."""
    return count_launches(Program(mesh=(2,), params=params, options={"scheme": "polar_express", **options}, steps=3))[0]


def small_cases() -> list[dict[str, Any]]:
    """Programs whose launches and bytes are counted on stand-ins, on their first rank."""

    experts = tuple(ProgramParam(f"layers.{k}.experts.weight", (16, 16, 32), ROWS, dtype=BFLOAT16) for k in range(2))
    cases: list[tuple[str, tuple[ProgramParam, ...], dict[str, Any]]] = [
        ("FSDP2, 16 matrices, bfloat16", weights(BFLOAT16), {}),
        ("FSDP2, 16 matrices, float32", weights(FLOAT32), {}),
        ("the same, bfloat16, stochastic rounding", weights(BFLOAT16), {"rounding": "stochastic"}),
        ('the same, bfloat16, nonfinite="skip"', weights(BFLOAT16), {"nonfinite": "skip"}),
        ("16 whole experts, one per batch", experts, {"chunk_size": 1}),
        ("16 whole experts, one batch", experts, {}),
    ]
    rows = []
    for name, params, options in cases:
        held = sum(math.prod(param.shape) for param in params) // 2
        facts = counted_facts(counted_step(params, **options), held)
        rows.append({"case": name, "most": None, **facts})
    return rows


def further_launches(gradients: int) -> int:
    """That ``nonfinite="skip"`` adds to a step."""
    plain, skipping = (counted_step(weights(BFLOAT16, gradients), nonfinite=how) for how in ("propagate", "skip"))
    return skipping.launches - plain.launches


def counted_facts(counted: CountedStep, elements: int) -> dict[str, Any]:
    functions = {work.rpartition(" ")[2]: 0 for work in counted.recorder.launches}
    for work, count in counted.recorder.launches.items():
        functions[work.rpartition(" ")[2]] += count
    products = sum(functions.get(name, 0) for name in ("_multiply", "normalise", "iterate"))
    return {
        "launches": counted.launches,
        "products": products,
        "beside": counted.launches - products,
        "per_matrix": counted.launches / 16,
        "beside_per_matrix": (counted.launches - products) / 16,
        "batches": functions["normalise"] // 2,
        "batch_sizes": None,
        "host_operations": counted.host_operations,
        "bytes_per_element": counted.bytes_of("copy_momenta", "fill", "apply") / elements,
    }


def show(rows: list[dict[str, Any]], report: Report) -> None:
    columns = (
        "case",
        "launches",
        "at most",
        "per matrix",
        "products",
        "others",
        "per matrix",
        "batches",
        "bytes",
        "host operations",
    )
    report.table("launches per rank and step, on the rank with most", columns, [_cells(row) for row in rows])
    report.note(
        "products: with the norms before and the copy after. Others: momentum, packing, exchanges, updates, AdamW."
    )
    report.note(
        "bytes: per element that a rank holds, momentum to wire and wire to weight; with nonfinite, as if no update "
        "were finite (4 fewer otherwise). Batches: how many, of how many matrices."
    )
    report.note("host operations: calls of torch that launch nothing, such as views; without those of the exchanges.")


def _cells(row: dict[str, Any]) -> Sequence[str]:
    sizes = "" if row["batch_sizes"] is None else " of {}–{}".format(*row["batch_sizes"])
    counted = (f"{row['bytes_per_element']:.1f}", str(row["host_operations"])) if "host_operations" in row else ("", "")
    launches, most, products, beside = (
        f"{row[key]:,}" if row[key] else "" for key in ("launches", "most", "products", "beside")
    )
    per_matrix, beside_per_matrix = (f"{row[key]:.2f}" for key in ("per_matrix", "beside_per_matrix"))
    batches = f"{row['batches']}{sizes}"
    return row["case"], launches, most, per_matrix, products, beside, beside_per_matrix, batches, *counted


def goals(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[Goal]:
    found = [Goal(f"launches of {row['case']}", row["launches"], most=row["most"]) for row in rows if row["most"]]
    plain, single, _, guarded = rows[-6:-2]
    few, many = further_launches(16), further_launches(48)
    return [
        *found,
        Goal(
            "launches beside the products, per exchanged matrix, Llama 3 8B",
            rows[0]["beside_per_matrix"],
            most=0.5,
            note=f"in the program of 16 matrices {plain['beside_per_matrix']:.2f}: they are per wave",
        ),
        Goal("bytes per element, bfloat16 weights", plain["bytes_per_element"], most=24),
        Goal("bytes per element, float32 weights", single["bytes_per_element"], most=24),
        Goal('bytes per element, bfloat16 weights, nonfinite="skip"', guarded["bytes_per_element"], most=24),
        Goal(
            'launches that nonfinite="skip" adds per further gradient',
            (many - few) / 32,
            most=0.1,
            note=f"it adds {few} per step, which is {few / 16:.2f} per gradient in the program of 16 matrices",
        ),
    ]


if __name__ == "__main__":
    common.Benchmark("launches", __doc__, measure, show, goals, add_options, settle_options).main()
