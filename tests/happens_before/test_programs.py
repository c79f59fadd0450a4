"""Random programs have no race, no use of freed memory, no wait of the host in a step that repeats another, and one
order.

``MESHMUON_PROGRAMS=2000 pytest tests/happens_before`` checks more of them, from ``MESHMUON_FIRST_PROGRAM`` on.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from meshmuon.device import Streams
from meshmuon.execute import build, executor
from tests.support.happens_before.programs import EVENTS, PAIRS, Program, ProgramParam, random_program
from tests.support.happens_before.runs import check, run_program
from tests.support.happens_before.twin_tensor import TwinTensor

FIRST, COUNT = int(os.environ.get("MESHMUON_FIRST_PROGRAM", "0")), int(os.environ.get("MESHMUON_PROGRAMS", "16"))
TOGETHER = 4  # programs in a test


@pytest.mark.filterwarnings("ignore::meshmuon.RoutingWarning")
@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, TOGETHER))
def test_random_programs(first: int) -> None:
    for seed in range(first, min(first + TOGETHER, FIRST + COUNT)):
        outcome = check(random_program(seed), seed=seed)
        assert outcome.operations


def test_the_random_programs_are_of_every_kind() -> None:
    programs = [random_program(seed) for seed in range(400)]
    params = [param for program in programs for param in program.params]
    for count in (
        *(sum(program.mesh == mesh for program in programs) for mesh in [(1,), (2,), (4,), (2, 2), (3, 2), (2, 1, 2)]),
        *(sum(program.options["warmup_step"] == ahead for program in programs) for ahead in range(6)),
        *(sum(program.options["none_grad"] is none_grad for program in programs) for none_grad in (True, False)),
        *(sum(program.options["cuda_graphs"] is graphs for program in programs) for graphs in (True, False)),
        *(
            sum(program.options["rule"] == rule for program in programs)
            for rule in ("plain", "normuon", "muon_plus", "muoneq")
        ),
        *(sum(event in dict(program.events).values() for program in programs) for event in EVENTS),
        sum(program.optimizer == "DistMuon" for program in programs),
        *(sum(program.options.get("metrics") == every for program in programs) for every in (1, 2)),
        *(sum(program.options.get("comm_dtype") == wire for program in programs) for wire in (torch.float32, *PAIRS)),
        sum(program.options["nonfinite"] == "skip" and program.nonfinite_step is not None for program in programs),
        *(sum(getattr(program, flag) for program in programs) for flag in ("scaled", "clips", "qk_clip", "device_lr")),
        *(sum(getattr(program, flag) for program in programs) for flag in ("own_stream", "fsdp_grads", "host_logits")),
        sum(len({param.dtype for param in program.params if param.use_muon}) > 1 for program in programs),
        sum(len(param.shape) == 3 for param in params),
        sum(param.split is not None for param in params),
        sum(bool(param.missing) for param in params),
        sum(param.placements is None for param in params),
        Counter(type(placement).__name__ for param in params for placement in param.placements or ())["_StridedShard"],
    ):
        assert count >= 15


def fused(mesh: tuple[int, ...], placements: tuple[object, ...]) -> Program:
    """(12, 4) in three parts over two shards: the outer parts are local, the one in the middle is exchanged."""
    params = tuple(ProgramParam(f"layers.{k}.weight", (12, 4), placements, split=(4, 4, 4)) for k in range(2))
    options = {
        "ns_steps": 1,
        "chunk_size": 1,
        "warmup_step": 2,
        "cautious_weight_decay": True,
    }
    return Program(mesh, params, options=options, kernels="torch", steps=1)  # torch's allocate memory


FUSED = fused((2,), (Shard(0),))


def test_a_fused_weight_with_local_and_exchanged_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wave works beside the main stream, the local batches work in it, on one momentum and one gradient.

    The step frees the gradient that a local batch reads last. Where the batch did so, the checker found it.
    """
    check(FUSED)
    check(fused((2, 2), (Replicate(), Shard(0))))
    frees_of = build.RankProgramBuilder._freed_gradients

    def as_it_was(builder: build.RankProgramBuilder, *args: Any) -> tuple[list[list[int]], list[int]]:
        frees, at_end = frees_of(builder, *args)
        return [*frees[:-1], [*frees[-1], *at_end]], []

    monkeypatch.setattr(build.RankProgramBuilder, "_freed_gradients", as_it_was)
    assert run_program(FUSED).of("lifetime")


@pytest.mark.parametrize("none_grad", [True, False])
def test_the_side_stream_is_recorded_only_for_gradients_that_the_step_frees(
    none_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user frees the others after the step, when the main stream has waited for the side stream."""
    recorded: list[Tensor] = []
    record = TwinTensor.record_stream
    monkeypatch.setattr(
        TwinTensor, "record_stream", lambda tensor, stream: [recorded.append(tensor), record(tensor, stream)]
    )
    params = tuple(ProgramParam(f"layers.{k}.weight", (6, 4), (Shard(0),)) for k in range(3))
    options = {"ns_steps": 1, "chunk_size": 1, "none_grad": none_grad}
    check(Program((2,), params, options=options, kernels="torch"))
    assert bool(recorded) is none_grad


@dataclass(frozen=True)
class Overflow:
    """An update rule whose updates are never finite."""

    def remembers(self) -> bool:
        return False

    def before(self, momentum: Tensor) -> None:
        pass

    def after(self, update: Tensor, memory: Tensor | None) -> None:
        update.mul_(float("inf"))


@pytest.mark.parametrize("kernels", ["", "torch"])
@pytest.mark.parametrize("in_host", [False, True])
def test_guarded_updates_that_are_not_finite(in_host: bool, kernels: str) -> None:
    """Waves in flight, experts whole on their ranks and plain weights stay as they were; the host waits for its own
    only.
    """
    places = [(f"layers.{k}.weight", (6, 4), (Shard(0),)) for k in range(4)] + [
        ("layers.4.experts.weight", (4, 3, 5), (Shard(0),))
    ]
    params = tuple(ProgramParam(name, shape, where, in_host=in_host) for name, shape, where in places)
    plain = ProgramParam("layers.5.weight", (5, 4))
    program = Program(
        (2,),
        (*params, plain),
        options={"nonfinite": "skip", "rule": Overflow(), "chunk_size": 1, "warmup_step": 1},
        kernels=kernels,
    )
    outcome = run_program(program) if in_host else check(program)
    assert not outcome.of("race", "lifetime", "misuse")
    for of_rank, start in zip(outcome.weights, run_program(replace(program, lr=0.0)).weights, strict=True):
        assert all(torch.equal(weight, first) for weight, first in zip(of_rank, start, strict=True))


def test_without_streams_nothing_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder tells whether work overlaps at all: waves work beside the main stream only if there is another
    one.
    """
    program = FUSED
    assert "CudaStreams" in run_program(program).beside_main
    monkeypatch.setattr(executor, "streams_for", lambda device: Streams())
    assert "CudaStreams" not in run_program(program).beside_main


def test_a_host_that_reads_a_skip_mask_waits() -> None:
    """What the policy "raise" does, and no other."""
    program = Program(
        mesh=(1,), params=(ProgramParam("layers.0.weight", (4, 4)),), options={"nonfinite": "raise", "ns_steps": 1}
    )
    waits = run_program(program).steady_waits
    assert [wait.sites[0].split(":")[0] for wait in waits] == ["meshmuon/optim/nonfinite.py"]
    assert torch.isfinite(run_program(program).weights[0][0]).all()
