"""Two optimizers that two threads of a process step: beside each other only if each has a process group of its own."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshmuon import Muon
from meshmuon.errors import OrthogonalizeError
from meshmuon.transport import groups


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """This process as one of two ranks; the other one says what this one says."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


_numbers = itertools.count()


def muon_over(group: dist.ProcessGroup, scheme: Callable[[Tensor], Tensor]) -> tuple[Muon, nn.Parameter]:
    """An optimizer over ``group``. Its mesh has a name of its own: of equal ones, torch may give the parameter
    another.
    """
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"two threads {next(_numbers)}",))
    # one expert per rank
    weight = nn.Parameter(DTensor.from_local(torch.ones(1, 3, 4), mesh, [Shard(0)], run_check=False))
    assert weight.device_mesh is mesh
    group_of_params = {"params": [weight], "names": ["experts.weight"], "use_muon": True, "expert_keys": ["experts"]}
    return Muon([group_of_params], scheme=scheme), weight


def step(optimizer: Muon, weight: nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    optimizer.step()


def assert_another_thread_can_step(optimizer: Muon, weight: nn.Parameter) -> None:
    thread = threading.Thread(target=step, args=(optimizer, weight), daemon=True)
    thread.start()
    thread.join(100)
    assert not thread.is_alive()


@pytest.mark.parametrize("own_groups", [True, False])
def test_steps_overlap_only_over_groups_of_their_own(own_groups: bool) -> None:
    inside, other_inside, seconds = threading.Event(), threading.Event(), 100.0 if own_groups else 0.3
    overlapped: list[bool] = []

    def first(matrices: Tensor) -> Tensor:
        inside.set()
        # the other one comes, or must not come before this step has ended
        overlapped.append(other_inside.wait(seconds))
        return matrices

    def second(matrices: Tensor) -> Tensor:
        other_inside.set()
        return matrices

    world = dist.group.WORLD
    assert world is not None
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])] if own_groups else [world, world]
    one = muon_over(groups[0], first)
    two = muon_over(groups[1], second)
    thread = threading.Thread(target=step, args=one, daemon=True)
    thread.start()
    assert inside.wait(100)
    step(*two)
    thread.join()
    assert overlapped == [own_groups]
    assert other_inside.is_set()


def test_a_step_that_fails_ends_its_turn() -> None:
    def fails(matrices: Tensor) -> Tensor:
        raise ValueError("no")

    world = dist.group.WORLD
    assert world is not None
    one, two = muon_over(world, fails), muon_over(world, lambda matrices: matrices)
    with pytest.raises(OrthogonalizeError, match="ValueError: no"):
        step(*one)
    assert_another_thread_can_step(*two)


def test_a_step_inside_a_step_of_the_same_optimizer_is_refused() -> None:
    """Otherwise the inner one would end the turn, or the outer one would keep it."""

    def steps(matrices: Tensor) -> Tensor:
        one[0].step()
        return matrices

    world = dist.group.WORLD
    assert world is not None
    one, two = muon_over(world, steps), muon_over(world, lambda matrices: matrices)
    with pytest.raises(OrthogonalizeError, match=r"StateError: .* inside a step of the same optimizer"):
        step(*one)
    assert_another_thread_can_step(*two)


def test_new_groups_of_two_threads_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread counts the groups when the first one's is there."""
    made = list[str]()
    threads = [threading.Thread(target=groups._new_group, args=((0, 1),), daemon=True) for _ in range(2)]

    def make(name: str, *options: Any) -> Any:
        if threading.current_thread() is threads[0]:
            threads[1].start()
            threads[1].join(0.3)  # it must wait
        made.append(name)
        return world

    world = dist.group.WORLD
    monkeypatch.setattr(groups, "new_named_group", make)
    threads[0].start()
    for thread in threads:
        thread.join(100)
    assert len(set(made)) == 2
