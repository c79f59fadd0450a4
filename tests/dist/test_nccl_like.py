"""Layouts on real processes under NCCL's rules: the bits of one device, votes beside the group, no group that hangs."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshmuon.agree.node_view import RANKS_PER_NODE
from tests.support.cases import Case, Param, check, single
from tests.support.nccl_like import NAME, NcclLike
from tests.support.processes import Job, JobRanks, job_ranks

from .gloo_cases import ALONE, CASES, S0, S1, R


def pipeline_with_a_two_dim_stage() -> None:
    """A stage of 2 × 2 ranks, for which no group exists, and one of a single rank, which takes no part in making it."""
    stage = dist.get_rank() // 4
    meshes = [DeviceMesh("cpu", torch.arange(4).view(2, 2)), DeviceMesh("cpu", [4])]
    case = [Case((Param((7, 5), 0, (S0, S1)), Param((6, 4), 0, (R, S0)))), Case((Param((5, 9), 0, (S0,)),))][stage]
    optimizer = check(case, [meshes[stage]], single(case))
    assert optimizer.plan().ranks == ((0, 1, 2, 3), (4,))[stage]
    dist.new_group([0, 4])  # as many splits as before on all ranks


def prepare_meets_every_peer(per_node: str | None = None, **options: Any) -> None:
    """A number goes to and comes from each rank that steps exchange with, before the first of them; to and from no
    other.
    """
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    params = tuple(Param((2 + 2 * k, 7 - k), 0, (S0,), unused=(0,) if k == 1 else ()) for k in range(3))
    case = Case((*params, Param((9,), 0, (S0,), muon=False)), {"rule": "normuon", **options}, steps=3, prepares=True)
    with patch.dict(os.environ, {} if per_node is None else {RANKS_PER_NODE: per_node}):
        check(case, [mesh], single(case))
    first, *later = [parts for kind, *parts in world().history if kind.startswith("all_to_all")]
    assert later
    for met, exchanged in zip(first, zip(*later, strict=True), strict=True):  # sent to, and expected from
        assert met == dict.fromkeys(set[int]().union(*exchanged), 1)


def prepare_meets_all_where_nothing_is_exchanged() -> None:
    """Experts that are whole on their ranks: only metrics are reduced, and that must not be the first contact of
    the ranks.
    """
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    params = (Param((4, 6, 5), 0, (S0,)), Param((9,), 0, (S0,), muon=False))
    case = Case(params, {"metrics": 1}, steps=2, prepares=True)
    optimizer = check(case, [mesh], single(case))
    assert optimizer.plan().describe().startswith("0 matrices with an owner and exchanged, 4 computed where they are")
    kinds = [kind.partition(" ")[0] for kind, *_ in world().history]
    assert kinds.count("all_to_all_single") == 1
    assert kinds.index("all_to_all_single") < kinds.index("all_reduce")


# The back end itself: it must notice what NCCL would make wrong, or hang.


def world() -> NcclLike:
    default: Any = dist.group.WORLD
    return default  # type: ignore[no-any-return]


def started() -> tuple[Tensor, Tensor, Any]:
    """What is sent, what is received, and the exchange of one element with the other rank."""
    sent, received = torch.full((1,), float(dist.get_rank())), torch.zeros(1)
    splits = [1 - dist.get_rank(), dist.get_rank()][::-1]
    return sent, received, dist.all_to_all_single(received, sent, splits, splits, async_op=True)


def an_input_is_read_late_and_an_output_written_late() -> None:
    for refilled in (False, True):
        sent, received, work = started()
        assert received.isnan()
        if refilled:
            sent.fill_(7.0)
        dist.all_reduce(torch.ones(1))  # completes although the exchange before it has not
        assert received.isnan()
        work.wait()
        assert received.item() == (7.0 if refilled else 1.0 - dist.get_rank())


def sizes_are_compared() -> None:
    count = 1 + dist.get_rank()  # rank 0 sends and expects one element, rank 1 two
    splits = [0, count] if dist.get_rank() == 0 else [count, 0]
    with pytest.raises(RuntimeError, match=r"has all_to_all_single torch.float32 of . elements, rank . has"):
        dist.all_to_all_single(torch.zeros(count), torch.zeros(count), splits, splits)
    world().history.clear()


def abort_wakes_a_wait() -> None:
    if dist.get_rank() == 0:
        dist.barrier()
        threading.Timer(0.2, world().abort).start()
        with pytest.raises(RuntimeError, match="aborted"):
            dist.all_reduce(torch.ones(1))
        assert world().aborts == 1
    else:
        dist.barrier()
    world().history.clear()


def members_alone_cannot_split() -> None:
    if dist.get_rank() == 0:
        world()._set_default_timeout(timedelta(seconds=0.2))
        with pytest.raises(RuntimeError, match=r"split 1 of group 0: ranks \[1\] do not come"):
            dist.new_group([0], use_local_synchronization=True)


SAME_AS_GLOO = (
    "FSDP2, 3 ranks, uneven",
    "FSDP2, 4 ranks, few rows",
    "FSDP2, 3 ranks, forward and backward",
    "FSDP2, 3 ranks, reference",
    "HSDP, shared",
    "HSDP, repeated",
    "TP, 3 ranks, uneven",
    "FSDP2 over TP",
    "FSDP2 over TP, uneven",
    "FSDP2 over TP, one matrix at a time",
    "experts, EP",
    "experts, EP × FSDP",
    "experts, EP × TP",
    "experts, HSDP",
    "pipeline stages",
    "meshes over some ranks",
    "DDP, divided",
    "DistMuon, 4 ranks",
    "replica groups inside a mesh",
    "two meshes",
    "mixed dtypes",
    "little memory",
    "a gradient is missing on one rank",
)
NEW = {
    "a pipeline with a two-dim stage": (5, pipeline_with_a_two_dim_stage),
    "an input is read late, an output written late": (2, an_input_is_read_late_and_an_output_written_late),
    "sizes are compared": (2, sizes_are_compared),
    "abort wakes a wait": (2, abort_wakes_a_wait),
    "members alone cannot split": (2, members_alone_cannot_split),
    "prepare() meets every peer": (4, prepare_meets_every_peer),
    "prepare() meets all where nothing is exchanged": (2, prepare_meets_all_where_nothing_is_exchanged),
}


def jobs() -> dict[str, Job]:
    chosen = {**{name: (CASES | ALONE)[name] for name in SAME_AS_GLOO}, **NEW}
    return {name: Job(world, lambda _, run=run: run(), NAME) for name, (world, run) in chosen.items()}


ranks = job_ranks(jobs, tuple(jobs()))


@pytest.mark.parametrize("name", jobs())
def test_layouts_equal_one_device(name: str, ranks: JobRanks) -> None:
    ranks.check(name)
