"""Kernels over lists of tensors are compiled when a plan is prepared: what cannot be is noticed before anything is
written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from meshmuon import KernelWarning
from tests.support.happens_before.list_kernels import TwinListKernels
from tests.support.happens_before.programs import Program, ProgramParam
from tests.support.happens_before.runs import run_program

ROWS = (Shard(0),)


def program(*, placements: Any = ROWS, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Program:
    shapes = ((6, 4), (8, 16), (3, 5), (4, 3, 8))
    names = ("layers.{}.weight",) * 3 + ("layers.{}.experts.weight",)
    params = [ProgramParam(name.format(k), shapes[k], placements, dtype=dtype) for k, name in enumerate(names)]
    params.append(ProgramParam("norm", (6,), placements, dtype=dtype, use_muon=False))
    options = {"ns_steps": 1, **changes.pop("options", {})}
    return replace(Program((2,), tuple(params), options=options), **changes)


PROGRAMS = {
    "float32": program(dtype=torch.float32),
    "bfloat16, read from memory": program(device_lr=True),
    "cautious decay": program(options={"cautious_weight_decay": True, "nesterov": False}),
    "stochastic rounding": program(options={"rounding": "stochastic", "momentum_dtype": torch.float32}),
    "guarded": program(options={"nonfinite": "skip", "rule": "normuon", "chunk_size": 1}),
    "guarded, stochastic rounding": program(options={"nonfinite": "skip", "rounding": "stochastic"}, nonfinite_step=1),
    "a scaler": program(scaled=True),
    "replicas that only accumulate": program(
        mesh=(2, 2), placements=(Replicate(), Shard(0)), options={"replicas": "share"}
    ),
    "DistMuon": program(placements=None, optimizer="DistMuon", options={"nonfinite": "skip"}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_kernel_is_compiled_in_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[str] = []
    monkeypatch.setattr(TwinListKernels, "compiled_late", late)
    weights = run_program(PROGRAMS[name]).weights
    assert not late
    prepared = run_program(replace(PROGRAMS[name], events=((0, "prepare"),))).weights
    assert bool(late) == (name == "a scaler")  # of which the optimizer hears in its first step
    assert all(
        torch.equal(*pair) for of_ranks in zip(weights, prepared, strict=True) for pair in zip(*of_ranks, strict=True)
    )


@pytest.mark.parametrize("broken", ["fill", "apply", "copy", "fill_if", "mark_nonfinite"])
def test_a_kernel_that_cannot_be_compiled(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks use torch's operations, from the first step on."""
    case = program(options={"nonfinite": "skip"})
    expected = run_program(replace(case, kernels="torch")).weights
    usual, late = getattr(TwinListKernels, broken), list[str]()

    def fails(kernels: TwinListKernels, *args: Any, **options: Any) -> None:
        if kernels.only_compiles is None:
            late.append(broken)
            return usual(kernels, *args, **options)  # type: ignore[no-any-return]
        with kernels.only_compiles():
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(TwinListKernels, broken, fails)
    with pytest.warns(
        KernelWarning, match="lists of tensors do not run on cuda:0: RuntimeError: Failed to find C compiler"
    ):
        weights = run_program(case).weights
    assert not late
    assert all(
        torch.equal(*pair) for of_ranks in zip(weights, expected, strict=True) for pair in zip(*of_ranks, strict=True)
    )
