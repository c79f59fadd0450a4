"""Scratch memory: shared by name, never by accident, and known beforehand."""

from __future__ import annotations

import pytest
import torch

from meshmuon.ortho import (
    Scheme,
    Workspace,
    aligned_matrices,
    halley,
    hybrid,
    orthogonalize,
    polar_express,
    reserve_scratch,
    scratch_bytes,
    zolotarev,
)
from meshmuon.ortho.blocks import gram_blocks

from .oracle import gaussian

CPU = torch.device("cpu")


def test_one_name_is_one_memory_and_two_names_are_two() -> None:
    workspace = Workspace()
    first = workspace.take("a", (2, 3), torch.float32, CPU)
    again = workspace.take("a", (3, 2), torch.float32, CPU)
    other = workspace.take("b", (2, 3), torch.float32, CPU)
    wider = workspace.take("a", (2, 3), torch.float64, CPU)
    assert first.shape == (2, 3)
    assert first.is_contiguous()
    assert first.data_ptr() == again.data_ptr()
    assert len({first.data_ptr(), other.data_ptr(), wider.data_ptr()}) == 3
    assert (first.dtype, wider.dtype) == (torch.float32, torch.float64)


def test_grows_to_the_largest_request_and_keeps_it() -> None:
    workspace = Workspace()
    assert workspace.bytes() == 0
    workspace.take("a", (4,), torch.float32, CPU)
    assert workspace.bytes() == 16
    workspace.take("a", (10, 10), torch.float32, CPU)
    assert workspace.bytes() == 400
    small = workspace.take("a", (5,), torch.float32, CPU)
    assert (small.shape, workspace.bytes()) == ((5,), 400)
    workspace.take("b", (3,), torch.bfloat16, CPU)
    assert workspace.bytes() == 406
    workspace.clear()
    assert workspace.bytes() == 0


@pytest.mark.parametrize("form", ["standard", "gram", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 6, 14), (2, 14, 6), (1, 5, 5)], ids=str)
def test_reserved_scratch_never_grows(shape: tuple[int, int, int], dtype: torch.dtype, form: str) -> None:
    x, scheme, workspace = gaussian(*shape), polar_express(), Workspace()
    reserve_scratch(x, scheme, form=form, dtype=dtype, workspace=workspace)
    before = {key: flat.data_ptr() for key, flat in workspace._flat.items()}
    orthogonalize(x, scheme, form=form, dtype=dtype, out=x, workspace=workspace)
    assert {key: flat.data_ptr() for key, flat in workspace._flat.items()} == before


@pytest.mark.parametrize("result_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 14), (14, 6), (20, 20)], ids=str)
def test_scratch_bytes_are_what_the_gram_form_takes(
    shape: tuple[int, int], dtype: torch.dtype, result_dtype: torch.dtype
) -> None:
    scheme, count, workspace = polar_express(), 3, Workspace()
    assert max(gram_blocks(scheme, dtype)) > 1
    x = aligned_matrices((count, *shape), result_dtype, CPU)
    reserve_scratch(x, scheme, form="gram", dtype=dtype, workspace=workspace)
    numbers = workspace.bytes() - count * scratch_bytes(*shape, scheme.steps, dtype, result_dtype)
    assert 0 <= numbers <= 4 * 8 * count  # a few single numbers per matrix


@pytest.mark.parametrize("scheme", [zolotarev(), halley(), hybrid()], ids=["zolotarev", "halley", "hybrid"])
@pytest.mark.parametrize("shape", [(6, 14), (33, 33), (300, 64)], ids=str)
def test_scratch_bytes_are_what_a_rational_scheme_takes(shape: tuple[int, int], scheme: Scheme) -> None:
    workspace = Workspace()
    x = aligned_matrices((1, *shape), torch.float32, CPU)
    reserve_scratch(x, scheme, form="gram", dtype=torch.float32, workspace=workspace)
    reserved = workspace.bytes()
    assert 0 <= reserved - scratch_bytes(*shape, scheme.steps, torch.float32, torch.float32) <= 4 * 8
    orthogonalize(x.normal_(), scheme, form="gram", out=x, workspace=workspace)
    assert workspace.bytes() == reserved
