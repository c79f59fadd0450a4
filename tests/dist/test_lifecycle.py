"""What happens around steps on a mesh: failures of one rank, loading, copying, other devices by default, batches of replicas."""

from __future__ import annotations

import copy
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshmuon import ConfigError, GradientError, MeshmuonError, Muon, PlanMismatchError
from meshmuon.transport import groups
from tests.support.tensors import local, same
from tests.support.threads import run_threads

S0, R = Shard(0), Replicate()


def place(value: Tensor, mesh: DeviceMesh, placement: Any = S0) -> Tensor:
    return distribute_tensor(value, mesh, [placement], src_data_rank=None)


def build(mesh: DeviceMesh, **options: Any) -> tuple[list[nn.Parameter], Muon]:
    generator = torch.Generator().manual_seed(0)  # ranks are threads and share the global one
    params = [nn.Parameter(place(torch.randn(shape, generator=generator), mesh)) for shape in ((7, 5), (6, 4))]
    return params, Muon([{"params": params, "names": ["one", "two"], "use_muon": True}], lr=0.01, **options)


def give_gradients(params: list[nn.Parameter], seed: int = 1) -> None:
    for k, param in enumerate(params):
        generator = torch.Generator().manual_seed(100 * seed + k)
        mesh, placements = param.device_mesh, param.placements
        param.grad = distribute_tensor(torch.randn(param.shape, generator=generator), mesh, placements, src_data_rank=None)


BREAK = {
    "scheme": (lambda optimizer: optimizer.param_groups[0].update(scheme="magic"), ConfigError),
    "ns_steps": (lambda optimizer: optimizer.param_groups[0].update(ns_steps=0), ConfigError),
    "conv": (lambda optimizer: optimizer.param_groups[0].update(conv="unfold"), ConfigError),
    "names": (lambda optimizer: optimizer.param_groups[0]["param_names"].pop(), MeshmuonError),
    "adjust_lr_fn": (lambda optimizer: optimizer.param_groups[0].update(adjust_lr_fn=lambda rows, cols: 1 / 0), MeshmuonError),
}


@pytest.mark.parametrize("after_load", [False, True])
@pytest.mark.parametrize("what", BREAK)
def test_one_rank_cannot_step_and_all_are_told(what: str, after_load: bool) -> None:
    spoil, kind = BREAK[what]

    def main(rank: int) -> str:
        params, optimizer = build(init_device_mesh("cpu", (3,)))
        if after_load:
            optimizer.load_state_dict(optimizer.state_dict())
        if rank == 1:
            spoil(optimizer)
        give_gradients(params)
        before = [local(p) for p in params]
        with pytest.raises(kind) as raised:
            optimizer.step()
        for param, old in zip(params, before, strict=True):
            same(local(param), old, "written by a refused step")
        assert not optimizer.state
        return str(raised.value)

    texts = run_threads(3, main)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 1: ")


def test_ranks_with_different_rules_are_told_so() -> None:
    def main(rank: int) -> str:
        params, optimizer = build(init_device_mesh("cpu", (2,)), rule="normuon" if rank else "muon_plus")
        give_gradients(params)
        with pytest.raises(PlanMismatchError) as raised:
            optimizer.step()
        return str(raised.value)

    texts = run_threads(2, main)
    assert texts[0] == texts[1]
    assert "NorMuon(beta2=0.95)" in texts[0]
    assert "MuonPlus()" in texts[0]


