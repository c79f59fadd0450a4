"""What happens around steps on a mesh: failures of one rank, loading, copying, other devices by default, batches of
replicas.
"""

from __future__ import annotations

import copy
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmuon import ConfigError, MeshmuonError, Muon
from meshmuon.transport import groups
from tests.support.small_model import S0, R, after, assert_equal, give_gradients, initial, muon_of, on_mesh, world_mesh
from tests.support.tensors import local, same
from tests.support.threads import run_threads


def build(**options: Any) -> tuple[list[nn.Parameter], Muon]:
    params = initial(world_mesh())
    return params, muon_of(params, **options)


BREAK = {
    "scheme": (lambda optimizer: optimizer.param_groups[0].update(scheme="magic"), ConfigError),
    "ns_steps": (lambda optimizer: optimizer.param_groups[0].update(ns_steps=0), ConfigError),
    "conv": (lambda optimizer: optimizer.param_groups[0].update(conv="unfold"), ConfigError),
    "names": (lambda optimizer: optimizer.param_groups[0]["param_names"].pop(), MeshmuonError),
    "adjust_lr_fn": (
        lambda optimizer: optimizer.param_groups[0].update(adjust_lr_fn=lambda rows, cols: 1 / 0),
        MeshmuonError,
    ),
}


@pytest.mark.parametrize("after_load", [False, True])
@pytest.mark.parametrize("what", BREAK)
def test_one_rank_cannot_step_and_all_are_told(what: str, after_load: bool) -> None:
    spoil, kind = BREAK[what]

    def main(rank: int) -> str:
        params, optimizer = build()
        if after_load:
            optimizer.load_state_dict(optimizer.state_dict())
        if rank == 1:
            spoil(optimizer)
        give_gradients(params, 0)
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


def test_loading_keeps_the_groups() -> None:
    """A new group per loaded state would pile up, and one rank that loads alone would wait for the others to make
    it.
    """

    def main(rank: int) -> None:
        params, optimizer = build()
        give_gradients(params, 0)
        optimizer.step()
        before = callers.count(threading.get_ident())
        if rank == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        give_gradients(params, 0)
        optimizer.step()
        assert callers.count(threading.get_ident()) == before

    callers: list[int] = []
    new_group = groups.new_named_group

    def record(*args: Any, **options: Any) -> Any:
        callers.append(threading.get_ident())
        return new_group(*args, **options)

    # by this thread: ranks that patch the same name leave it patched
    with mock.patch.object(groups, "new_named_group", record):
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
    def main(rank: int) -> None:
        params, optimizer = build()
        give_gradients(params, 0)
        with torch.inference_mode(inference), torch.device("cpu" if inference else "meta"):
            optimizer.step()
        give_gradients(params, 1)
        optimizer.step()
        assert_equal(params, expected)

    expected = after(2)
    run_threads(2, main)


def test_replicas_are_batched_alike_on_every_rank() -> None:
    """An expert that only rank 0 has must not change with which products a replicated matrix is computed."""

    def main(rank: int) -> list[int]:
        mesh = world_mesh()
        sizes: list[int] = []

        def watch(batch: Tensor) -> Tensor:
            sizes.append(len(batch))
            return batch

        replicated = [nn.Parameter(on_mesh(torch.ones(4, 4), mesh, R)) for _ in range(2)]
        expert = nn.Parameter(on_mesh(torch.ones(1, 4, 4), mesh, S0))  # rank 1 has none
        names = ["a", "b", "experts"]
        group = {
            "params": [*replicated, expert],
            "names": names,
            "use_muon": True,
            "scheme": watch,
            "expert_keys": ["experts"],
        }
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
        mesh, present = world_mesh(), list[list[bool]]()

        def watch(batch: Tensor) -> Tensor:
            present.append([param.grad is not None for param in params])
            return batch

        params = [nn.Parameter(on_mesh(torch.ones(4, 6), mesh)) for _ in range(6)]
        groups = [{"params": params, "use_muon": True, "scheme": watch}]
        optimizer = Muon(groups, chunk_size=1, warmup_step=0, none_grad=none_grad)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        tasks = sorted(optimizer.plan().tasks, key=lambda task: task.param)
        own_waves = sorted(task.wave for task in tasks if task.owner == rank)
        assert len(own_waves) == 3
        assert present == [[not none_grad or task.wave > wave for task in tasks] for wave in own_waves]

    run_threads(2, main)
