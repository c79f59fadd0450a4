"""Scratch memory: shared by name, never by accident, and known beforehand."""

from __future__ import annotations

import pytest
import torch

from meshmuon.ortho import (
    Scheme,
    Workspace,
    aligned_matrices,
    blocks_for,
    halley,
    hybrid,
    orthogonalize,
    polar_express,
    reserve_scratch,
    scratch_bytes,
    zolotarev,
)

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
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        *((polar_express(), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)),
        *((scheme, torch.float32) for scheme in (zolotarev(), halley(), hybrid())),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.parametrize("shape", [(3, 6, 14), (2, 14, 6), (1, 33, 33), (1, 300, 64)], ids=str)
def test_reserved_scratch_is_counted_and_never_grows(
    shape: tuple[int, int, int], scheme: Scheme, dtype: torch.dtype, form: str
) -> None:
    for result_dtype in (torch.float32, torch.float64):
        x, workspace = aligned_matrices(shape, result_dtype, CPU).normal_(), Workspace()
        reserve_scratch(x, scheme, form=form, dtype=dtype, workspace=workspace)
        numbers = workspace.bytes() - shape[0] * scratch_bytes(*shape[1:], scheme.steps, dtype, result_dtype)
        takes_all = form == "gram" and max(blocks_for(*shape[1:], scheme, form=form, dtype=dtype)) > 1
        assert numbers <= 4 * 8 * shape[0]  # a few single numbers per matrix
        # the matrices of a batch take turns in the buffers of inverses
        assert numbers >= 0 or not takes_all or shape[0] > 1
        before = {key: flat.data_ptr() for key, flat in workspace._flat.items()}
        orthogonalize(x, scheme, form=form, dtype=dtype, out=x, workspace=workspace)
        assert {key: flat.data_ptr() for key, flat in workspace._flat.items()} == before
