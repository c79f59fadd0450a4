"""A tensor in host memory that says it is on a GPU, so that the package takes the paths that a GPU takes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from .clocks import History

DEVICE = torch.device("cuda", 0)


class Block:
    """A piece of device memory. Tensors hold it; when the last one is gone, the allocator has it back."""

    def __init__(self, address: int, stream: int, *, pinned: bool = False) -> None:
        self.address = address
        self.stream = stream  # that was current when it was allocated, and gets its memory next
        self.pinned = pinned  # host memory that a device reads and writes by itself
        self.history = History()


class TwinTensor(Tensor):
    """Looks like a tensor of ``DEVICE``. ``host_values`` is a CPU tensor with the values, ``block`` its memory.

    For C++ it is a CPU tensor, because a build of torch without CUDA cannot do anything with another one. Only an
    active ``Recorder`` computes with it.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    host_values: Tensor
    block: Block | None  # None for a tensor without elements

    @staticmethod
    def __new__(cls, values: Tensor, block: Block | None) -> TwinTensor:
        twin: TwinTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=torch.device("cpu"),
            requires_grad=False,
        )
        twin.host_values, twin.block = values, block
        return twin

    def __init__(self, values: Tensor, block: Block | None) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} on a twin tensor outside of a recorder")

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def data_ptr(self) -> int:
        return self.host_values.data_ptr()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As torch's; C++ would take the device of ``self`` for a CPU."""
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        device = DEVICE if device is None or device.type == "cuda" else device
        dtype = self.dtype if dtype is None else dtype
        if device == DEVICE and dtype == self.dtype and not copy:
            return self
        result: Tensor = torch.ops.aten._to_copy(self, dtype=dtype, device=device, non_blocking=non_blocking)
        return result

    def __setitem__(self, index: Any, value: Any) -> None:
        """Numbers are filled in; C++ would copy them, as it does on a CPU."""
        if isinstance(value, (bool, int, float)):
            self[index].fill_(value)
        else:
            super().__setitem__(index, value)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.to("cpu")

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.to(DEVICE)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert a tensor of a GPU to numpy")

    def record_stream(self, stream: Any) -> None:
        if self.block is not None:
            stream.note_use(self.block)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TwinTensor({tuple(self.shape)}, {self.dtype})"

    def __format__(self, spec: str) -> str:
        return repr(self)


class Blocks:
    """The blocks that are alive, by the address of their storage."""

    def __init__(self) -> None:
        self._alive: weakref.WeakValueDictionary[int, Block] = weakref.WeakValueDictionary()
        self.pinned: list[tuple[Block, Tensor]] = []  # with the memory itself, so that no other block gets its address

    def of_storage(self, values: Tensor) -> Block | None:
        """The block of a device tensor's storage, if it is known."""
        return self._alive.get(values.untyped_storage().data_ptr())

    def add(self, block: Block) -> None:
        self._alive[block.address] = block

    def pinned_at(self, tensor: Tensor) -> Block | None:
        """The pinned block that a tensor in host memory is part of. A storage may begin in the middle of one."""
        if not self.pinned:
            return None
        address = tensor.data_ptr()
        for block, memory in self.pinned:
            if block.address <= address < block.address + memory.untyped_storage().nbytes():
                return block
        return None


def host_values(tensor: Tensor) -> Tensor:
    """The values of a twin."""
    assert isinstance(tensor, TwinTensor)
    return tensor.host_values
