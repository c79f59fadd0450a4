"""The Triton kernels over lists of tensors: their bits in the interpreter, and what they need on GPUs that are not
here.

Triton chooses between its compiler and its interpreter when it is imported, so that each runs in a process of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernel_compiler import REGISTERS
from tests.support.triton_processes import run_interpreted, run_python

pytest.importorskip("triton", reason="Triton is not installed: there is no kernel to test")
HERE = Path(__file__).parent


def test_bits_in_the_interpreter() -> None:
    run_interpreted(HERE / "interpreted.py")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = run_python([str(HERE / "compile_all.py")], TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))
    return [json.loads(line) for line in out.splitlines()]


def test_every_kernel_fits_every_gpu_without_spilling(compiled: list[dict[str, Any]]) -> None:
    assert len(compiled) == 6 * 5 * 2
    for kernel in compiled:
        assert kernel["stack"] == 0, kernel
        assert kernel["registers"] * kernel["warps"] * 32 <= REGISTERS, kernel
        assert kernel["shared"] <= 16 * 1024, kernel
        assert kernel["fused"] == 0, kernel  # a product and a sum round separately, as in the twin


def test_dense_tensors_move_in_vectors_of_16_bytes(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        vectors = {access for access in kernel["accesses"] if ".v4.b32" in access or ".v2.b64" in access}
        single = {access for access in kernel["accesses"] if access.endswith(".b16")}
        assert bool(vectors) == kernel["dense"], kernel
        assert bool(single) == (not kernel["dense"]), kernel


def test_no_length_of_a_list_is_compiled_anew() -> None:
    """Else a step in which other parameters have gradients would compile in its middle."""
    from meshmuon.execute import triton_elements

    for name in ("momentum", "update", "copy", "fill", "nonfinite"):
        (tensors,) = (
            argument for argument in getattr(triton_elements, f"{name}_kernel").params if argument.name == "tensors"
        )
        assert tensors.do_not_specialize
