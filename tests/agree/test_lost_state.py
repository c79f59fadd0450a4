"""Which state counts as lost, and which as none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from meshmuon import Muon
from meshmuon.errors import StateError
from tests.support.tensors import local, seeded
from tests.support.threads import run_threads


class Replica:
    """One bfloat16 matrix on two ranks, rounded stochastically."""

    def __init__(self, use_muon: bool) -> None:
        self.mesh = init_device_mesh("cpu", (2,))
        self.param = nn.Parameter(self.placed(9))
        groups = [{"params": [self.param], "names": ["w"], "use_muon": use_muon}]
        self.optimizer = Muon(groups, lr=0.01, rounding="stochastic", allow_inactive=True)

    def placed(self, seed: int) -> Tensor:
        return distribute_tensor(seeded((6, 4), seed).bfloat16(), self.mesh, [Replicate()], src_data_rank=None)

    def step(self, number: int, scale: float = 1.0) -> None:
        self.param.grad = scale * self.placed(number)
        self.optimizer.step()


BOTH = pytest.mark.parametrize("use_muon", [True, False], ids=["muon", "adamw"])


@BOTH
@pytest.mark.parametrize("loads", [False, True], ids=["made", "loaded"])
def test_state_that_one_rank_has_made_and_not_stepped_is_none(loads: bool, use_muon: bool) -> None:
    """``state_dict()`` makes zeros and the key of the rounding counter, which is no progress: nothing would restart
    elsewhere.
    """

    def main(rank: int) -> Tensor:
        replica, earlier = Replica(use_muon), Replica(use_muon).param
        replica.optimizer.add_param_group({"params": [earlier], "names": ["v"], "use_muon": use_muon})
        earlier.grad = replica.placed(8)
        replica.optimizer.step()
        if rank == 1:
            saved = replica.optimizer.state_dict()
            if loads:
                replica.optimizer.load_state_dict(saved)
        assert (replica.param in replica.optimizer.state) == (rank == 1)
        for step in range(2):
            replica.step(step)
        return local(replica.param)

    first, second = run_threads(2, main)
    assert torch.equal(first, second)


@BOTH
@pytest.mark.parametrize("part", ["all", "rounding_counter"])
@pytest.mark.parametrize("scale", [1.0, 0.0], ids=["usual", "zero gradient"])
def test_state_that_one_rank_has_lost_is_refused(scale: float, part: str, use_muon: bool) -> None:
    """Also if the momentum is zero, so that only the counts tell; what a user keeps beside the state does not
    matter.
    """

    def main(rank: int) -> None:
        replica = Replica(use_muon)
        replica.step(0, scale)
        state = replica.optimizer.state
        state[replica.param] = {"note": "of the user", **state[replica.param]}
        if rank == 1:
            del (state if part == "all" else state[replica.param])[replica.param if part == "all" else part]
        with pytest.raises(
            StateError, match="w has no state on rank 1 and would restart there from zero, while rank 0 has"
        ):
            replica.step(1)

    run_threads(2, main)
