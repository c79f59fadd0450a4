"""One rank's bad gradient is every rank's: all raise the same error, and scalers go on. ``test_cases.py`` draws skipped
steps.

With ``masked`` the ranks decide on the device, as on GPUs; see tests/optim/test_nonfinite.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshmuon import DistMuon, GradientError, Muon
from meshmuon.optim import collect, nonfinite
from tests.support.brittle import RULES, TOO_LARGE, Brittle, TrustedBrittle
from tests.support.tensors import assert_bits, everything, local
from tests.support.threads import run_threads

S0, S1, R = Shard(0), Shard(1), Replicate()
SHAPES = ((7, 5), (4, 6), (9,), (3, 4))  # the last two for AdamW
NAMES = ("first", "second", "norm", "embedding")


def ranks(world: int, main: Callable[[int], Any], *, masked: bool = False) -> list[Any]:
    """Ranks as threads; what they look up is replaced around them, never inside."""
    with ExitStack() as stack:
        if masked:
            for module in (nonfinite, collect):
                stack.enter_context(patch.object(module, "known_to_host", lambda tensor: False))
        return run_threads(world, main)


def value(k: int, step: int = -1) -> Tensor:
    return torch.randn(SHAPES[k], generator=torch.Generator().manual_seed(100 * (step + 2) + k))


class Layout:
    """How tensors lie on a mesh: by placements, or plain on every rank."""

    def __init__(self, world: int, placements: Sequence[Any] | None, shape: tuple[int, ...] | None = None) -> None:
        self.world, self.placements, self.shape = world, placements, shape or (world,)

    def mesh(self) -> DeviceMesh | None:
        return None if self.placements is None else init_device_mesh("cpu", self.shape)

    def cut(self, tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
        if mesh is None:
            return tensor.clone()
        placements = [S0 if one == S1 and tensor.dim() == 1 else one for one in self.placements or ()]
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


LAYOUTS = {
    "Shard(0) on 2": Layout(2, (S0,)),
    "Shard(0) on 4, with empty shards": Layout(4, (S0,)),
    "Shard(1) on 3": Layout(3, (S1,)),
    "replicated": Layout(2, (R,)),
    "HSDP": Layout(4, (R, S0), (2, 2)),
    "TP×FSDP": Layout(4, (S0, S1), (2, 2)),
    "plain with replica_group": Layout(3, None),
}


def holders(k: int, layout: Layout) -> list[int]:
    """Ranks that hold any element of tensor ``k``: which of them spoils it is the test's choice."""

    def main(rank: int) -> bool:
        return local(layout.cut(value(k), layout.mesh())).numel() > 0

    return [rank for rank, holds in enumerate(run_threads(layout.world, main)) if holds]


def build(
    layout: Layout, mesh: DeviceMesh | None, kind: type[Muon] = Muon, **options: Any
) -> tuple[list[nn.Parameter], Muon]:
    params = [nn.Parameter(layout.cut(value(k), mesh)) for k in range(len(SHAPES))]
    if mesh is None and kind is Muon:
        options["replica_group"] = dist.group.WORLD
    groups = [
        {"params": params[:2], "names": list(NAMES[:2]), "use_muon": True},
        {"params": params[2:], "names": list(NAMES[2:]), "use_muon": False},
    ]
    return params, kind(groups, **{"lr": 0.01, **options})


