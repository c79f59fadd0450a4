"""The check of weights in host memory: with FSDP2 itself, and on stand-ins for a GPU and NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from meshmuon.execute.buffers import Stage
from meshmuon.state.param_state import MOMENTUM
from meshmuon.tools.doctor import Context, DoctorOptions
from meshmuon.tools.doctor.context import Finding
from meshmuon.tools.doctor.layouts import stepped_side_by_side, with_and_without_offload
from meshmuon.tools.doctor.numerics import seeded
from meshmuon.torch_compat import dtensor_like, local_part
from tests.support.happens_before.recorder import Recorder
from tests.support.happens_before.runs import twins
from tests.support.happens_before.twin_tensor import DEVICE
from tests.support.threads import run_threads

CPU = torch.device("cpu")
SHAPES = {"first.weight": (5, 8), "second.weight": (6, 5), "experts": (4, 3, 6), "bias": (7,)}


def context_on(device: torch.device, rank: int = 0, world: int = 1) -> Context:
    return Context(DoctorOptions(), rank, world, dist.HashStore(), device, "a")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_with_fsdp2_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mesh of CPUs, where the policy changes no device: that models, passes and comparison fit together."""
    # only a GPU pins memory
    monkeypatch.setattr(fsdp, "CPUOffloadPolicy", partial(fsdp.CPUOffloadPolicy, pin_memory=False))
    finding = with_and_without_offload(context_on(CPU))
    assert not finding.problems
    assert finding.detail == "FSDP2 with CPUOffloadPolicy on 1: the bits of weights on the device after 3 steps"


def on_twins(*, offloads: bool = True) -> list[Finding]:
    """The comparison on two ranks with stand-ins for a GPU; NCCL's refuses host memory."""

    def main(rank: int) -> Finding:
        with Recorder(f"rank {rank}").recording() as recorder:
            mesh = DeviceMesh(DEVICE.type, [0, 1])

            def parameter(value: Tensor, *, in_host: bool) -> nn.Parameter:
                local = torch.tensor_split(value, [-(-len(value) // 2)])[rank]
                twin: Any = DTensor.from_local(
                    recorder.on_device(local),
                    mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=value.shape,
                    stride=value.stride(),
                )
                twin = dtensor_like(twin, local.clone()) if in_host else twin
                twin._is_param = True
                return twin.requires_grad_(True)  # type: ignore[no-any-return]

            values = {name: seeded(shape, k) for k, (name, shape) in enumerate(SHAPES.items())}
            params = {name: parameter(value, in_host=offloads) for name, value in values.items()}
            resident = {name: parameter(value, in_host=False) for name, value in values.items()}

            def backward(step: int) -> None:
                for param in params.values():
                    param.grad = dtensor_like(param, torch.sin(local_part(param).detach() * (step + 2.0)))  # type: ignore[arg-type]

            finding = stepped_side_by_side(context_on(DEVICE, rank, 2), "twins", params, resident, backward)
            assert not [str(found) for found in recorder.findings if found.kind != "host wait"]
            return finding

    with twins():
        return run_threads(2, main)


def test_weights_in_host_memory_pass() -> None:
    assert [finding.problems for finding in on_twins()] == [[], []]


def problems_of(findings: list[Finding]) -> set[str]:
    return {" ".join(problem.split()[:2]) for finding in findings for problem in finding.problems}


def test_a_copy_that_is_off_by_a_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of matrices that are exchanged and of those that are whole on their rank. AdamW's weights are not copied."""
    to_host = Stage.to_host

    def broken(stage: Stage) -> None:
        to_host(stage)
        stage.host.mul_(1 + 2.0**-7)

    monkeypatch.setattr(Stage, "to_host", broken)
    assert problems_of(on_twins()) == {f"{name} differs" for name in SHAPES if name != "bias"}


def test_weights_that_are_not_in_host_memory_are_found() -> None:
    problems = problems_of(on_twins(offloads=False))
    assert {f"{name} is" for name in SHAPES} <= problems
    assert f"{MOMENTUM} of" in problems
