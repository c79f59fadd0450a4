"""Memory runs out on one rank while a plan is prepared: all ranks raise, none keeps anything, and all go on."""

from __future__ import annotations

from contextlib import nullcontext
from traceback import walk_stack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshmuon import DistMuon, MeshmuonError, Muon
from meshmuon.transport import collectives as small_collectives
from tests.support.tensors import seeded
from tests.support.threads import run_threads

WORLD, ODD = 3, 1
CLIP = {"head_dim": 2, "threshold": 1.0}
SHAPES = {"layers.0.wq.weight": (6, 5), "layers.0.wk.weight": (6, 5), "layers.0.up.weight": (9, 4)}
LOGITS = torch.tensor([4.0, 0.5, 100.0])


class Rank:
    """A small attention layer: DTensors on a mesh, or plain replicas whose work is divided."""

    def __init__(self, placements: tuple[Any, ...] | None, kind: type[Muon], **options: Any) -> None:
        self.mesh = None if placements is None else init_device_mesh("cpu", (dist.get_world_size(),))
        self.placements = placements
        self.params = [nn.Parameter(self.placed(seeded(shape, k))) for k, shape in enumerate(SHAPES.values())]
        groups = [{"params": [*zip(SHAPES, self.params, strict=True)], "use_muon": True}]
        self.optimizer = kind(groups, lr=0.01, scheme=lambda batch: batch / 2, clip_config=CLIP, **options)

    def placed(self, value: Tensor) -> Tensor:
        return value if self.mesh is None else distribute_tensor(value, self.mesh, self.placements, src_data_rank=None)

    def step(self, number: int) -> str:
        """What the step raised."""
        for k, param in enumerate(self.params):
            param.grad = self.placed(seeded(tuple(param.shape), 100 * number + k))
        try:
            self.optimizer.step(qk_logits={0: LOGITS})
        except MeshmuonError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def whole(self) -> list[Tensor]:
        return [whole(param) for param in self.params]


def whole(param: Tensor) -> Tensor:
    found = param.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).clone()


class _OutOfMemory(TorchDispatchMode):
    """Raises at the n-th tensor that is made, and counts them; those that are made in a collective do not count."""

    MAKERS = ("aten::empty", "aten::empty_strided", "aten::zeros", "aten::full", "aten::ones", "aten::arange")

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        collectives = c10d.__file__, small_collectives.__file__
        if func._schema.name in self.MAKERS and all(
            frame.f_code.co_filename not in collectives for frame, _ in walk_stack(None)
        ):
            self.left -= 1
            if self.left == 0:
                raise torch.OutOfMemoryError("no 3 GiB left")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("later", [False, True], ids=["first plan", "second plan"])
@pytest.mark.parametrize("kind", [Muon, DistMuon])
@pytest.mark.parametrize("metrics", [None, 1], ids=["plain", "metrics"])
def test_all_that_belongs_to_a_plan_is_prepared_or_none_of_it(
    metrics: int | None, kind: type[Muon], later: bool
) -> None:
    """Memory runs out on one rank, at each of the tensors in turn. All ranks say so, none keeps anything, and all
    go on.
    """
    counted = [0]  # tensors that preparing makes on the odd rank

    def main(rank: int, n: int) -> tuple[list[str], list[Tensor]]:
        one = Rank((Shard(0),) if kind is Muon else None, kind, metrics=metrics)
        said = [one.step(0)] if later else []
        if later:
            added = nn.Parameter(one.placed(seeded((6, 4), 7)))
            one.params.append(added)
            one.optimizer.add_param_group({"params": [("layers.0.late.weight", added)], "use_muon": True})
        prepare, memory = one.optimizer._prepare, _OutOfMemory(n)

        def short_of_memory(step: Any) -> None:
            with memory if rank == ODD else nullcontext():
                prepare(step)

        one.optimizer._prepare = short_of_memory  # type: ignore[method-assign]
        said.append(one.step(1))
        del one.optimizer._prepare
        if rank == ODD:
            counted[0] = n - memory.left
        if said[-1]:
            assert (one.optimizer._executor.plan, one.optimizer.workspace_bytes()) == (None, 0)
            said.append(one.step(1))
        said.append(one.step(2))
        return said, one.whole()

    undisturbed = run_threads(WORLD, lambda rank: main(rank, 0))
    most = counted[0]
    assert most > 3
    for n in range(1, most + 1):
        found = run_threads(WORLD, lambda rank, n=n: main(rank, n))
        for said, values in found:
            assert said[later].endswith(f"rank {ODD}: OutOfMemoryError: no 3 GiB left"), f"tensor {n} of {most}: {said}"
            assert set(said) - {said[later]} == {""}
            assert all(torch.equal(*pair) for pair in zip(values, undisturbed[0][1], strict=True)), (
                f"tensor {n} of {most}"
            )
