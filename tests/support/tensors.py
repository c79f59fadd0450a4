"""Tensors of the tests: seeded, cut as a parameter is cut, compared bit for bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from meshmuon import Muon
from meshmuon.errors import MeshmuonError


def seeded(shape: Sequence[int], seed: int) -> Tensor:
    """Normal values from a generator of their own, since ranks may be threads."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def like(param: Tensor, value: Tensor) -> Tensor:
    """A copy of the whole ``value``, cut as ``param`` is."""
    if not isinstance(param, DTensor):
        return value.clone()
    return distribute_tensor(value.clone(), param.device_mesh, param.placements, src_data_rank=None)


def local(tensor: Tensor) -> Tensor:
    """A copy of what this rank holds."""
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def same(actual: Tensor, expected: Tensor, label: str, *, equal_nan: bool = False) -> None:
    """Demands equal values, dtypes and shapes; of empty shards only that both are empty."""
    if actual.numel() == expected.numel() == 0:  # wrappers give empty shards other shapes than torch's own cut
        return
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, equal_nan=equal_nan, msg=lambda text: f"{label}: {text}"
    )


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, in which also zeros of different signs differ."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Demands equal dtypes, shapes and bytes, also the signs of zeros."""
    assert len(actual) == len(expected)
    for k, (tensor, other) in enumerate(zip(actual, expected, strict=True)):
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), k
        assert torch.equal(bits(tensor), bits(other)), f"tensor {k} differs"


def everything(optimizer: Muon) -> list[Tensor]:
    """Copies of all that a step could write on this rank: parameters, then the state of each."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    tensors = [local(param) for param in params]
    for param in params:
        tensors += [local(value) for _, value in sorted(optimizer.state.get(param, {}).items())]
    return tensors


def assert_untouched(optimizer: Muon, before: Sequence[Tensor]) -> None:
    """A refused step has written nothing: ``before`` is what ``everything`` returned before it."""
    now = everything(optimizer)
    assert len(now) == len(before), "a refused step has made or lost state"
    for tensor, old in zip(now, before, strict=True):
        assert tensor.shape == old.shape, "a refused step has changed a shape"
        same(tensor, old, "what a refused step must not write", equal_nan=True)


def through_disk(state_dict: dict[str, Any]) -> dict[str, Any]:
    """What is read of a state_dict that was written to a file."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def refused(optimizer: Muon) -> str:
    """The error that a step raises, with its class: ``"PlanMismatchError: …"``. It must have written nothing."""
    before = everything(optimizer)
    with pytest.raises(MeshmuonError) as caught:
        optimizer.step()
    assert_untouched(optimizer, before)
    return f"{type(caught.value).__name__}: {caught.value}"


def one_text(texts: Sequence[str]) -> str:
    """What all ranks have said."""
    assert len(set(texts)) == 1, texts
    return texts[0]


def put(*path: Any, value: Any = None) -> Callable[[Any], Any]:
    """Makes a copy of a state with ``value`` at a place, or with None without what is there."""

    def edit(state: Any) -> Any:
        container = state = copy.deepcopy(state)
        for key in path[:-1]:
            container = container[key]
        container[path[-1]] = value
        if value is None:
            del container[path[-1]]
        return state

    return edit
