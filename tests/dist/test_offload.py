"""Offload on a mesh beyond its bits, which ``test_cases.py`` draws: checkpoints, and a rank whose memory is full."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshmuon import MeshmuonError, Muon
from meshmuon.device import Transfers
from meshmuon.optim import offload
from tests.support.small_model import after, assert_equal, give_gradients, initial, muon_of, world_mesh
from tests.support.threads import run_threads

S0 = Shard(0)


def test_the_state_of_a_dtensor_stays_one() -> None:
    """While it is away: its mesh, placements and shapes are the parameter's, so that checkpoints know what it is."""

    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        first, param = (
            nn.Parameter(distribute_tensor(torch.randn(5, 4), mesh, [S0], src_data_rank=None)) for _ in range(2)
        )
        optimizer = Muon([{"params": [first, param], "names": ["v", "w"], "use_muon": True}])
        optimizer.turn_on_cpu_offload()
        for _ in range(2):
            for one in (first, param):
                one.grad = distribute_tensor(torch.ones(5, 4), mesh, [S0], src_data_rank=None)
            optimizer.step()
        saved = optimizer.state_dict()["state"][1]["momentum_buffer"]
        assert isinstance(saved, DTensor)
        assert (saved.device_mesh, saved.placements, saved.shape) == (mesh, (S0,), (5, 4))
        assert saved.to_local().shape == param.to_local().shape
        assert torch.equal(saved.full_tensor(), torch.full((5, 4), 1.95))
        assert saved.stride() == param.stride()
        stored = io.BytesIO()
        torch.save(optimizer.state_dict(), stored)
        twin = copy.deepcopy(optimizer)
        for one, step in ((optimizer, False), (twin, True)):
            if step:
                one.turn_off_cpu_offload()
            _, value = (entry["momentum_buffer"] for entry in one.state.values())
            assert torch.equal(copy.deepcopy(value).to_local(), saved.to_local())

    run_threads(2, main)


def test_one_rank_that_cannot_bring_its_state_back_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others hear of it instead of waiting, nothing is stepped, and the next step goes on."""
    failing: set[str] = set()

    class Full(Transfers):
        def load(self, device: Tensor, host: Tensor, **waits: bool) -> None:
            if threading.current_thread().name in failing:
                raise torch.OutOfMemoryError("the device is full")
            super().load(device, host, **waits)

    monkeypatch.setattr(offload, "transfers_for", lambda device: Full())

    def main(rank: int) -> None:
        threading.current_thread().name = f"rank {rank}"
        params = initial(world_mesh())
        optimizer = muon_of(params, none_grad=False)
        optimizer.turn_on_cpu_offload()
        for step in range(3):
            give_gradients(params, step)
            if step == 2:
                if rank == 1:
                    failing.add("rank 1")
                with pytest.raises(MeshmuonError, match="rank 1: OutOfMemoryError: the device is full"):
                    optimizer.step()
                failing.discard(f"rank {rank}")
            optimizer.step()
        assert_equal(params, expected)

    expected = after(3)
    run_threads(3, main)
