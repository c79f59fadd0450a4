"""What a plan says about launches is what a step launches on a stand-in for a GPU, on every rank; and they do not
grow.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from meshmuon.layout import Layout, Mesh, Sharded
from meshmuon.plan import PlannedParam, PlanOptions, cost_model_for, make_plan
from meshmuon.tools.predict.launches import Launches, PartKind, adamw_launches, launches_of
from meshmuon.tools.predict.prediction import SECONDS_PER_LAUNCH, predict
from meshmuon.tools.simulate.description import load_model
from meshmuon.tools.simulate.inputs import load_machine
from meshmuon.tools.simulate.sharding import MeshAxes
from meshmuon.tools.simulate.simulation import MuonOptions, SimulatedStage, plan_cluster
from tests.support.happens_before.launches import CountedStep, count_launches
from tests.support.happens_before.programs import Program, ProgramParam

BF16, F32 = torch.bfloat16, torch.float32
ROWS = (Shard(0),)


def weights(
    count: int, dtype: torch.dtype = BF16, placements: Any = ROWS, shapes: Any = ((16, 32), (16, 8)), **more: Any
) -> Any:
    name = f"layers.{{}}.{str(dtype).removeprefix('torch.')}{len(more)}.weight"
    return tuple(
        ProgramParam(name.format(k), shapes[k % len(shapes)], placements, dtype=dtype, **more) for k in range(count)
    )


def experts(count: int, size: int, placements: Any = ROWS, dtype: torch.dtype = BF16) -> tuple[ProgramParam, ...]:
    return tuple(
        ProgramParam(f"layers.{k}.experts.weight", (size, 16, 8), placements, dtype=dtype) for k in range(count)
    )


def program(params: Any, mesh: tuple[int, ...] = (2,), **options: Any) -> Program:
    fields = {name: options.pop(name) for name in ("optimizer",) if name in options}
    return Program(mesh=mesh, params=params, options={"scheme": "polar_express", **options}, steps=3, **fields)


ADAMW = tuple(ProgramParam(f"norms.{k}.weight", (16,), ROWS, use_muon=False) for k in range(40))
# Programs, the most that any of their ranks may launch, and its most operations of torch that launch nothing: what it
# is now.
PROGRAMS: dict[str, tuple[Program, int, int]] = {
    "FSDP2, bfloat16": (program(weights(16)), 49, 32),
    "FSDP2, float32": (program(weights(16, F32)), 49, 32),
    "mixed dtypes": (program((*weights(8), *weights(8, F32))), 52, 32),
    "by columns": (program(weights(4, placements=(Shard(1),))), 49, 29),
    "several waves": (program(weights(12), chunk_size=4), 101, 61),
    "experts, one per batch": (program(experts(2, 8), chunk_size=1), 176, 144),
    "experts, as many per batch as fit": (program(experts(2, 8), memory_budget=5000), 66, 66),
    "experts, one batch": (program((*experts(2, 8), *weights(4))), 71, 47),
    "replicated, every holder computes": (program(weights(3, placements=(Replicate(),)), replicas="repeat"), 44, 29),
    "HSDP, shared": (program(weights(8, placements=(Replicate(), Shard(0))), (2, 2), replicas="share"), 50, 29),
    "HSDP, repeated": (program(weights(8, placements=(Replicate(), Shard(0))), (2, 2), replicas="repeat"), 49, 32),
    "experts on a mesh of two dims": (
        program((*experts(2, 4, (Replicate(), Shard(0))), *weights(2, placements=(Shard(0), Shard(0)))), (2, 2)),
        49,
        33,
    ),
    "fused weights": (program((*weights(4, shapes=((48, 16),), split=(16, 32)), *weights(2))), 71, 69),
    "normuon": (program(weights(16), rule="normuon"), 95, 38),
    "normuon, experts": (program(experts(2, 8), rule="normuon"), 44, 21),
    "muon_plus": (program(weights(4), rule="muon_plus"), 67, 31),
    "muoneq": (program(weights(4), rule="muoneq"), 71, 31),
    "stochastic rounding": (program(weights(16), rounding="stochastic"), 50, 48),
    "default scheme, square": (program(weights(4, shapes=((32, 32), (16, 32))), scheme="auto"), 47, 26),
    "in host memory": (program((*weights(4, in_host=True), *experts(1, 4))), 70, 100),
    "AdamW beside": (program((*weights(4), *ADAMW)), 52, 29),
    "DistMuon": (program(weights(8, placements=None), optimizer="DistMuon"), 56, 32),
    "DistMuon, normuon": (program(weights(8, placements=None), optimizer="DistMuon", rule="normuon"), 100, 38),
}


def predicted(name: str, rank: int, counted: CountedStep) -> Launches:
    described = PROGRAMS[name][0]
    kinds = [PartKind((part.group_index, part.param.dtype), part.matrix_set.flipped) for part in counted.step_params]
    stochastic = sum(part.elements is not None for part in counted.step_params)
    launches = launches_of(counted.plan, kinds, averages=described.optimizer == "DistMuon", counters=stochastic)[rank]
    adamw = [math.prod(param.shape) for param in described.params if not param.use_muon]
    launches.adamw = adamw_launches(len(adamw), sum(adamw))
    return launches


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_launches_what_its_plan_says(name: str) -> None:
    steps = count_launches(PROGRAMS[name][0])
    for rank, counted in enumerate(steps):
        found = predicted(name, rank, counted)
        listed = "\n".join(f"{count} {work}" for work, count in sorted(counted.recorder.launches.items()))
        assert found.total == counted.launches, f"rank {rank} of {name}: {found}\n{listed}"
    _, most_launches, most_host_operations = PROGRAMS[name]
    assert max(counted.launches for counted in steps) <= most_launches, "a change has added launches"
    of_host = max((counted.recorder.host_operations for counted in steps), key=lambda operations: operations.total())
    assert of_host.total() <= most_host_operations, (
        f"a change has added operations of the host: {of_host.most_common(20)}"
    )


@pytest.mark.parametrize(
    ("model", "mesh", "most"),
    [
        ("llama3-8b", "dp_shard=64", 79),
        ("qwen3-235b-a22b", "dp_shard=128", 566),
        ("kimi-k2", "dp_shard=128,ep=128", 2200),
    ],
)
def test_models_launch_no_more_than_now(model: str, mesh: str, most: int) -> None:
    machine = load_machine("h100")
    options = MuonOptions(param_dtype=BF16)
    (planned,) = plan_cluster(load_model(model), MeshAxes.parse(mesh), options, machine)
    stage = SimulatedStage.of(planned, machine, options)
    launches = [of_rank.total for of_rank in stage.launches.values()]
    assert max(launches) <= most
    assert stage.timeline.work.launches == launches
    expected = [machine.host_seconds_per_step + SECONDS_PER_LAUNCH * count for count in launches]
    assert stage.timeline.work.host_ahead == pytest.approx(expected)
    own_rate = SimulatedStage.of(planned, replace(machine, host_seconds_per_launch=1e-3), options).timeline
    assert own_rate.work.host_ahead == pytest.approx(
        [machine.host_seconds_per_step + 1e-3 * count for count in launches]
    )
    assert own_rate.seconds == pytest.approx(max(own_rate.work.host_ahead)), "such a host is slower than its device"
    on_cpu = predict(planned.plan, replace(machine, device="cpu").rates_for("bfloat16"))
    assert not any([*on_cpu.work.launches, *on_cpu.work.host_ahead])


@pytest.mark.parametrize(
    ("options", "per_matrix"),
    [({}, 0), ({"nonfinite": "skip"}, 1), ({"rounding": "stochastic"}, 1)],  # a view of what is kept; of the counter
    ids=str,
)
def test_operations_of_the_host_per_further_matrix(options: dict[str, Any], per_matrix: int) -> None:
    few, many = (count_launches(program(weights(count), **options))[0].host_operations for count in (8, 24))
    assert few > 0
    assert many - few <= 16 * per_matrix


def test_launches_of_adamw() -> None:
    """Of torch's fused kernel: 36 tensors and 320 blocks of 65,536 elements fit into a launch; 110 step counts do."""
    assert adamw_launches(0, 0) == 0
    assert adamw_launches(36, 100) == 2
    assert adamw_launches(37, 100) == 3
    assert adamw_launches(1, 320 * 65536) == 2
    assert adamw_launches(111, 320 * 65536 * 5 + 1) == 6 + 2