def spoil(param: nn.Parameter, value: float) -> None:
    """The first element that this rank holds of the gradient."""
    grad = param.grad
    (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[0] = value  # type: ignore[union-attr]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_raise_the_same(name: str, masked: bool) -> None:
    layout = LAYOUTS[name]
    culprit = holders(1, layout)[-1]
    said: list[str] = [""] * layout.world

    def main(rank: int) -> None:
        mesh = layout.mesh()
        params, optimizer = build(layout, mesh, nonfinite="raise", none_grad=False)
        for step in range(2):
            for k, param in enumerate(params):
                param.grad = layout.cut(value(k, step), mesh)
            if step == 1 and rank == culprit:
                spoil(params[1], math.nan)
            before = everything(optimizer)
            if step == 1:
                with pytest.raises(GradientError) as caught:
                    optimizer.step()
                said[rank] = str(caught.value)
                assert_bits(everything(optimizer), before)
                for k, param in enumerate(params):
                    param.grad = layout.cut(value(k, step), mesh)
            optimizer.step()
        assert optimizer.skipped_steps == 0

    ranks(layout.world, main, masked=masked)
    assert len(set(said)) == 1
    assert said[0].startswith(f"rank {culprit}: second has a gradient that is not finite")


@pytest.mark.parametrize("masked", [False, True])
def test_a_gradient_that_only_other_ranks_have(masked: bool) -> None:
    """DistMuon takes zeros for it; they change no bit of a momentum of −0 either."""

    def main(rank: int) -> None:
        params, optimizer = build(Layout(2, None), None, DistMuon, nonfinite="skip")
        for step in range(3):
            for k, param in enumerate(params):
                param.grad = None if rank == 1 and k in (0, 2) else value(k, step)
            if step == 1:
                for entry in optimizer.state.values():
                    if "momentum_buffer" in entry:
                        entry["momentum_buffer"].view(-1)[:3] = -0.0
                if rank == 0:
                    params[1].grad[0, 0] = math.nan  # type: ignore[index]
                before = everything(optimizer)
            optimizer.step()
            if step == 1:
                assert_bits(everything(optimizer), before)
                assert optimizer.skipped_steps == 1

    ranks(2, main, masked=masked)


# ---- Updates that are not finite although gradients are
# ------------------------------------------------------------------------

GUARDED: dict[str, tuple[Layout, dict[str, Any]]] = {
    **{name: (layout, {}) for name, layout in LAYOUTS.items()},
    "HSDP, every replica computes": (LAYOUTS["HSDP"], {"replicas": "repeat"}),
    "one matrix per wave, bfloat16 on the wire": (Layout(4, (S0,)), {"chunk_size": 1, "comm_dtype": torch.bfloat16}),
    "cautious decay, momentum of 16 bits": (
        Layout(2, (S1,)),
        {"cautious_weight_decay": True, "momentum_dtype": torch.bfloat16},
    ),
    "the reference path": (LAYOUTS["TP×FSDP"], {"use_distributed_muon": True}),
    "DistMuon": (Layout(2, None), {"kind": DistMuon}),
}


def guarded_run(
    case: str, rule: type[Brittle], spoilt: int | None
) -> tuple[list[Tensor], list[Tensor], list[int], int]:
    """This rank's tensors before and after a step in which one update is not finite, whose they are, and what it
    has counted.
    """
    layout, more = GUARDED[case]
    mesh = layout.mesh()
    params, optimizer = build(layout, mesh, **{"nonfinite": "skip", "rule": rule(), "weight_decay": 0.1, **more})
    before: list[Tensor] = []
    for step in range(2):
        grads = [value(k, step) for k in range(len(SHAPES))]
        if step == 1 and spoilt is not None:
            grads[spoilt][2, 1] = 2 * TOO_LARGE
        for param, grad in zip(params, grads, strict=True):
            param.grad = layout.cut(grad, mesh)
        before = everything(optimizer)
        optimizer.step()
    parts = [*range(len(params)), *(k for k, param in enumerate(params) for _ in optimizer.state.get(param, {}))]
    return before, everything(optimizer), parts, optimizer.skipped_matrices


def check_guard(case: str, rule: type[Brittle] = TrustedBrittle) -> list[int]:
    """One matrix stays, and all else has the bits of a run in which its gradient was small; what this rank has
    counted.
    """
    _, usual, _, none = guarded_run(case, rule, None)
    counts = []
    for spoilt in (0, 1):
        before, after, parts, counted = guarded_run(case, rule, spoilt)
        assert_bits(after, [old if k == spoilt else new for k, old, new in zip(parts, before, usual, strict=True)])
        counts.append(counted)
    return [none, *counts]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", GUARDED)
def test_a_matrix_whose_update_is_not_finite_stays_on_all_ranks(case: str, rule: type[Brittle], masked: bool) -> None:
    """Every rank that orthogonalises it counts it: one, except where replicas compute for themselves."""
    none, *counted = zip(
        *ranks(GUARDED[case][0].world, lambda rank: check_guard(case, rule), masked=masked), strict=True
    )
    assert not any(none)
    repeats = "repl" in case or "reference" in case or rule is TrustedBrittle
    assert all(max(of_ranks) == 1 and (repeats or sum(of_ranks) == 1) for of_ranks in counted)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", ["Shard(0) on 2", "HSDP", "replicated", "DistMuon"])
def test_all_ranks_raise_in_the_step_after_an_update_that_is_not_finite(case: str, masked: bool) -> None:
    layout, more = GUARDED[case]

    def main(rank: int) -> str:
        mesh = layout.mesh()
        params, optimizer = build(layout, mesh, **{"nonfinite": "raise", "rule": Brittle(), "none_grad": False, **more})
        for step in range(2):
            for k, param in enumerate(params):
                grad = value(k, step)
                if (step, k) == (0, 1):
                    grad[2, 1] = 2 * TOO_LARGE
                param.grad = layout.cut(grad, mesh)
            before = everything(optimizer)
            if step == 1:
                with pytest.raises(GradientError) as caught:
                    optimizer.step()
                assert_bits(everything(optimizer), before)
            optimizer.step()
        return str(caught.value)

    said = ranks(layout.world, main, masked=masked)
    assert len(set(said)) == 1
    assert re.match(r"rank \d: second had an update that is not finite in the last step", said[0])


# ---- GradScaler on shards
# ------------------------------------------------------------------------------------------------------


def scaled(
    layout: Layout, rank: int, spoilt: int | None, kind: type[Muon] = Muon, *, before: bool
) -> tuple[list[Tensor], float, int]:
    """A scaler of 8 on every rank; rank ``spoilt`` has an infinity in step 1; without one no rank makes that step."""
    mesh = layout.mesh()
    params, optimizer = build(layout, mesh, kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for step in range(3):
        if spoilt is None and step == 1:
            continue
        for k, param in enumerate(params):
            param.grad = layout.cut(8 * value(k, step), mesh)
        if spoilt == rank and step == 1:
            spoil(params[0], math.inf)
        if spoilt is not None and step == 2:  # the scale may have halved on this rank
            for param in params:
                param.grad.mul_(scaler.get_scale() / 8)  # type: ignore[union-attr]
        if before:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return everything(optimizer), scaler.get_scale(), optimizer.skipped_steps


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("name", ["Shard(0) on 2", "Shard(0) on 4, with empty shards", "HSDP", "TP×FSDP"])
def test_a_scaler_with_dtensors(name: str, before: bool, masked: bool) -> None:
    """torch's scaler reduces what it finds over the axes along which the first gradient is cut, so that scales stay
    together.
    """
    layout = LAYOUTS[name]
    expected = ranks(layout.world, lambda rank: scaled(layout, rank, None, before=before), masked=masked)
    spoilt = holders(0, layout)[0]
    found = ranks(layout.world, lambda rank: scaled(layout, rank, spoilt, before=before), masked=masked)
    # A replica of its own mind is not heard by torch, which takes replicas for equal; meshmuon hears it.
    assert [scale for _, scale, _ in found] == ([4.0, 4.0, 8.0, 8.0] if name == "HSDP" else [4.0] * layout.world)
    for (mine, _, skipped), (wanted, _, _) in zip(found, expected, strict=True):
        assert skipped == 1
        assert_bits(mine, wanted)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", [Muon, DistMuon])
def test_scalers_that_part_do_no_harm_to_replicas(kind: type[Muon], before: bool, masked: bool) -> None:
    """Only one rank finds an infinity, and only its scale halves. All leave the step out, and each divides by its
    own scale.
    """
    layout = Layout(2, None)
    expected = ranks(2, lambda rank: scaled(layout, rank, None, kind, before=before), masked=masked)
    found = ranks(2, lambda rank: scaled(layout, rank, 1, kind, before=before), masked=masked)
    assert [(scale, skipped) for _, scale, skipped in found] == [(8.0, 1), (4.0, 1)]
    for (mine, _, _), (wanted, _, _) in zip(found, expected, strict=True):
        assert_bits(mine, wanted)


@pytest.mark.parametrize("masked", [False, True])
def test_a_rank_whose_scaler_meets_no_gradient(masked: bool) -> None:
    """It takes part in the decision with the others instead of leaving them waiting."""

    def main(rank: int) -> int:
        params, optimizer = build(Layout(2, None), None, DistMuon)
        for step in range(2):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # torch's update() refuses to work without gradients
            scaler.scale(torch.ones(()))
            for k, param in enumerate(params):
                param.grad = None if rank == 1 else 8 * value(k, step)
            if rank == 0 and step == 1:
                params[0].grad[0, 0] = math.inf  # type: ignore[index]
            scaler.step(optimizer)
        return optimizer.skipped_steps

    assert ranks(2, main, masked=masked) == [1, 1]
