"""DistMuon: ranks with gradients of their own end with the weights that one device finds from their average, bit
for bit.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from meshmuon import ConfigError, DistMuon, Interleaved, MeshmuonError, Muon, StateError, UnsupportedError
from meshmuon.execute import DataParallelExecutor
from meshmuon.transport import Exchange
from meshmuon.transport.exchange import Pending
from tests.support.counting import counted
from tests.support.tensors import same
from tests.support.threads import run_threads

_Muon = TypeVar("_Muon", bound=Muon)
STEPS = 4
SHAPES = [(6, 4), (4, 9), (6, 4), (5, 5), (1, 7), (7, 1), (3, 4, 5), (8, 3), (12, 4)]
NAMES = ["a", "b", "c", "d", "e", "f", "experts.g", "qkv", "gate_up"]
SPLITS = {"qkv": (5, 3), "gate_up": Interleaved((1, 2), 4)}


def seeded(shape: tuple[int, ...], *seed: int) -> Tensor:
    number = 0
    for one in seed:
        number = 1000 * number + one + 1
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def build(kind: type[_Muon], shapes: list[tuple[int, ...]], **options: Any) -> tuple[list[nn.Parameter], _Muon]:
    params = [nn.Parameter(seeded(shape, 9, k)) for k, shape in enumerate(shapes)]
    split = {"split": lambda name, shape: SPLITS.get(name), "expert_keys": ["experts"]}
    group = {"params": params, "names": NAMES[: len(params)], "use_muon": True}
    return params, kind([group], lr=0.02, **split, **options)


def average(grads: list[Tensor]) -> Tensor:
    total = grads[0].clone()
    for grad in grads[1:]:
        total += grad
    return total / len(grads)


Has = Callable[[int, int], bool]  # (step, parameter): whether it has a gradient then


def usually(step: int, k: int) -> bool:
    return (step, k) not in {(1, 0), (2, 3)}


def give(params: list[nn.Parameter], step: int, rank: int, has: Has = usually) -> None:
    """The gradients of one rank."""
    for k, param in enumerate(params):
        param.grad = seeded(tuple(param.shape), step, k, rank) if has(step, k) else None


def one_device(
    world: int, shapes: list[tuple[int, ...]] = SHAPES, steps: Iterable[int] = range(STEPS), has: Has = usually
) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and momenta of ``Muon`` on averaged gradients."""
    params, optimizer = build(Muon, shapes, adjust_lr_fn="original", weight_decay=0.0)
    for step in steps:
        for k, param in enumerate(params):
            averaged = average([seeded(shapes[k], step, k, rank) for rank in range(world)])
            param.grad = averaged if has(step, k) else None
        optimizer.step()
    return [p.detach().clone() for p in params], [optimizer.state[p]["momentum_buffer"].clone() for p in params]


def check(optimizer: DistMuon, params: list[nn.Parameter], expected: tuple[list[Tensor], list[Tensor]]) -> None:
    """Demands the weights and momenta of one device."""
    optimizer.consolidate()
    for k, (param, weight, momentum) in enumerate(zip(params, *expected, strict=True)):
        same(param.detach(), weight, f"parameter {k}")
        same(optimizer.state[param]["momentum_buffer"], momentum, f"momentum {k}")


@pytest.mark.parametrize("world", [1, 2, 11])
def test_equals_one_device_on_averaged_gradients(world: int) -> None:
    """With the defaults of DistMuon, and momentum on owners only; ``test_cases.py`` draws the rest. One rank needs
    no group.
    """
    expected = one_device(world)

    def main(rank: int) -> None:
        params, optimizer = build(DistMuon, SHAPES)
        for step in range(STEPS):
            give(params, step, rank)
            optimizer.step()
        owned = {task.param for task in optimizer.plan().tasks if task.owner == rank}
        kept = {k for k, param in enumerate(params) if "momentum_buffer" in optimizer.state[param]}
        assert world == 1 or len(kept) <= len(owned) + 1  # the two parts of qkv are one parameter
        check(optimizer, params, expected)

    if world == 1:
        main(0)
    else:
        run_threads(world, main)


