"""Weights in host memory on a mesh of GPUs, as FSDP2's ``CPUOffloadPolicy`` leaves them, on stand-ins for GPU and NCCL.

The stand-in for NCCL refuses host memory, and an operation on tensors of both sides fails as it would on a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshmuon import Muon, UnsupportedError
from meshmuon.device import CudaTransfers, is_staged
from meshmuon.execute import RULE_STATE
from meshmuon.execute.buffers import Stage
from meshmuon.state.param_state import MOMENTUM
from meshmuon.torch_compat import dtensor_like, local_part
from tests.support.happens_before import runs
from tests.support.happens_before.programs import Program, ProgramParam, in_host_memory, random_program
from tests.support.happens_before.recorder import recorder
from tests.support.happens_before.removals import SCENARIOS
from tests.support.happens_before.runs import Outcome, run_program
from tests.support.happens_before.twin_tensor import TwinTensor
from tests.support.tensors import bits

pytestmark = pytest.mark.filterwarnings("ignore::meshmuon.RoutingWarning")

S0, R = Shard(0), Replicate()


def exact(program: Program) -> Program:
    """The program with factors that are powers of two: host and device then round alike, whether they fuse
    operations or not.
    """
    options = {**program.options, "momentum": 0.5, "weight_decay": 0.125, "adjust_lr_fn": lambda rows, cols: 0.5}
    return replace(program, options=options, lr=2.0**-7, clips=False)


def check_host_memory(program: Program, seed: int = 0) -> Outcome:
    """Demands that nothing races, that all ranks start the same exchanges, and Muon's bits for weights on the
    device.
    """
    outcome = run_program(program, seed=seed)
    errors = [*map(str, outcome.of("race", "lifetime", "misuse")), *outcome.orders]
    assert not errors, "\n".join([f"{len(errors)} findings in {program}", *errors[:20]])
    on_device = replace(program, params=tuple(replace(param, in_host=False) for param in program.params))
    for rank, (got, expected) in enumerate(
        zip(outcome.weights, run_program(on_device, seed=seed).weights, strict=True)
    ):
        for param, weight, other in zip(program.params, got, expected, strict=False):
            # torch's kernel rounds by the place of an element, for which only the path of a CPU corrects
            if not param.use_muon:
                torch.testing.assert_close(weight, other, equal_nan=True)
                continue
            # left by gradients that are not finite; the bits of NaN have no meaning
            nan = weight.isnan() & other.isnan()
            equal = torch.equal(bits(weight.masked_fill(nan, 0.0)), bits(other.masked_fill(nan, 0.0)))
            assert equal, f"{param} on rank {rank} of {program}"
    return outcome


def sharded_programs(first: int, count: int) -> list[tuple[int, Program]]:
    """Random programs with weights in host memory, and their seeds."""
    found: list[tuple[int, Program]] = []
    seed = first
    while len(found) < count:
        program = in_host_memory(random_program(seed), seed)
        if any(param.in_host for param in program.params):
            found.append((seed, exact(program)))
        seed += 1
    return found


@pytest.mark.parametrize("first", [0, 100])
def test_random_programs(first: int) -> None:
    for seed, program in sharded_programs(first, 3):
        check_host_memory(program, seed)


def test_the_random_programs_are_of_every_kind() -> None:
    programs = [program for _, program in sharded_programs(0, 200)]
    muon = [[param for param in program.params if param.use_muon] for program in programs]
    assert sum(len({param.in_host for param in params}) == 2 for params in muon) >= 15
    assert sum(any(param.in_host and not param.use_muon for param in program.params) for program in programs) >= 15
    assert sum(any(param.in_host and len(param.shape) == 3 for param in params) for params in muon) >= 15
    pairs = zip(programs, muon, strict=True)
    assert sum(program.scaled and any(param.in_host for param in params) for program, params in pairs) >= 15


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[ProgramParam, ...]]] = {
    "FSDP2": ((3,), (ProgramParam("layers.0.weight", (8, 6), (S0,)), ProgramParam("layers.1.weight", (2, 9), (S0,)))),
    "HSDP": (
        (2, 2),
        (ProgramParam("layers.0.weight", (8, 6), (R, S0)), ProgramParam("layers.1.weight", (5, 5), (R, S0))),
    ),
    "whole experts": ((2,), (ProgramParam("layers.0.experts.weight", (6, 5, 3), (S0,)),)),
    "AdamW": (
        (2,),
        (ProgramParam("layers.0.weight", (8, 6), (S0,)), ProgramParam("bias", (7,), (S0,), use_muon=False)),
    ),
    "bfloat16": ((2,), (ProgramParam("layers.0.weight", (8, 6), (S0,), torch.bfloat16),)),
    "fused": ((2,), (ProgramParam("layers.0.weight", (12, 4), (S0,), split=(4, 4, 4)),)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "NorMuon, one matrix per wave": {"rule": "normuon", "chunk_size": 1, "warmup_step": 2},
    "full precision on the wire, graphs": {"comm_dtype": torch.float32, "cuda_graphs": True, "none_grad": False},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, options: str) -> None:
    mesh, params = LAYOUTS[layout]
    program = exact(Program(mesh, params, options={"ns_steps": 2, **OPTIONS[options]}))
    if options == "default":
        check_host_memory(replace(program, params=tuple(replace(param, in_host=True) for param in params)))
    mixed = tuple(
        replace(param, name=f"layers.{9 - k}.{param.name}", in_host=k % 2 == 0) for k, param in enumerate(params * 2)
    )
    check_host_memory(replace(program, params=mixed))


def test_counters_of_stochastic_rounding_in_both_memories() -> None:
    """They are beside their weights: no operation of torch may count those of the host and of the device together."""
    params = tuple(ProgramParam(f"layers.{k}.weight", (8, 6), (S0,), torch.bfloat16, in_host=k > 0) for k in range(2))
    check_host_memory(exact(Program((2,), params, options={"ns_steps": 1, "rounding": "stochastic"})))


@pytest.mark.parametrize("nonfinite", [{"scaled": True}, {"nonfinite_step": 1}])
@pytest.mark.parametrize("mixed", [True, False])
def test_a_skipped_step(nonfinite: dict[str, Any], mixed: bool) -> None:
    """A GradScaler's verdict is on the device, and so is that of a mixture; the host learns of it before it writes
    a weight.
    """
    params = tuple(ProgramParam(f"layers.{k}.weight", (6, 4), (S0,), in_host=k > 0 or not mixed) for k in range(2))
    bias = ProgramParam("bias", (6,), (S0,), in_host=True, use_muon=False)
    options = {"ns_steps": 2, "nonfinite": "skip", "rule": "normuon"}
    outcome = check_host_memory(exact(Program((2,), (*params, bias), options=options, **nonfinite)))
    assert all(weight.isfinite().all() for weights in outcome.weights for weight in weights)


def test_matrices_travel_on_the_device_and_state_stays_beside_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[type, type]] = set()
    to_device, weights = Stage.to_device, runs._RankRun.weights

    def noted(stage: Stage) -> None:
        seen.add((type(stage.device), type(stage.host)))
        to_device(stage)

    def look(run: Any) -> list[torch.Tensor]:
        for param, state in run._optimizer.state.items():
            assert is_staged(param)
            assert {type(local_part(state[key])) for key in (MOMENTUM, RULE_STATE)} == {torch.Tensor}
        assert not run._optimizer._offload._pools, "the state is in host memory already"
        assert {lane[0] for lane in run._optimizer.plan().wave_lanes} == {"cpu to cuda"}
        return weights(run)

    monkeypatch.setattr(Stage, "to_device", noted)
    monkeypatch.setattr(runs._RankRun, "weights", look)
    params = (ProgramParam("layers.0.weight", (8, 6), (S0,), in_host=True),)
    options = {"ns_steps": 1, "rule": "normuon"}
    outcome = run_program(Program((2,), params, options=options, steps=2, events=((1, "offload"), (2, "save"))))
    assert seen == {(TwinTensor, torch.Tensor)}
    assert not outcome.of("race", "lifetime", "misuse")


def test_the_device_has_work_while_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits once for each wave. Before it does, the owner of the next wave, if there is one, has been given
    its work.

    Likewise where matrices are whole on their rank: the device works on a batch while the host waits for the one before
    it.
    """
    busy: dict[str, list[bool]] = {}
    settle = CudaTransfers.settle

    def noted(transfers: CudaTransfers) -> None:
        settle(transfers)
        busy.setdefault(recorder().name, []).append(recorder().main_is_busy())

    monkeypatch.setattr(CudaTransfers, "settle", noted)
    run_program(replace(SCENARIOS["weights in host memory"], steps=1))
    assert [any(at_wave) for at_wave in zip(*busy.values(), strict=True)] == [True, True, True, False]
    busy.clear()
    run_program(replace(SCENARIOS["weights in host memory, whole on their ranks"], steps=1))
    assert list(busy.values()) == [[True, True, False]] * 2  # batches instead of waves, on each rank


