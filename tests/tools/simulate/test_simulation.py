"""Time, memory and advice of simulated clusters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshmuon import Muon, get_default_muon_param_groups
from meshmuon.plan import Nodes, routes_of, slot_sizes, wave_sizes
from meshmuon.tools.predict.machines import Machine
from meshmuon.tools.predict.prediction import predict
from meshmuon.tools.simulate.advice import advice_for, advice_from_choices, search_options
from meshmuon.tools.simulate.description import ModelDescription, ModelParam, load_model
from meshmuon.tools.simulate.inputs import load_machine
from meshmuon.tools.simulate.modules import describe_module
from meshmuon.tools.simulate.report import Figures, build_report, bytes_between_blocks
from meshmuon.tools.simulate.sharding import MeshAxes
from meshmuon.tools.simulate.simulation import MuonOptions, Simulation, Workload
from tests.support.plans import random_plan
from tests.tools.predict.test_calibration import MEASURED

WORKLOAD = Workload(2**22, 0.4)


def simulate(model: ModelDescription, mesh: str, machine: Machine | None = None, **options: Any) -> Simulation:
    sharding = MeshAxes.parse(mesh)
    return Simulation.run(model, sharding, machine or load_machine("h100"), MuonOptions(**options), WORKLOAD)


def report_of(simulation: Simulation) -> Figures:
    return build_report(simulation, "", advice_for(simulation))


class Net(nn.Module):
    """Matrices that do not divide by the ranks, vectors and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(5))
        self.wide = nn.Linear(24, 37)
        self.head = nn.Linear(37, 11)


def test_memory_is_what_a_real_rank_holds() -> None:
    """Weights, gradients, momentum, AdamW's state and exchange buffers, byte for byte, on rank 0 of 4."""
    with torch.device("meta"):
        described = describe_module(Net(), "net")
    simulation = simulate(described, "dp_shard=4", load_machine("cpu"))
    (stage,) = simulation.stages
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        model = fully_shard(Net(), mesh=DeviceMesh("cpu", torch.arange(4)))
        optimizer = Muon(get_default_muon_param_groups(model), none_grad=False)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        plan = optimizer.plan()
        local = [param.to_local() for param in model.parameters()]
        kinds = {"momentum_buffer": "momentum", "exp_avg": "adamw_state", "exp_avg_sq": "adamw_state"}
        held = {"momentum": 0, "adamw_state": 0}
        for state in optimizer.state.values():
            for key, value in state.items():
                if key in kinds:
                    held[kinds[key]] += value.to_local().nbytes
    finally:
        dist.destroy_process_group()
    slots: dict[int, list[Any]] = {}
    for wave, routes in enumerate(routes_of(plan, 0)):
        slots.setdefault(wave % plan.options.in_flight, []).append(wave_sizes(routes))
    assert (
        int(stage.memory["parameters"][0]) == int(stage.memory["gradients"][0]) == sum(shard.nbytes for shard in local)
    )
    assert {kind: int(stage.memory[kind][0]) for kind in held} == held
    assert int(stage.memory["exchange_buffers"][0]) == 4 * sum(sum(slot_sizes(waves)) for waves in slots.values())


def test_memory_beside_adamw() -> None:
    report = report_of(simulate(load_model("llama3-8b"), "dp_shard=64"))
    rows = {row.kind: row for row in report.memory}
    assert rows["total"].adamw_most == sum(rows[kind].adamw_most for kind in ("parameters", "gradients", "adamw_state"))
    assert rows["parameters"].adamw_most == rows["parameters"].most
    assert rows["momentum"].most + rows["adamw_state"].most < rows["adamw_state"].adamw_most
    total = sum(row.most for row in report.memory if row.kind != "total")
    assert rows["total"].most <= total


def test_a_step_is_as_long_as_its_parts_allow() -> None:
    """At least as long as the longest of device and links, at most as long as both together."""
    for mesh in ("dp_shard=64", "dp_replicate=8,dp_shard=8", "dp_shard=16,tp=4", "pp=4,dp_shard=16"):
        simulation = simulate(load_model("llama3-8b"), mesh)
        for stage in simulation.stages:
            work, timeline = stage.timeline.work, stage.timeline
            parts = [part for wave in work.waves for part in (wave.momentum, wave.orthogonalise, wave.update)]
            device = list(map(sum, zip(work.local, work.adamw, *parts, strict=True)))
            links = sum(max(wave.gather) + max(wave.scatter) for wave in work.waves)
            assert timeline.exchanging == pytest.approx(links)
            assert max(*device, links) <= timeline.seconds * (1 + 1e-9)
            longest = sum(map(max, parts)) + max(work.local) + max(work.adamw) + links
            assert timeline.seconds <= max(longest, *work.host_ahead) * (1 + 1e-9)
            assert timeline.hidden + timeline.waited_for == pytest.approx(timeline.exchanging)


PARTS = ("orthogonalise", "local", "elementwise", "exchange_waited_for", "others_waited_for", "adamw", "host")


