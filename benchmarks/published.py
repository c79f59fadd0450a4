"""Published figures of other systems beside rough models of their schemes and the simulated step of meshmuon.

    make bench BENCH=published

Nothing is measured here. Times come from the machine files of ``meshmuon plan``, whose rates are assumptions; what can
be right is which scheme is faster, and by about how much. Older schemes are modelled in a few lines each, from what
their authors say:

- padded: every shape by itself, W parameters per turn, zeros where there are fewer; a stack of experts goes to one rank
  whole.
- repeated: every rank of a group gathers whole matrices and orthogonalises all of them.
- divided Gram: the products with the long side are divided over the group, those of the Gram matrix are not.
- local experts: experts are whole on their ranks, dense matrices are divided over the FSDP ranks of one expert-parallel
  group.

All of them use the standard form of Newton–Schulz, T(4n²m + 2n³) FLOPs in T = 5 steps.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from common import COLOURS, Benchmark, Goal, Report

from meshmuon.tools.predict.machines import Machine
from meshmuon.tools.simulate.description import load_model
from meshmuon.tools.simulate.inputs import load_machine
from meshmuon.tools.simulate.sharding import MeshAxes
from meshmuon.tools.simulate.simulation import MuonOptions, Simulation, Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS, WIRE = 5, 2  # of Newton–Schulz; bytes per element on the wire and in its products
WORKLOAD = Workload(tokens_per_step=4 * 2**20, mfu=0.4)
XTUNER = "https://github.com/InternLM/xtuner/pull/1716"
DION = "https://github.com/microsoft/dion"
MEGATRON = "https://github.com/NVIDIA/Megatron-LM/issues/6676"
DMUON = "https://arxiv.org/abs/2606.27153"


@dataclass(frozen=True)
class Kind:
    """Parameters of one shape: ``params`` of them, each a stack of ``stack`` matrices of ``rows`` × ``cols``."""

    rows: int
    cols: int
    stack: int
    params: int

    @property
    def elements(self) -> int:
        """Of one parameter."""
        return self.rows * self.cols * self.stack

    def seconds(self, machine: Machine, long_side: float = 1.0) -> float:
        """Of one matrix in the standard form, if this rank does a share of the products with its long side."""
        n, m = sorted((self.rows, self.cols))
        return STEPS * (4 * n * n * m * long_side + 2 * n**3) / machine.rates_for("bfloat16").orthogonalisation_rate(n)


@cache
def simulated(model: str, mesh: str, machine: str) -> Simulation:
    return Simulation.run(load_model(model), MeshAxes.parse(mesh, None), load_machine(machine), MuonOptions(), WORKLOAD)


def kinds_of(simulation: Simulation) -> list[Kind]:
    """The matrices of a model."""
    counts: dict[tuple[int, int, int], int] = {}
    for stage in simulation.stages:
        for param in stage.planned.plan.params:
            sharded = param.sharded_matrices(param.layouts[0])[0]
            shape = sharded.rows, sharded.cols, param.count
            counts[shape] = counts.get(shape, 0) + 1
    return [Kind(*shape, params) for shape, params in counts.items()]


def gather_rate(machine: Machine) -> float:
    """Bytes per second of an all-gather over nodes: each byte enters a node once, over any of its links, and is
    copied inside.
    """
    return min(machine.inside.bytes_per_second, machine.between.bytes_per_second * machine.ranks_per_node)


def padded(kinds: Sequence[Kind], ranks: int, machine: Machine) -> float:
    """Seconds: all-to-all of whole parameters, one turn after the other."""
    seconds = 0.0
    for kind in kinds:
        turns = math.ceil(kind.params / ranks)
        moved = 2 * kind.elements * WIRE * (ranks - 1) / ranks
        seconds += turns * (kind.stack * kind.seconds(machine) + moved / machine.between.bytes_per_second)
    return seconds


def padded_bytes(simulation: Simulation) -> int:
    """Bytes of a rank: weights, gradients and state, and two turns at once of the largest parameter.

    A turn needs what is sent, what is gathered and two temporaries of its size.
    """
    largest = max(math.prod(param.shape) for param in simulation.model.params if param.use_muon)
    return 2 * 4 * largest * WIRE + simulation.most_bytes("total") - simulation.most_bytes("exchange_buffers")


def local_experts(kinds: Sequence[Kind], ranks: int, dense_ranks: int, machine: Machine) -> float:
    """Seconds: experts divided over all ranks; dense matrices are gathered by ``dense_ranks``, divided over these,
    and summed.
    """
    seconds = 0.0
    for kind in kinds:
        if kind.stack > 1:
            seconds += kind.params * kind.stack / ranks * kind.seconds(machine)
        else:
            gathered = 2 * kind.params * kind.elements * WIRE * (dense_ranks - 1) / dense_ranks
            seconds += math.ceil(kind.params / dense_ranks) * kind.seconds(machine) + gathered / gather_rate(machine)
    return seconds


@dataclass(frozen=True)
class Domain:
    """How Megatron divides the work of 32 ranks: 2 copies, over which layers are divided, of tp 2 × 8 shards;
    experts 8 × 2.
    """

    copies: int = 2
    dense: int = 16
    sharded: int = 8  # of ``dense``, the axis over which Gram matrices are summed
    expert_parallel: int = 8
    expert_shards: int = 2


def megatron(kinds: Sequence[Kind], scheme: str, machine: Machine, domain: Domain) -> float:
    """Seconds of one rank: repeated in the domain, with divided Gram products, or one home per matrix."""
    seconds = 0.0
    for kind in kinds:
        group = domain.expert_shards if kind.stack > 1 else domain.dense
        divided = domain.expert_shards if kind.stack > 1 else domain.sharded
        # in the group
        here = kind.params * kind.stack / domain.copies / (domain.expert_parallel if kind.stack > 1 else 1)
        size, n = kind.rows * kind.cols * WIRE, min(kind.rows, kind.cols)
        rate = machine.inside.bytes_per_second
        if scheme == "repeated":
            seconds += here * (kind.seconds(machine) + size * (group - 1) / group / rate)
        elif scheme == "divided Gram":
            calls = STEPS * kind.params / domain.copies  # one for all experts of a stack
            seconds += (
                here * (kind.seconds(machine, 1 / divided) + STEPS * 2 * n * n * WIRE / rate)
                + calls * machine.inside.seconds
            )
        else:
            seconds += here / group * (kind.seconds(machine) + 2 * size * (group - 1) / group / rate)
    return seconds


def xtuner_rows(model: str, published: tuple[float | None, float, float]) -> list[dict[str, Any]]:
    """783 → 236 ms (EP 1) and 232 ms (EP 8), or out of memory → 491 and 1019 ms; both on 128 GPUs."""
    ours = [simulated(model, f"dp_shard=128{ep}", "h100") for ep in ("", ",ep=8")]
    machine, kinds = ours[0].machine, kinds_of(ours[0])
    case = f"xtuner, {model} on 128"
    rows = [
        _row(case, "padded", padded(kinds, 128, machine), published[0], XTUNER, memory=padded_bytes(ours[0])),
        _row(case, "local experts, EP 1", local_experts(kinds, 128, 128, machine), published[1], XTUNER),
        _row(case, "local experts, EP 8", local_experts(kinds, 128, 16, machine), published[2], XTUNER),
    ]
    names = ("meshmuon, EP 1", "meshmuon, EP 8")
    memories = [simulation.most_bytes("total") for simulation in ours]
    times = [simulation.seconds for simulation in ours]
    return rows + [_row(case, name, s, None, "", memory=m) for name, s, m in zip(names, times, memories, strict=True)]


def megatron_rows(model: str) -> list[dict[str, Any]]:
    """632 → 356 → 157 ms on 32 GB300; the model is not stated."""
    ours = simulated(model, "dp_shard=16,tp=2,ep=16", "gb300")
    machine, kinds, case = ours.machine, kinds_of(ours), f"Megatron, {model} on 32"
    published = {"repeated": 0.632, "divided Gram": 0.356, "one home": 0.157}
    rows = [
        _row(case, name, megatron(kinds, name, machine, Domain()), value, MEGATRON) for name, value in published.items()
    ]
    return [*rows, _row(case, "meshmuon", ours.seconds, None, "", memory=ours.most_bytes("total"))]


def dion_rows(model: str) -> list[dict[str, Any]]:
    """85.5 ms on one H100 for a model of 1B parameters, which is not stated; matrices of one shape in batches."""
    ours = simulated(model, "dp_shard=1", "h100")
    machine, case = ours.machine, f"dion, {model} on 1"
    rates = machine.rates_for("bfloat16", several_nodes=False)
    elementwise = rates.seconds_per_element("momentum") + rates.seconds_per_element("update")
    seconds = sum(
        kind.params * (kind.stack * kind.seconds(machine) + elementwise * kind.elements) for kind in kinds_of(ours)
    )
    return [_row(case, "batches of a shape", seconds, 0.0855, DION), _row(case, "meshmuon", ours.seconds, None, "")]


def dmuon_rows(models: Sequence[str]) -> list[dict[str, Any]]:
    """+1.7 to 3.4 % of a training step over AdamW on 16 nodes; figures are shares, not seconds."""
    rows = []
    for model in models:
        ours = simulated(model, "dp_shard=128", "h100")
        elements = sum(math.prod(param.shape) for param in ours.model.params)
        adamw = 7 * 4 * elements / 128 / ours.machine.memory_bytes_per_second
        more = (ours.seconds - adamw) / (ours.training_seconds + adamw)
        rows.append(
            _row(
                "DMuon, 16 nodes",
                f"meshmuon, {model}, more than AdamW's step",
                more,
                None,
                DMUON,
                kind="share",
                said="+1.7 to +3.4%",
            )
        )
    return rows


def memory_rows(model: str, ranks: int) -> list[dict[str, Any]]:
    """AdamW's bytes per parameter by Megatron's and DeepSpeed's formulas; figures are bytes per parameter and rank."""
    ours = simulated(model, f"dp_shard={ranks}", "h100")
    elements = sum(math.prod(param.shape) for param in ours.model.params)
    counted = float(torch.cat([stage.memory["adamw_alone"] for stage in ours.stages]).sum()) / elements
    formulas = {
        "Megatron, fp32 weights and gradients, not distributed": 16.0,
        "Megatron, bf16 weights, fp32 gradients, distributed": 6 + 12 / ranks,
        "DeepSpeed, ZeRO 3, summed over ranks": 18.0,
    }
    case = f"AdamW's memory, {model} on {ranks}"
    rows = [_row(case, name, value, None, "", kind="bytes") for name, value in formulas.items()]
    return [*rows, _row(case, "meshmuon plan, FSDP2 with fp32, summed over ranks", counted, None, "", kind="bytes")]


