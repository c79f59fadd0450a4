"""Counts what decides the time of a step on a GPU and can be counted without one: launches, bytes, operations of the
host.

A launch is one kernel. A ``_foreach`` operation is one launch per chunk of tensors on torch's fast path: all lists of
one dtype each (of one dtype altogether, except for copies), tensors dense and with the strides of their neighbours in
the other lists. Otherwise torch launches one kernel per tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshmuon.execute import StepParam
from meshmuon.plan import Plan
from tests.support.threads import run_threads

from . import runs
from .clocks import HOST
from .programs import Program
from .recorder import Recorder, package_line

# Tensors that fit into the arguments of one kernel of torch's multi-tensor apply, by the number of lists.
_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36}


class CountingRecorder(Recorder):  # type: ignore[no-untyped-call]
    """A recorder that also counts the launches and bytes of the device between ``counting`` and its end."""

    def __init__(self, name: str = "rank 0", *, seed: int = 0) -> None:
        super().__init__(name, seed=seed)
        self.launches: Counter[str] = Counter()  # by operation and line of the package
        self.bytes_of: Counter[str] = Counter()  # that kernels read and write, by the same
        # of torch that launch nothing: views, allocations, work on host tensors
        self.host_operations: Counter[str] = Counter()
        self._counting = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def touch(self, stream: int, reads: Sequence[Tensor], writes: Sequence[Tensor], operation: str) -> None:
        super().touch(stream, reads, writes, operation)
        if self._counting and stream != HOST:
            work = f"{operation} {package_line('elementwise.py')}"  # for whom elements are worked on
            self.launches[work] += 1
            self.bytes_of[work] += sum(tensor.numel() * tensor.element_size() for tensor in (*reads, *writes))

    @property
    def bytes(self) -> int:
        return self.bytes_of.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = sum(self.launches.values())
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        launched = sum(self.launches.values()) > before
        if launched and name.startswith(("_foreach", "_fused")):
            self.launches[f"{name} {package_line()}"] += foreach_launches(name, args) - 1
        elif (
            self._counting and not launched and result is not NotImplemented
        ):  # which a DTensor gets, before its local tensor
            line = package_line()
            # where NCCL's stand-in works
            if line.startswith("meshmuon/") and not line.startswith("meshmuon/transport/"):
                self.host_operations[f"{name} {line}"] += 1
        return result


def foreach_launches(name: str, args: Sequence[Any]) -> int:
    """Kernels that a ``_foreach`` operation launches."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], Tensor)]
    if name == "_fused_adamw_":  # refuses what is not alike; step counts come beside the weights and their state
        lists = lists[:4]
    dtypes = [{tensor.dtype for tensor in tensors} for tensors in lists]
    one_dtype = all(len(of_list) == 1 for of_list in dtypes) and (
        name == "_foreach_copy_" or len(set.union(*dtypes)) == 1
    )
    alike = all(len({tensor.stride() for tensor in tensors}) == 1 for tensors in zip(*lists, strict=True))
    dense = all(_is_dense(tensor) for tensors in lists for tensor in tensors)
    on_device = all(tensor.is_cuda for tensors in lists for tensor in tensors)
    if one_dtype and alike and dense and on_device:
        return -(-len(lists[0]) // _TENSORS_PER_LAUNCH[len(lists)])
    return len(lists[0])


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements are adjacent in memory, in any order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@dataclass(frozen=True)
class CountedStep:
    """The last step of a program on one rank."""

    recorder: CountingRecorder
    plan: Plan
    step_params: list[StepParam]  # of the plan

    @property
    def launches(self) -> int:
        return self.recorder.launches.total()

    @property
    def host_operations(self) -> int:
        return self.recorder.host_operations.total()

    def bytes_of(self, *functions: str) -> int:
        """Bytes that kernels launched by these functions read and write."""
        return sum(count for work, count in self.recorder.bytes_of.items() if work.rpartition(" ")[2] in functions)


class _CountedRun(runs._RankRun):
    def _step(self, step: int) -> None:
        assert isinstance(self._recorder, CountingRecorder)
        with self._recorder.counting() if step == self._program.steps - 1 else nullcontext():
            super()._step(step)

    def counted(self) -> CountedStep:
        self.train()
        plan = self._optimizer._executor.plan
        assert plan is not None
        assert isinstance(self._recorder, CountingRecorder)
        return CountedStep(self._recorder, plan, self._optimizer._step_params._cached)


def count_launches(program: Program) -> list[CountedStep]:
    """Runs a program on all of its ranks and counts its last step, rank by rank."""

    def main(rank: int) -> CountedStep:
        recorder = CountingRecorder(f"rank {rank}", seed=rank)
        with recorder.recording():
            return _CountedRun(program, rank, recorder).counted()

    with runs.twins():
        return run_threads(program.world, main)
