"""CUDA graphs, and what must be equal on all ranks where matrices are orthogonalised on GPUs, on stand-ins for both."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from meshmuon import PlanMismatchError
from meshmuon.execute import StepParam, ortho_batch
from meshmuon.execute.ortho_batch import OrthoBatch
from meshmuon.execute.step_param import RunningStep
from meshmuon.ortho import AUTO, Scheme, hybrid, polar_express, scheme_for
from tests.support.happens_before import fake_cuda
from tests.support.happens_before.programs import Program, ProgramParam
from tests.support.happens_before.recorder import recorder
from tests.support.happens_before.runs import check, run_program
from tests.support.happens_before.twin_tensor import DEVICE

SHAPES = [(6, 4), (3, 5), (6, 4), (5, 3), (6, 4), (3, 5)]


def program(*, sharded: bool, kernels: str = "", **options: Any) -> Program:
    """Six matrices of three shapes, each a batch of its own."""
    placements = (Shard(0),) if sharded else None
    params = tuple(ProgramParam(f"layers.{k}.weight", shape, placements) for k, shape in enumerate(SHAPES))
    return Program(
        mesh=(2,) if sharded else (1,),
        params=params,
        options={"chunk_size": 1, "cuda_graphs": True, **options},
        kernels=kernels,
    )


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("options", [{}, {"kernels": "torch"}, {"rule": "normuon"}, {"warmup_step": 0}], ids=str)
def test_a_graph_serves_all_batches_of_a_kind(
    options: dict[str, Any], sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for each shape that a rank orthogonalises, all in one pool; the bits are those of a step without graphs."""
    batches: dict[str, set[OrthoBatch]] = defaultdict(set)
    original = OrthoBatch.orthogonalise

    def orthogonalise(batch: OrthoBatch, step: RunningStep) -> Any:
        batches[recorder().name].add(batch)
        return original(batch, step)

    graphs = program(sharded=sharded, **options)
    with monkeypatch.context() as patch:
        patch.setattr(OrthoBatch, "orthogonalise", orthogonalise)
        outcome = check(graphs)
    eager = run_program(replace(graphs, options={**graphs.options, "cuda_graphs": False}))
    for ours, theirs in zip(outcome.weights, eager.weights, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert not any(eager.pools)
    kinds = [len({batch.stacked.shape for batch in of_rank}) for of_rank in batches.values()]
    assert sorted(map(len, outcome.pools)) == sorted(kinds)
    assert sum(kinds) < sum(map(len, batches.values())) == len(SHAPES)
    assert all(len(set(map(id, pools))) == 1 for pools in outcome.pools)


@pytest.mark.parametrize("kernels", ["", "torch"])
@pytest.mark.parametrize("sharded", [True, False])
def test_prepare_records_all_graphs(sharded: bool, kernels: str) -> None:
    stepped = program(sharded=sharded, kernels=kernels)
    prepared = replace(stepped, steps=0, events=((0, "prepare"),))
    counts = [sorted(map(len, run_program(one).pools)) for one in (stepped, prepared)]
    assert counts[0] == counts[1]
    assert sum(counts[0]) >= len(set(SHAPES))


def test_staged_batches_take_turns_in_two_places() -> None:
    """A graph is bound to its memory: one per kind and place."""
    graphs = program(sharded=True)
    params = tuple(replace(param, shape=(6, 4), placements=(Shard(0),), in_host=True) for param in graphs.params)
    outcome = run_program(replace(graphs, mesh=(1,), params=params))
    assert [len(pools) for pools in outcome.pools] == [2]
    assert not outcome.of("race", "lifetime", "misuse")


@pytest.mark.parametrize("scheme", ["hybrid", "polar_express"])
def test_inverses_are_not_recorded(scheme: str) -> None:
    outcome = run_program(program(sharded=False, scheme=scheme, compute_dtype=torch.float32))
    assert [len(pools) for pools in outcome.pools] == [0 if scheme == "hybrid" else len(set(SHAPES))]


def test_auto_has_no_inverses_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are the cheapest on a CPU; a rational scheme that the user has chosen is used."""
    for dtype in (torch.float32, torch.float64):
        cheapest = scheme_for(AUTO, 512, 512, dtype)
        assert isinstance(cheapest, Scheme)
        assert cheapest.rational
        assert scheme_for(AUTO, 512, 512, dtype, DEVICE) == polar_express()
        assert scheme_for(hybrid(), 512, 512, dtype, DEVICE) == hybrid()
    used: list[Any] = []
    original = ortho_batch.prepare_ortho

    def prepare_ortho(stacked: Tensor, template: StepParam, *rest: Any) -> Any:
        used.append(template.scheme)
        return original(stacked, template, *rest)

    monkeypatch.setattr(ortho_batch, "prepare_ortho", prepare_ortho)
    large = (ProgramParam("layers.0.weight", (512, 512)),)
    run_program(Program(mesh=(1,), params=large, options={"compute_dtype": torch.float32}, steps=1))
    assert used == [polar_express()]


def test_our_own_products_do_not_obey_the_flags_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callable of the user does."""
    seen: list[bool] = []

    def scheme(batch: Tensor) -> Tensor:
        seen.append(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction)
        return batch

    original = ortho_batch.iterate
    monkeypatch.setattr(ortho_batch, "iterate", lambda batch, *rest: scheme(batch) is None or original(batch, *rest))
    run_program(replace(program(sharded=False), steps=1))
    assert seen
    assert not any(seen)
    seen.clear()
    run_program(replace(program(sharded=False, scheme=scheme), steps=1))
    assert seen
    assert all(seen)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("fp32_precision", "tf32", "fp32_precision=tf32; rank 0 with fp32_precision=none"),
        ("allow_fp16_reduced_precision_reduction", False, "allow_fp16_reduced_precision_reduction=False; rank 0"),
        (
            "allow_bf16_reduced_precision_reduction",
            (False, False),
            "allow_bf16_reduced_precision_reduction=False, allow",
        ),
        ("allow_fp16_accumulation", True, "allow_fp16_accumulation=True; rank 0 with allow_fp16_accumulation=False"),
    ],
)
def test_ranks_whose_gpus_round_otherwise_are_refused(
    name: str, value: Any, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = fake_cuda.MatmulFlags.__init__

    def init(self: fake_cuda.MatmulFlags) -> None:
        original(self)
        if is_rank_1():
            setattr(self, name, value)

    monkeypatch.setattr(fake_cuda.MatmulFlags, "__init__", init)
    with pytest.raises(PlanMismatchError, match=f"rank 1 steps it with {shown}"):
        run_program(program(sharded=True))


def test_ranks_with_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cuda, "device_name", lambda device: f"GPU of rank {1 if is_rank_1() else 0}")
    with pytest.raises(
        PlanMismatchError, match="rank 1 steps it with GPU=GPU of rank 1; rank 0 with GPU=GPU of rank 0"
    ):
        run_program(program(sharded=True))


def is_rank_1() -> bool:
    return fake_cuda.active() and recorder().name == "rank 1"