@pytest.mark.parametrize("machine", ["h100", "cpu"])
@pytest.mark.parametrize(
    ("model", "mesh"), [("llama3-70b", "dp_shard=64"), ("qwen3-30b-a3b", "dp_shard=32,ep=8"), ("gpt2", "pp=2")]
)
def test_the_parts_of_a_step_add_up(model: str, mesh: str, machine: str) -> None:
    """On Llama 3 70B ranks wait for others that have more to do in a wave."""
    simulation = simulate(load_model(model), mesh, load_machine(machine), memory_budget=2**26)
    step = report_of(simulation).step
    assert sum(getattr(step, part) for part in PARTS) == pytest.approx(step.seconds)
    assert step.others_waited_for > 0.1 * step.seconds or model != "llama3-70b"
    assert step.tokens_per_rank == 2**22 / simulation.sharding.ranks
    elements = max(int((stage.memory["adamw_alone"] // 16).max()) for stage in simulation.stages)
    assert step.adamw_alone == pytest.approx(elements * 28 / simulation.machine.memory_bytes_per_second)
    assert 0 < step.adamw <= step.adamw_alone


def test_faster_links_never_slow_a_step() -> None:
    machine = load_machine("h100")
    link = replace(machine.between, bytes_per_second=machine.between.bytes_per_second * 4)
    slow, fast = (
        simulate(load_model("llama3-8b"), "dp_shard=64", one) for one in (machine, replace(machine, between=link))
    )
    assert fast.seconds < slow.seconds


def test_columns_of_ranks_add_up() -> None:
    report = report_of(simulate(load_model("gpt-oss-20b"), "dp_replicate=2,dp_shard=32,ep=8"))
    assert sum(report.ranks.flops) == pytest.approx(report.step.flops)
    assert sum(report.ranks.matrices) == report.model.matrices
    assert report.ranks.rank == list(range(64))
    assert report.ranks.rank[report.ranks.flops.index(max(report.ranks.flops))] == report.balance.heaviest_rank
    assert sum(row.matrices for row in report.params) == report.model.matrices
    for inside, between in ((report.ranks.sent_inside, report.ranks.sent_between),):
        assert sum(inside) + sum(between) == sum(row.bytes_sent for row in report.params)


def test_the_share_follows_tokens_and_use_of_flops() -> None:
    simulation = simulate(load_model("llama3-8b"), "dp_shard=64")
    half = replace(simulation, workload=Workload(2**21, 0.4))
    assert half.training_seconds == pytest.approx(simulation.training_seconds / 2)
    assert simulation.share < half.share
    expected = 6 * 8_030_261_248 * 2**22 / (64 * 989e12 * 0.4)
    assert simulation.training_seconds == pytest.approx(expected)


def wide(count: int, size: int = 8192) -> ModelDescription:
    return ModelDescription(
        "wide", "wide", "", tuple(ModelParam(f"w.{k}", (size, size), True, layer=k) for k in range(count))
    )


def test_scratch_is_that_of_the_largest_batch_within_the_budget() -> None:
    single, both = (simulate(wide(4, 256), "dp_shard=2", memory_budget=budget, chunk_size=4) for budget in (1, 2**30))
    assert both.most_bytes("scratch") == 2 * single.most_bytes("scratch") > 0


def test_advice_on_few_large_matrices() -> None:
    (first, *_) = advice_for(simulate(wide(70), "dp_shard=64"))
    assert first.startswith("70 large matrices of 8192×8192 on 64 ranks: the heaviest rank, ")
    assert not [text for text in advice_for(simulate(wide(64), "dp_shard=64")) if "large matrices" in text]


def test_advice_on_many_peers_names_a_mesh_that_can_be_planned() -> None:
    model = wide(12, 4096)
    simulation = simulate(model, "dp_shard=2048")
    assert simulation.most_peers == 2047
    (text,) = [text for text in advice_for(simulation) if "peers per exchange" in text]
    assert text.startswith("2,047 peers per exchange: each needs a connection")
    mesh = text.partition('--mesh "')[2].partition('"')[0]
    assert "--replicas repeat" in text
    better = simulate(model, mesh, replicas="repeat")
    assert better.sharding.ranks == 2048
    assert better.most_peers < 1024


def test_advice_on_buffers_names_a_budget_that_helps() -> None:
    machine = replace(load_machine("h100"), memory_bytes=2 * 10**9)
    model, mesh = load_model("llama3-8b"), "dp_shard=64"
    simulation = simulate(model, mesh, machine, memory_budget=2**28)
    (text,) = [text for text in advice_for(simulation) if text.startswith("Exchange buffers take")]
    budget = int(text.rpartition("(")[2].rstrip(")."))
    assert budget < 2**28
    assert simulate(model, mesh, machine, memory_budget=budget).most_bytes("exchange_buffers") < simulation.most_bytes(
        "exchange_buffers"
    )


def test_advice_on_a_budget_that_is_faster_needs_no_comparison() -> None:
    simulations = (
        simulate(load_model("llama3-70b"), "dp_shard=64", memory_budget=2**26),
        simulate(load_model("llama3-8b"), "dp_shard=8"),
    )
    waiting, busy = map(search_options, simulations)
    assert [row.label for row in waiting] == ["as chosen", *(f"memory_budget={mib}*2**20" for mib in (256, 128, 32))]
    (text,) = advice_from_choices(waiting)
    assert text.startswith("memory_budget=256*2**20 takes ")
    assert [row.label for row in busy] == ["as chosen"]
    assert advice_from_choices(busy) == []


def test_advice_on_memory() -> None:
    machine = replace(load_machine("h100"), memory_bytes=10**8)
    assert any(
        "without any activations" in text for text in advice_for(simulate(load_model("gpt2"), "dp_shard=2", machine))
    )
    assert not [text for text in advice_for(simulate(load_model("gpt2"), "dp_shard=2")) if "activations" in text]


def test_thousands_of_ranks() -> None:
    """Equal layers and experts on 4,096 ranks: everything is counted, and every rank has its row."""
    experts = ModelParam("layers.0.experts.w1", (64, 512, 256), True, matrices=None, expert=True, layer=0)
    described = load_model("mixtral-8x7b")
    entry = next(param.matrices for param in described.params if param.name.endswith("experts.down_proj"))
    dense = ModelParam("layers.0.wq.weight", (512, 256), True, layer=0)
    model = replace(described, params=(replace(experts, matrices=entry), dense), experts_per_token=2)
    report = report_of(simulate(model, "dp_shard=4096,ep=64"))
    assert len(report.ranks.rank) == 4096
    assert sum(report.ranks.matrices) == 65
    assert len(report.traffic[0].bytes) == 64
    assert sum(map(sum, report.traffic[0].bytes)) == sum(report.ranks.sent_inside) + sum(report.ranks.sent_between)


@pytest.mark.parametrize("seed", range(12))
def test_bytes_between_blocks_are_the_sum_of_all_transfers(seed: int) -> None:
    made = random_plan(seed)
    nodes = Nodes.of({rank: rank // 3 for rank in made.ranks}) if seed % 4 else None
    plan = replace(made, options=replace(made.options, nodes=nodes))
    found = bytes_between_blocks(plan)
    expected = torch.zeros_like(torch.tensor(found["bytes"]))
    for index, task in enumerate(plan.tasks):
        for transfer in (*plan.gather_sends(index), *plan.scatter_sends(index)):
            source, target = (
                plan.ranks.index(rank) // found["ranks_per_block"] for rank in (transfer.source, transfer.target)
            )
            expected[source, target] += transfer.piece.size * plan.params[task.param].itemsize
    assert expected.tolist() == found["bytes"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mesh", ["dp_shard=8", "dp_replicate=2,dp_shard=4", "dp_shard=8,ep=4"])
def test_the_prediction_of_a_calibrated_cluster_is_that_of_the_doctor(mesh: str, device: str) -> None:
    """The same plan and the same rates: one number, whoever asks. AdamW's parameters are not in a plan, and are
    left out.
    """
    calibration = replace(
        MEASURED, device=device, ranks_per_node=4, exchange_cpu_share=0.5 if device == "cpu" else None
    )
    model = load_model("qwen3-30b-a3b")
    matrices = replace(model, params=tuple(param for param in model.params if param.use_muon))
    machine = load_machine("h100" if device == "cuda" else "cpu").with_calibration(calibration)
    simulation = simulate(matrices, mesh, machine, cost_model=calibration.cost_model())
    (stage,) = simulation.stages
    predicted = predict(stage.plan, calibration)
    assert simulation.seconds == predicted.seconds
    assert stage.timeline.seconds_by_kind == predicted.seconds_by_kind
    assert report_of(simulation).step.seconds == predicted.seconds


def row(label: str, seconds: float, *, refused: str = "") -> Figures:
    return Figures(label=label, chosen=label == "as chosen", seconds=seconds, memory=0, refused=refused)


def test_a_much_faster_option_is_named_unless_it_is_refused_or_less_exact() -> None:
    (sentence,) = advice_from_choices(
        [row("as chosen", 0.8), row('replicas="repeat"', 0.4), row("comm_dtype=float32", 0.9)]
    )
    assert sentence.startswith('replicas="repeat" takes 400.00 ms instead of 800.00 ms, with 0 B of memory')
    slower = [
        row("memory_budget=256*2**20", 0.75),
        row('scheme="keller"', 0.1),
        row('replicas="share"', 0.0, refused="no"),
    ]
    assert advice_from_choices([row("as chosen", 0.8), *slower]) == []


def test_replicas_that_are_set_by_hand_are_not_faster() -> None:
    """With waves of its own, the plan in which all replicas share was 4 % faster than the chosen one."""
    model, mesh = load_model("llama3-8b"), "dp_replicate=4,dp_shard=4,tp=4"
    auto, *by_hand = (
        simulate(model, mesh, param_dtype=torch.bfloat16, replicas=r).seconds for r in ("auto", "share", "repeat")
    )
    assert auto <= 1.01 * min(by_hand)