def test_a_matrix_is_orthogonalised_once_and_bytes_are_those_of_an_all_reduce() -> None:
    shapes = [(8, 8)] * 8
    world = 4

    def main(rank: int) -> None:
        params, optimizer = build(DistMuon, shapes)
        give(params, 0, rank)
        optimizer.step()
        plan = optimizer.plan()
        assert len({(task.param, task.matrix) for task in plan.tasks}) == len(plan.tasks) == 9  # qkv is two
        assert max(Counter(task.owner for task in plan.tasks).values()) <= 3

    with counted() as wire:
        run_threads(world, main)
    elements = sum(rows * cols for rows, cols in shapes)
    assert sum(wire.elements.values()) == 2 * (world - 1) * elements  # 2 (W − 1)/W of the parameters per rank


def test_bare_matrices_and_adamw_groups() -> None:
    """Replicas stay equal; AdamW's parameters step on the averaged gradient."""

    def main(rank: int) -> list[Tensor]:
        matrix, bias = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))
        bare = DistMuon([nn.Parameter(torch.ones(4, 3))])
        assert bare.param_groups[0]["lr"] == 0.02
        groups = [{"params": [matrix], "use_muon": True}, {"params": [bias], "use_muon": False, "lr": 1e-3}]
        optimizer = DistMuon(groups)
        matrix.grad, bias.grad = seeded((4, 3), rank), seeded((3,), rank)
        before = bias.grad.clone()
        optimizer.step()
        same(bias.grad, before, "gradient")
        return [matrix.detach(), bias.detach()]

    first, second = run_threads(2, main)
    for one, other in zip(first, second, strict=True):
        same(one, other, "replica")
    bias = nn.Parameter(torch.ones(3))
    adamw = torch.optim.AdamW([bias], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    bias.grad = average([seeded((3,), 0), seeded((3,), 1)])
    adamw.step()
    same(first[1], bias.detach(), "AdamW")


def test_dtensors_are_refused() -> None:
    def main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        param = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Replicate()], src_data_rank=None))
        with pytest.raises(UnsupportedError, match=r"is a DTensor.*use Muon"):
            DistMuon([param])
        dist.barrier()

    run_threads(2, main)


def test_groups_may_change_their_order_and_momentum_its_dtype() -> None:
    expected = one_device(2, SHAPES[:3])

    def main(rank: int) -> None:
        params, _ = build(DistMuon, SHAPES[:3])
        optimizer = DistMuon(
            [{"params": [p], "names": [str(k)], "use_muon": True} for k, p in enumerate(params)], lr=0.02
        )
        for step in range(STEPS):
            give(params, step, rank)
            optimizer.step()
            if step == 1:
                optimizer.param_groups.reverse()
                for group in optimizer.param_groups:
                    group["momentum_dtype"] = torch.bfloat16  # for new buffers only
        check(optimizer, params, expected)

    run_threads(2, main)


@pytest.mark.parametrize(
    "option", [{"replicas": "repeat"}, {"comm_dtype": torch.bfloat16}, {"use_distributed_muon": True}], ids=str
)
def test_options_without_meaning_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has no meaning for DistMuon"):
        DistMuon([nn.Parameter(torch.ones(4, 3))], **option)


def test_a_copy_must_be_given_a_group() -> None:
    def main(rank: int) -> None:
        param = nn.Parameter(torch.ones(4, 3))
        copied = copy.deepcopy(DistMuon([param]))
        (mine,) = copied.param_groups[0]["params"]
        mine.grad = torch.ones(4, 3)
        with pytest.raises(UnsupportedError, match="has no process group"):
            copied.step()
        copied.replica_group = dist.group.WORLD
        copied.step()

    run_threads(2, main)


def test_all_gradients_are_on_their_way_before_the_first_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events: dict[int, list[str]] = {0: [], 1: []}
    start, wait = Exchange.start, Pending.wait

    def noted_start(self: Exchange, *args: Any, phase: str) -> Pending:
        events[dist.get_rank()].append(f"start {phase}")
        return start(self, *args, phase=phase)

    def noted_wait(self: Pending) -> None:
        events[dist.get_rank()].append(f"wait {self.phase}")
        wait(self)

    monkeypatch.setattr(Exchange, "start", noted_start)
    monkeypatch.setattr(Pending, "wait", noted_wait)

    def main(rank: int) -> None:
        params, optimizer = build(DistMuon, [(6, 4)] * 7, chunk_size=1)
        give(params, 0, rank)
        optimizer.step()

    run_threads(2, main)
    for found in events.values():
        assert found[:7] == ["start gather"] * 7
        assert found.count("wait gather") == 7


