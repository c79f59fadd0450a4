"""Convolution filters on a mesh: flattened to (out, in·kernel), bit-equal to one device however they are cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.support.cases import Case, Param, check, single
from tests.support.threads import run_threads

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[Any, ...]]] = {
    "filters": ((2,), (Shard(0),)),
    "filters, uneven": ((3,), (Shard(0),)),
    "channels": ((2,), (Shard(1),)),
    "height of the kernel": ((2,), (Shard(2),)),
    "width of the kernel": ((2,), (Shard(3),)),
    "replicated": ((2,), (Replicate(),)),
    "filters and channels": ((2, 2), (Shard(0), Shard(1))),
    "filters twice": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
}


@pytest.mark.parametrize("options", [{}, {"split": 4}], ids=["whole", "split"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_device(layout: str, options: dict[str, Any]) -> None:
    grid, placements = LAYOUTS[layout]
    filters, dense = Param((8, 3, 3, 2), 0, placements), Param((8, 5), 0, (Shard(0),) * len(grid))
    case = Case((filters, dense), {"conv": "flatten", **options})
    expected = single(case)
    run_threads(math.prod(grid), lambda rank: check(case, [init_device_mesh("cpu", grid)], expected) and None)