def _row(case: str, scheme: str, value: float, published: float | None, source: str, **more: Any) -> dict[str, Any]:
    return {
        "case": case,
        "scheme": scheme,
        "modelled": value,
        "published": published,
        "source": source,
        "kind": "s",
        **more,
    }


def measure(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    if options.quick:
        return [*megatron_rows("qwen3-30b-a3b"), *dmuon_rows(["qwen3-0.6b"]), *memory_rows("qwen3-0.6b", 8)]
    return [
        *xtuner_rows("qwen3-30b-a3b", (0.783, 0.236, 0.232)),
        *xtuner_rows("moe-397b", (None, 0.491, 1.019)),
        *megatron_rows("qwen3-235b-a22b"),
        *dion_rows("gpt2-xl"),
        *dmuon_rows(["qwen3-8b", "qwen3-32b", "llama3-70b"]),
        *memory_rows("llama3-8b", 64),
    ]


def _text(row: dict[str, Any], key: str) -> str:
    value = row[key]
    if key == "published" and "said" in row:
        return str(row["said"])
    if value is None:
        return "out of memory" if row["scheme"] == "padded" else ""
    return {"s": f"{1e3 * value:.1f} ms", "share": f"{value:+.2%}", "bytes": f"{value:.2f} B"}[row["kind"]]


def cells(results: Sequence[dict[str, Any]], row: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table; ratios are to the first line of the case that has one."""
    first = next(other for other in results if other["case"] == row["case"])
    first = (
        first
        if first["published"]
        else next((r for r in results if r["case"] == row["case"] and r["published"]), first)
    )
    ratios = [
        f"{row[key] / first[key]:.2f}" if row[key] and first[key] and row["kind"] == "s" else ""
        for key in ("modelled", "published")
    ]
    memory = f"{row['memory'] / 2**30:.0f} GiB" if "memory" in row else ""
    return row["case"], row["scheme"], _text(row, "modelled"), _text(row, "published"), *ratios, memory


def show(results: Sequence[dict[str, Any]], report: Report) -> None:
    columns = ("case", "scheme", "modelled", "published", "modelled, relative", "published, relative", "memory")
    report.table("Published figures beside models of their schemes", columns, [cells(results, row) for row in results])


def goals_of(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Goal]:
    """The order of the published figures, and meshmuon beside every modelled scheme."""
    wrong, slower = 0, 0
    for case in dict.fromkeys(row["case"] for row in results):
        rows = [row for row in results if row["case"] == case and row["kind"] == "s"]
        known = [row for row in rows if row["published"]]
        pairs = [
            (a, b)
            for k, a in enumerate(known)
            for b in known[k + 1 :]
            if abs(a["published"] / b["published"] - 1) > 0.05
        ]
        wrong += sum((a["modelled"] < b["modelled"]) != (a["published"] < b["published"]) for a, b in pairs)
        ours = [row["modelled"] for row in rows if row["scheme"].startswith("meshmuon")]
        slower += sum(row["modelled"] < min(ours) for row in rows if ours and not row["scheme"].startswith("meshmuon"))
    return [
        Goal("pairs of published figures whose order the models get wrong", wrong, most=0),
        Goal("modelled schemes that are faster than meshmuon's simulated step", slower, most=0),
    ]


def plot(results: Sequence[dict[str, Any]], figure: Figure) -> None:
    rows = [row for row in results if row["kind"] == "s"]
    axes = figure.subplots()
    for offset, key, colour in ((-0.2, "modelled", COLOURS["ours"]), (0.2, "published", COLOURS["others"])):
        axes.barh(
            [k + offset for k in range(len(rows))],
            [1e3 * (row[key] or 0) for row in rows],
            0.4,
            color=colour,
            label=key,
        )
    axes.set_yticks(range(len(rows)), [f"{row['case']}: {row['scheme']}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms per step")
    axes.legend()


BENCHMARK = Benchmark("published", __doc__, measure, show, goals_of, plot, (10.0, 5.5))

if __name__ == "__main__":
    BENCHMARK.main()