def test_a_state_that_lacks_what_others_own_is_not_saved() -> None:
    def main(rank: int) -> None:
        params, optimizer = build(DistMuon, SHAPES[:4])
        assert optimizer.state_dict()["state"] == {}  # nothing is missing before the first step
        give(params, 0, rank)
        optimizer.step()
        with pytest.raises(StateError, match="consolidate"):
            optimizer.state_dict()
        optimizer.consolidate()
        assert len(optimizer.state_dict()["state"]) == 4
        optimizer.zero_grad()
        optimizer.step()  # without any gradient: all momentum stays where it is
        assert len(optimizer.state_dict()["state"]) == 4

    run_threads(2, main)


def test_a_copy_that_lacks_what_others_own_neither_steps_nor_saves() -> None:
    """It would begin anew what other ranks have kept."""

    def main(rank: int) -> None:
        params, optimizer = build(DistMuon, SHAPES[:4])
        give(params, 0, rank)
        optimizer.step()
        twin = copy.deepcopy(optimizer)
        twin.replica_group = dist.group.WORLD
        twin.zero_grad()
        for act in (twin.step, twin.state_dict):
            with pytest.raises(StateError, match="consolidate"):
                act()
        assert sum("momentum_buffer" in state for state in twin.state.values()) < 4

    run_threads(2, main)


def test_momentum_survives_a_step_that_could_not_be_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step after it has other gradients and other owners, who must find the momentum that they did not have."""
    shapes = [(9, 8), (8, 8), (8, 7), (7, 7), (6, 7), (20, 20)]  # the last one moves all others
    given = [{0, 1, 2, 3}, {0, 1, 2, 3, 4}, {1, 2, 3, 4, 5}]  # the second step fails
    prepare, fails = DataParallelExecutor.prepare, [False, False]

    def short_of_memory(self: DataParallelExecutor, plan: Any, rank: int, work: Any, exchange: Any) -> None:
        if fails[rank]:
            self.plan = None
            raise MemoryError("no room for buffers")
        prepare(self, plan, rank, work, exchange)

    monkeypatch.setattr(DataParallelExecutor, "prepare", short_of_memory)
    expected = one_device(2, shapes, (0, 2), lambda step, k: k in given[step])

    def main(rank: int) -> list[dict[int, int]]:
        params, optimizer = build(DistMuon, shapes)
        owners = []
        for step in range(3):
            give(params, step, rank, lambda step, k: k in given[step])
            fails[rank] = step == 1
            if step == 1:
                with pytest.raises((MeshmuonError, MemoryError)):
                    optimizer.step()
                continue
            optimizer.step()
            owners.append(
                {k: task.owner for k, task in zip(sorted(given[0] | given[step]), optimizer.plan().tasks, strict=True)}
            )
        check(optimizer, params, expected)
        return owners

    before, after = run_threads(2, main)[0]
    assert any(before[k] != after[k] for k in before.keys() & after.keys()), (
        "no owner changes, and the test shows nothing"
    )


@pytest.mark.parametrize("none_grad", [True, False])
def test_gradients_are_freed_only_where_asked(none_grad: bool) -> None:
    def main(rank: int) -> None:
        params, optimizer = build(DistMuon, SHAPES[:3], none_grad=none_grad)
        give(params, 0, rank)
        optimizer.step()
        assert all((param.grad is None) is none_grad for param in params)

    run_threads(2, main)


def test_momentum_that_its_owner_has_lost_is_missed() -> None:
    """Only the owner has it, so that no other rank could notice; all refuse the step."""

    def on_rank(rank: int) -> tuple[bool, str]:
        params = [nn.Parameter(torch.eye(6, 4) + k) for k in range(3)]
        optimizer = DistMuon(params, lr=0.01)
        for step in range(3):
            owns = "momentum_buffer" in optimizer.state.get(params[0], {})
            if step == 2 and owns:
                del optimizer.state[params[0]]["momentum_buffer"]
            for param in params:
                param.grad = torch.ones_like(param) + step
            if step < 2:
                optimizer.step()
        with pytest.raises(
            StateError, match=r"group0\.param0 has no state on rank .* and would restart there from zero"
        ) as caught:
            optimizer.step()
        return owns, str(caught.value)

    (first, text), (second, other_text) = run_threads(2, on_rank)
    assert first != second
    assert text == other_text