def test_a_guarded_step_launches_as_much_for_many_gradients_as_for_few() -> None:
    """Momentum is kept: 4 bytes more per element, and 4 further ones, which are counted too, if no update is finite."""
    few, many = (count_launches(program(weights(count), nonfinite="skip"))[0] for count in (8, 24))
    assert few.launches == many.launches <= 77
    elements = sum(part.param.numel() // 2 for part in few.step_params)
    assert few.bytes_of("copy_momenta") == 4 * elements
    assert few.bytes_of("copy_momenta", "fill", "apply") <= 22.1 * elements


def test_code_of_the_user_and_unknown_schemes() -> None:
    """Of a callable only the copy of its result is known. What a plan does not say counts as the default scheme."""
    launches: dict[str, int] = {}
    for how in ("", "scheme auto in bfloat16", "mymodule.orthogonalise in bfloat16", "steps (1.5 -0.5 0) in bfloat16"):
        layout = Layout((64, 64), Mesh((1,), (0,)), (Sharded(0),))
        param = PlannedParam("w", (layout,), 0, "cuda", 2, 10**6, how=how, compute_dtype="bfloat16")
        launches[how] = launches_of(make_plan([param], PlanOptions(cost_model_for("cuda"))))[0].products
    assert list(launches.values()) == [18, 18, 1, 6]  # norms 2, three products per step, the copy of the result