def parameter_in_host_memory(shape: tuple[int, int]) -> DTensor:
    mesh = DeviceMesh("cuda", [0], _init_backend=False)
    spec = DTensor.from_local(torch.empty(shape, device="meta"), mesh, [S0], run_check=False)
    weight = dtensor_like(spec, torch.randn(shape)).requires_grad_(True)
    weight.grad = dtensor_like(weight, torch.randn(shape))
    return weight


@pytest.fixture
def one_rank() -> Any:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_mesh_of_devices_that_are_not_there_is_refused() -> None:
    weight = parameter_in_host_memory((4, 3))
    before = weight._local_tensor.clone()
    with pytest.raises(UnsupportedError, match="mesh is of cuda devices, and this process has none"):
        Muon([{"params": [weight], "names": ["layers.0.weight"], "use_muon": True}]).step()
    assert torch.equal(weight._local_tensor, before)


@pytest.mark.usefixtures("one_rank")
def test_the_reference_path_refuses_weights_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(name="", total_memory=2**30)
    )
    weight = parameter_in_host_memory((4, 3))
    before = weight._local_tensor.clone()
    optimizer = Muon([{"params": [weight], "names": ["layers.0.weight"], "use_muon": True}], use_distributed_muon=True)
    with pytest.raises(UnsupportedError, match=r"layers\.0\.weight is in host memory on a mesh of cuda devices"):
        optimizer.step()
    assert torch.equal(weight._local_tensor, before)