def test_a_gradient_that_is_cut_otherwise_on_one_rank() -> None:
    def main(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        params, optimizer = build(mesh)
        give_gradients(params)
        rows = 2 if rank == 1 else 3
        params[1].grad = DTensor.from_local(torch.ones(rows, 4), mesh, [S0], run_check=False, shape=(6, 4), stride=(4, 1))
        with pytest.raises(GradientError) as raised:
            optimizer.step()
        return str(raised.value)

    texts = run_threads(2, main)
    assert texts[0] == texts[1]
    assert "two: this rank holds (3, 4), of the gradient (2, 4)" in texts[0]


def test_loading_keeps_the_groups() -> None:
    """A new group per loaded state would pile up, and one rank that loads alone would wait for the others to make it."""

    def main(rank: int) -> None:
        params, optimizer = build(init_device_mesh("cpu", (3,)))
        give_gradients(params)
        optimizer.step()
        before = callers.count(threading.get_ident())
        if rank == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        give_gradients(params)
        optimizer.step()
        assert callers.count(threading.get_ident()) == before

    callers: list[int] = []
    new_group = groups.new_named_group

    def record(*args: Any, **options: Any) -> Any:
        callers.append(threading.get_ident())
        return new_group(*args, **options)

    with mock.patch.object(groups, "new_named_group", record):  # by this thread: ranks that patch the same name leave it patched
        run_threads(3, main)


def test_a_copy_divides_work_again_when_it_is_given_a_group() -> None:
    def main(rank: int) -> None:
        params = [nn.Parameter(torch.ones(6, 4) * k) for k in range(1, 4)]
        optimizer = Muon([{"params": params, "names": list("abc"), "use_muon": True}], replica_group=dist.group.WORLD)
        assert optimizer.replica_group is dist.group.WORLD
        alone = copy.deepcopy(optimizer)
        assert alone.replica_group is None
        for one in (optimizer, alone):
            for k, param in enumerate(one.param_groups[0]["params"]):
                param.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(k))
            one.step()
        assert alone.plan().ranks == (rank,)
        alone.replica_group = dist.group.WORLD
        for k, param in enumerate(alone.param_groups[0]["params"]):
            param.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(k))
        alone.step()
        assert alone.plan().ranks == (0, 1)

    run_threads(2, main)


@pytest.mark.parametrize("inference", [False, True])
def test_whatever_the_default_device_and_mode_of_the_first_step(inference: bool) -> None:
    def main(rank: int) -> list[Tensor]:
        params, optimizer = build(init_device_mesh("cpu", (2,)))
        give_gradients(params)
        with torch.inference_mode(inference), torch.device("cpu" if inference else "meta"):
            optimizer.step()
        give_gradients(params)
        optimizer.step()
        return [local(p) for p in params]

    found = run_threads(2, main)
    expected = run_threads(2, lambda rank: two_plain_steps())
    for mine, wanted in zip(found, expected, strict=True):
        for one, other in zip(mine, wanted, strict=True):
            same(one, other, "parameter")


def two_plain_steps() -> list[Tensor]:
    params, optimizer = build(init_device_mesh("cpu", (2,)))
    for _ in range(2):
        give_gradients(params)
        optimizer.step()
    return [local(p) for p in params]


def test_replicas_are_batched_alike_on_every_rank() -> None:
    """An expert that only rank 0 has must not change with which products a replicated matrix is computed."""

    def main(rank: int) -> list[int]:
        mesh = init_device_mesh("cpu", (2,))
        sizes: list[int] = []

        def watch(batch: Tensor) -> Tensor:
            sizes.append(len(batch))
            return batch

        replicated = [nn.Parameter(place(torch.ones(4, 4), mesh, R)) for _ in range(2)]
        expert = nn.Parameter(place(torch.ones(1, 4, 4), mesh, S0))  # rank 1 has none
        names = ["a", "b", "experts"]
        group = {"params": [*replicated, expert], "names": names, "use_muon": True, "scheme": watch, "expert_keys": ["experts"]}
        optimizer = Muon([group], replicas="repeat")
        for param in group["params"]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        return sorted(sizes)

    assert run_threads(2, main) == [[1, 2], [2]]


@pytest.mark.parametrize("none_grad", [True, False])
def test_a_wave_frees_gradients_once_they_are_sent(none_grad: bool) -> None:
    """One wave at a time: while a matrix is orthogonalised, gradients of later waves must be there, and no others."""

    def main(rank: int) -> None:
        mesh, present = init_device_mesh("cpu", (2,)), list[list[bool]]()

        def watch(batch: Tensor) -> Tensor:
            present.append([param.grad is not None for param in params])
            return batch

        params = [nn.Parameter(place(torch.ones(4, 6), mesh)) for _ in range(6)]
        groups = [{"params": params, "use_muon": True, "scheme": watch}]
        optimizer = Muon(groups, chunk_size=1, waves_ahead=0, none_grad=none_grad)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        tasks = sorted(optimizer.plan().tasks, key=lambda task: task.param)
        own_waves = sorted(task.wave for task in tasks if task.owner == rank)
        assert len(own_waves) == 3
        assert present == [[not none_grad or task.wave > wave for task in tasks] for wave in own_waves]

    run_threads(2, main)
