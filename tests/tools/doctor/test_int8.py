"""The check of int8, with ranks as threads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshmuon.execute import elementwise, shared_blocks
from meshmuon.execute.int8 import Int8Blocks, quantise
from meshmuon.tools.doctor import Context, DoctorOptions
from meshmuon.tools.doctor.layouts import check_int8
from tests.support.threads import run_threads


def problems_of(world: int) -> set[str]:
    def main(rank: int) -> Sequence[str]:
        return check_int8(Context(DoctorOptions(), rank, world, dist.HashStore(), torch.device("cpu"), "a")).problems

    return {problem.split(" by ")[0] for problems in run_threads(world, main) for problem in problems}


def differs(*names: str) -> set[str]:
    return {f"{name} differs from the reference path" for name in names}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_it_passes(world: int) -> None:
    assert not problems_of(world)


def test_a_wrong_quantum_on_the_wire_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(numbers: Sequence[Tensor], into: Sequence[Int8Blocks]) -> None:
        quantise(numbers, into)
        for blocks in into:
            blocks.quanta[..., :1] ^= 1

    monkeypatch.setattr(elementwise, "quantise", broken)
    assert problems_of(4) == differs("rows", "columns", "both")


def test_a_scale_of_the_momentum_that_is_not_shared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_blocks, "reduce_over_axes", lambda *args: None)
    assert problems_of(4) == differs("columns", "both")
