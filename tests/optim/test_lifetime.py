"""An optimizer is freed with its last user: nothing waits for the garbage collector, least of all its state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshmuon import DistMuon, Muon, OrthogonalizeError
from tests.support.threads import run_threads


@pytest.fixture(autouse=True)
def no_garbage_collection(frozen_heap: None) -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Trouble:
    """A user's scheme that can be told to fail."""

    raises = False

    def __call__(self, batch: Tensor) -> Tensor:
        if self.raises:
            raise ZeroDivisionError("a user's scheme")
        return batch / 2


def give_gradients(params: list[nn.Parameter], value: float = 1.0) -> None:
    for k, param in enumerate(params):
        param.grad = torch.full_like(param, value * (k + 1)) + torch.eye(*param.shape)


def steps(optimizer: Muon, params: list[nn.Parameter], trouble: Trouble) -> None:
    give_gradients(params)
    optimizer.step()


def loaded(optimizer: Muon, params: list[nn.Parameter], trouble: Trouble) -> None:
    if isinstance(optimizer, DistMuon):
        optimizer.consolidate()
    optimizer.load_state_dict(optimizer.state_dict())
    steps(optimizer, params, trouble)


def offloaded(optimizer: Muon, params: list[nn.Parameter], trouble: Trouble) -> None:
    optimizer.turn_on_cpu_offload()
    steps(optimizer, params, trouble)


def offloaded_and_back(optimizer: Muon, params: list[nn.Parameter], trouble: Trouble) -> None:
    offloaded(optimizer, params, trouble)
    optimizer.turn_off_cpu_offload()


def hooked(optimizer: Muon, params: list[nn.Parameter], trouble: Trouble) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)
    steps(optimizer, params, trouble)


def scheme_failed(optimizer: Muon, params: list[nn.Parameter], trouble: Trouble) -> None:
    trouble.raises = True
    with suppress(OrthogonalizeError):
        steps(optimizer, params, trouble)


def refused(optimizer: Muon, params: list[nn.Parameter], trouble: Trouble) -> None:
    give_gradients(params, float("nan"))
    with suppress(Exception):
        optimizer.step()


def option_out_of_range(optimizer: Muon, params: list[nn.Parameter], trouble: Trouble) -> None:
    optimizer.param_groups[0]["lr"] = -1.0
    with suppress(Exception):
        steps(optimizer, params, trouble)


def not_prepared(optimizer: Muon, params: list[nn.Parameter], trouble: Trouble) -> None:
    added = nn.Parameter(torch.ones(3, 5))
    added.grad = torch.ones(3, 5)
    optimizer.add_param_group({"params": [("added", added)], "use_muon": True})
    optimizer.param_groups[-1]["adjust_lr_fn"] = lambda rows, cols: 1 / 0
    with suppress(Exception):
        steps(optimizer, params, trouble)


def prepared_later(optimizer: Muon, params: list[nn.Parameter], trouble: Trouble) -> None:
    optimizer.param_groups[0]["lr"] = -1.0
    with suppress(Exception):
        optimizer.prepare()
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.prepare()


LIVES = [
    steps,
    loaded,
    offloaded,
    offloaded_and_back,
    hooked,
    scheme_failed,
    refused,
    option_out_of_range,
    not_prepared,
]
LIVES.append(prepared_later)
Life = Callable[[Muon, list[nn.Parameter], Trouble], None]


def live(kind: type[Muon], life: Life, **options: Any) -> None:
    trouble = Trouble()
    params = [nn.Parameter(torch.ones(4, 3)) for _ in range(3)]
    groups = [{"params": params, "names": list("abc"), "use_muon": True, "rule": "normuon"}]
    optimizer = kind(groups, scheme=trouble, nonfinite="raise", **options)
    steps(optimizer, params, trouble)
    steps(optimizer, params, trouble)
    life(optimizer, params, trouble)
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    seen = [weakref.ref(optimizer), *map(weakref.ref, values)]
    assert values
    del optimizer, values
    alive = [one() for one in seen if one() is not None]
    assert not alive, [type(one).__name__ for one in alive]


@pytest.mark.parametrize("kind", [Muon, DistMuon])
@pytest.mark.parametrize("life", LIVES)
def test_state_is_freed_with_the_optimizer(kind: type[Muon], life: Life) -> None:
    live(kind, life)


@pytest.mark.parametrize("kind", [Muon, DistMuon])
@pytest.mark.parametrize("life", [one for one in LIVES if one is not not_prepared])
def test_state_is_freed_on_every_rank(kind: type[Muon], life: Life) -> None:
    def main(rank: int) -> None:
        live(kind, life, **{"group" if kind is DistMuon else "replica_group": dist.group.WORLD})
        dist.barrier()

    run_threads(2, main)


def test_a_model_that_is_clipped() -> None:
    """The clip keeps tensors of its own, by device; none of them leads back to the optimizer."""
    params = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    named = list(zip(("layers.0.wq.weight", "layers.0.wk.weight"), params, strict=True))
    optimizer = Muon([{"params": named, "use_muon": True}], clip_config={"head_dim": 2, "threshold": 1.0})
    give_gradients(params)
    optimizer.step(qk_logits={0: torch.tensor([3.0, 4.0])})
    seen = weakref.ref(optimizer.state[params[0]]["momentum_buffer"])
    del optimizer
    assert seen() is None
