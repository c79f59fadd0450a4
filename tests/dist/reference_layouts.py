"""The reference path on random placements, in real processes: torch's threaded process group loses count of its
gathers.

torch gathers the matrices there, so that torch's faults show: with ``_StridedShard`` and sizes that do not divide, its
gather fails or puts elements in other places than its own cut took them from. Such layouts must be refused, and only
they.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshmuon.errors import UnsupportedError
from tests.support.cases import Case, Param, check, place, single
from tests.support.layouts import random_placement

CASES = 24


def param(rng: random.Random, axes: int) -> Param:
    dims = rng.choice([2, 2, 3])
    shape = tuple(rng.choice([1, 2, 3, 4, 5, 6, 8, 9, 11, 17]) for _ in range(dims))
    dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    return Param(shape, 0, tuple(random_placement(rng, dims) for _ in range(axes)), dtype)


def gathers(case: Case, mesh: DeviceMesh, k: int) -> bool:
    """Whether torch gets parameter ``k`` back from its own pieces."""
    numbers = torch.arange(math.prod(case.params[k].shape)).view(case.params[k].shape)
    try:
        return torch.equal(place(case, [mesh], k, numbers).full_tensor(), numbers)
    except RuntimeError:
        return False


def random_layouts_on_the_reference_path() -> None:
    rng, refused = random.Random(0), 0
    meshes = {
        shape: DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(shape)) for shape in ((4,), (2, 2), (1, 4))
    }
    for _ in range(CASES):
        shape = rng.choice(list(meshes))
        options = {"nesterov": rng.random() < 0.5, "scheme": rng.choice(["keller", "polar_express"])}
        case = Case(tuple(param(rng, len(shape)) for _ in range(rng.randint(1, 4))), options, 2)
        wrong = [k for k in range(len(case.params)) if not gathers(case, meshes[shape], k)]
        if wrong:
            refused += 1
            with pytest.raises(UnsupportedError, match="|".join(rf"layers\.{k}\..*torch" for k in wrong)):
                check(case, [meshes[shape]], single(case), use_distributed_muon=True)
        else:
            check(case, [meshes[shape]], single(case), use_distributed_muon=True)
    assert 0 < refused < CASES * 3 / 4, f"both must have happened: {refused} of {CASES} layouts were refused"
