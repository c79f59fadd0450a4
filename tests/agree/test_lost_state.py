"""Which state counts as lost, and which as none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from meshmuon import Muon
from meshmuon.agree.differences import ABSENT, ELSEWHERE, PRESENT, lost_by_owners
from meshmuon.errors import StateError
from tests.support.tensors import local, seeded
from tests.support.threads import run_threads


def test_only_parameters_that_are_stepped_can_have_lost_their_state() -> None:
    states = {0: ABSENT + ELSEWHERE, 1: ELSEWHERE + PRESENT}  # rank 0 owns the first parameter, rank 1 the second
    assert lost_by_owners(states, [True, True]) == {1: [0]}
    assert lost_by_owners(states, [False, True]) == {}  # idle: nothing restarts in this step


def test_nothing_is_lost_where_no_owner_has_state() -> None:
    assert lost_by_owners({0: ABSENT + ELSEWHERE, 1: ELSEWHERE + ABSENT}, [True, True]) == {}


class Replica:
    """One bfloat16 matrix on two ranks, rounded stochastically."""

    def __init__(self, use_muon: bool) -> None:
        self.mesh = init_device_mesh("cpu", (2,))
        self.param = nn.Parameter(self.placed(9))
        groups = [{"params": [self.param], "names": ["w"], "use_muon": use_muon}]
        self.optimizer = Muon(groups, lr=0.01, rounding="stochastic", allow_inactive=True)

    def placed(self, seed: int) -> Tensor:
        return distribute_tensor(seeded((6, 4), seed).bfloat16(), self.mesh, [Replicate()], src_data_rank=None)

    def step(self, number: int) -> None:
        self.param.grad = self.placed(number)
        self.optimizer.step()


BOTH = pytest.mark.parametrize("use_muon", [True, False], ids=["muon", "adamw"])


@BOTH
def test_state_that_one_rank_has_made_and_not_stepped_is_none(use_muon: bool) -> None:
    """``state_dict()`` makes zeros and the key of the rounding counter, which is no progress: nothing would restart elsewhere."""

    def main(rank: int) -> Tensor:
        replica, earlier = Replica(use_muon), Replica(use_muon).param
        replica.optimizer.add_param_group({"params": [earlier], "names": ["v"], "use_muon": use_muon})
        earlier.grad = replica.placed(8)
        replica.optimizer.step()
        if rank == 1:
            replica.optimizer.state_dict()
        assert (replica.param in replica.optimizer.state) == (rank == 1)
        for step in range(2):
            replica.step(step)
        return local(replica.param)

    first, second = run_threads(2, main)
    assert torch.equal(first, second)


@BOTH
@pytest.mark.parametrize("part", ["all", "rounding_counter"])
def test_state_that_one_rank_has_lost_is_refused(part: str, use_muon: bool) -> None:
    def main(rank: int) -> None:
        replica = Replica(use_muon)
        replica.step(0)
        if rank == 1:
            state = replica.optimizer.state
            del (state if part == "all" else state[replica.param])[replica.param if part == "all" else part]
        with pytest.raises(StateError, match="w has no state on rank 1 and would restart there from zero, while rank 0 has"):
            replica.step(1)

    run_threads(2, main)
