"""Random sequences of what can happen between steps, on a few ranks, beside one device that lives through the same.

After every event the parameters have the bits of one device, or all ranks have raised the same error and nothing has
changed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from meshmuon import Muon
from meshmuon.errors import MeshmuonError
from tests.support.small_model import S0, S1, R, assert_equal, on_mesh, world_mesh
from tests.support.tensors import assert_untouched, everything, seeded
from tests.support.threads import run_threads

SEQUENCES, CHUNKS, EVENTS = 120, 8, 8
SIDES = (3, 4, 5, 6, 7, 8)


def third(batch: Tensor) -> Tensor:
    """A scheme of a user."""
    return batch / 3


@dataclass(frozen=True)
class Slot:
    """A parameter of the model."""

    name: str
    shape: tuple[int, ...]
    placement: Any
    seed: int

    @property
    def muon(self) -> bool:
        return len(self.shape) == 2

    @property
    def cut(self) -> bool:
        return self.placement is not R


@dataclass
class Run:
    """One life of the model: on a rank, or whole."""

    mesh: DeviceMesh | None
    divided: bool
    slots: list[Slot] = field(default_factory=list)
    params: list[nn.Parameter] = field(default_factory=list)
    optimizer: Muon | None = None

    def value(self, slot: Slot, value: Tensor) -> Tensor:
        return value if self.divided else on_mesh(value, self.mesh, slot.placement)

    def add(self, slots: list[Slot], options: dict[str, Any]) -> None:
        params = [nn.Parameter(self.value(slot, seeded(slot.shape, slot.seed))) for slot in slots]
        groups = [
            {"params": chosen, "use_muon": use_muon}
            for use_muon in (True, False)
            if (chosen := [(s.name, p) for s, p in zip(slots, params, strict=True) if s.muon is use_muon])
        ]
        self.slots += slots
        self.params += params
        if self.optimizer is None:
            where = {"replica_group": dist.group.WORLD} if self.divided and self.mesh is not None else {}
            self.optimizer = Muon(groups, lr=0.01, allow_inactive=True, **options, **where)
        else:
            for group in groups:
                self.optimizer.add_param_group(group)

    def give_gradients(self, seed: int) -> None:
        for k, (slot, param) in enumerate(zip(self.slots, self.params, strict=True)):
            param.grad = self.value(slot, seeded(slot.shape, 7919 * seed + k)) if param.requires_grad else None


class Pair:
    """A rank and, in the same thread, one device. What both do comes from one random sequence that all ranks share."""

    def __init__(self, seed: int, world: int, mesh: DeviceMesh) -> None:
        self.random, self.rank, self.world, self.seed = random.Random(seed), dist.get_rank(), world, 1000 * seed
        self.divided = self.random.random() < 0.3
        self.mine, self.whole = Run(mesh, self.divided), Run(None, self.divided)
        self.sides = [(a, b) for a in SIDES for b in SIDES]
        self.random.shuffle(self.sides)
        options = {
            "scheme": third,
            "nonfinite": "skip",
            "replicas": "share",
            "warmup_step": self.random.choice((0, 1, 5)),
            "chunk_size": self.random.choice((-1, 1)),
            "none_grad": self.random.random() < 0.5,
        }
        slots = self.new_slots(4)
        self.both(lambda run: run.add(slots, options))

    def both(self, act: Callable[[Run], None]) -> None:
        act(self.mine)
        act(self.whole)

    def number(self) -> int:
        self.seed += 1
        return self.seed

    def new_slots(self, count: int) -> list[Slot]:
        slots = []
        for _ in range(count):
            placement = R if self.divided else self.random.choice((S0, S0, S1, R))
            shape: tuple[int, ...] = self.sides.pop()
            if self.random.random() < 0.3:
                shape, placement = shape[:1], R if placement is S1 else placement
            number = self.number()
            slots.append(Slot(f"p{number}", shape, placement, number))
        return slots

    def step(self) -> str | None:
        """The error that this rank gets, which must leave no trace; the other life does not step then."""
        assert self.mine.optimizer is not None
        before = everything(self.mine.optimizer)
        try:
            self.mine.optimizer.step()
        except MeshmuonError as error:
            assert_untouched(self.mine.optimizer, before)
            return f"{type(error).__name__}: {error}"
        return None

    def step_both(self) -> None:
        assert self.step() is None
        assert self.whole.optimizer is not None
        self.whole.optimizer.step()

    def trainable(self) -> list[int]:
        return [k for k, param in enumerate(self.mine.params) if param.requires_grad]

    # Events. Each returns the error that was raised, or None.

    def good_step(self) -> None:
        number = self.number()
        self.both(lambda run: run.give_gradients(number))
        self.step_both()

    def some_gradients(self) -> None:
        number, without_gradient = self.number(), self.random.sample(range(len(self.mine.params)), 2)

        def act(run: Run) -> None:
            run.give_gradients(number)
            for k in without_gradient:
                run.params[k].grad = None

        self.both(act)
        self.step_both()

    def gradient_on_some_ranks(self) -> str | None:
        """Zeros where it is missing; refused where another rank holds the same elements."""
        number, without_gradient = self.number(), self.random.randrange(self.world)
        self.both(lambda run: run.give_gradients(number))
        chosen = self.trainable()
        if not chosen:
            return None
        k = self.random.choice(chosen)
        slot, full = self.mine.slots[k], self.whole.params[k].grad
        assert full is not None
        if self.rank == without_gradient:
            self.mine.params[k].grad = None
        if not slot.cut:
            text = self.step()
            assert text is not None, "replicas parted in silence"
            assert f"{slot.name} has a gradient on rank" in text
            return text
        chunks = list(full.chunk(self.world, slot.placement.dim))
        if without_gradient < len(chunks):
            chunks[without_gradient].zero_()
        self.step_both()
        return None

    def freeze(self) -> None:
        k, frozen = self.random.randrange(len(self.mine.params)), self.random.random() < 0.6
        self.both(lambda run: run.params[k].requires_grad_(not frozen))

    def add_group(self) -> None:
        slots = self.new_slots(self.random.choice((1, 2)))
        self.both(lambda run: run.add(slots, {}))

    def add_group_on_one_rank(self) -> str | None:
        """Refused until the others have it too."""
        slots, first, number = self.new_slots(1), self.random.randrange(self.world), self.number()
        self.mine.give_gradients(number)
        if self.rank == first:
            self.mine.add(slots, {})
            self.mine.give_gradients(number)
        text = self.step()
        assert text is not None, "a group on one rank went unnoticed"
        assert f"{slots[0].name}: rank {first} has it" in text or f"rank {first} does" in text, text
        if self.rank != first:
            self.mine.add(slots, {})
        self.whole.add(slots, {})
        return text

    def other_numbers(self) -> None:
        changed = {"lr": self.random.choice((0.005, 0.01)), "momentum": self.random.choice((0.0, 0.9))}
        changed["weight_decay"] = self.random.choice((0.0, 0.2))
        self.both(lambda run: [group.update(changed) for group in run.optimizer.param_groups] and None)

    def other_numbers_on_one_rank(self) -> str | None:
        odd, number = self.random.randrange(self.world), self.number()
        self.mine.give_gradients(number)
        assert self.mine.optimizer is not None
        group = self.mine.optimizer.param_groups[0]
        kept = group["lr"]
        if self.rank == odd:
            group["lr"] = self.random.choice((kept * 2, -1.0))
        else:
            self.random.choice((0, 1))  # the sequence stays the same on all ranks
        text = self.step()
        group["lr"] = kept
        assert text is not None, "another lr on one rank went unnoticed"
        return text

    def save_and_load(self) -> None:
        anew = self.random.random() < 0.5

        def act(run: Run) -> None:
            assert run.optimizer is not None
            saved = copy.deepcopy(run.optimizer.state_dict())
            if anew:
                keys = ("params", "param_names", "use_muon", "scheme")
                own = [{key: group[key] for key in keys} for group in run.optimizer.param_groups]
                where = {"replica_group": dist.group.WORLD} if run.divided and run.mesh is not None else {}
                run.optimizer = Muon(
                    own, scheme=third, nonfinite="skip", replicas="share", allow_inactive=True, **where
                )
            run.optimizer.load_state_dict(saved)

        self.both(act)

    def offload(self) -> None:
        on = self.random.random() < 0.5
        self.both(lambda run: run.optimizer.turn_on_cpu_offload() if on else run.optimizer.turn_off_cpu_offload())

    def not_finite(self) -> None:
        """Skipped on all ranks, as on one device."""
        number, odd, chosen = self.number(), self.random.randrange(self.world), self.trainable()
        self.both(lambda run: run.give_gradients(number))
        if not chosen:
            return
        k = self.random.choice(chosen)
        if self.rank == odd:
            self.mine.params[k].grad = torch.full_like(self.mine.params[k], float("inf"))
        if self.mine.slots[k].cut and odd >= len(
            self.whole.params[k].grad.chunk(self.world, self.mine.slots[k].placement.dim)
        ):
            self.step_both()  # that rank holds nothing of it
            return
        self.whole.params[k].grad = torch.full_like(self.whole.params[k], float("nan"))
        skipped = self.whole.optimizer.skipped_steps
        self.step_both()
        assert self.whole.optimizer.skipped_steps == skipped + 1

    def bad_gradient(self) -> str | None:
        number, odd, chosen = self.number(), self.random.randrange(self.world), self.trainable()
        self.mine.give_gradients(number)
        if not chosen:
            return None
        param = self.mine.params[self.random.choice(chosen)]
        if self.rank == odd:
            spoilt = torch.ones(param.shape)
            if isinstance(param, DTensor):
                param.grad = DTensor.from_local(spoilt, param.device_mesh, [Partial()], run_check=False)
            else:
                param.grad = spoilt.to_sparse()
        text = self.step()
        assert text is not None, "a bad gradient went unnoticed"
        assert f"rank {odd}: " in text, text
        for one in self.mine.params:
            one.grad = None
        return text

    def other_data(self) -> None:
        k, number = self.random.randrange(len(self.mine.params)), self.number()

        def act(run: Run) -> None:
            param, slot = run.params[k], run.slots[k]
            value = run.value(slot, seeded(slot.shape, number))
            trains = param.requires_grad
            param.grad = None
            if isinstance(param, DTensor):
                torch.utils.swap_tensors(param, nn.Parameter(value, requires_grad=trains))
            else:
                param.data = value

        self.both(act)


KINDS: dict[str, int] = {
    "good_step": 4,
    "some_gradients": 2,
    "gradient_on_some_ranks": 2,
    "freeze": 2,
    "add_group": 1,
    "add_group_on_one_rank": 1,
    "other_numbers": 1,
    "other_numbers_on_one_rank": 1,
    "save_and_load": 1,
    "offload": 1,
    "not_finite": 1,
    "bad_gradient": 1,
    "other_data": 1,
}


def live(kinds: Sequence[str], seed: int, world: int) -> list[str | None]:
    """One sequence on this rank; what each event has raised."""
    pair = Pair(seed, world, world_mesh())
    said: list[str | None] = []
    for k, kind in enumerate((*kinds, "good_step")):
        try:
            said.append(getattr(pair, kind)())
            assert_equal(pair.mine.params, [param.detach() for param in pair.whole.params])
        except Exception as error:
            raise AssertionError(f"rank {pair.rank} of {world}, event {k} ({kind}): {error!r}") from error
    return said


EVENTS_OF_A_SEQUENCE = st.lists(
    st.sampled_from([kind for kind, weight in KINDS.items() for _ in range(weight)]), max_size=EVENTS
)


@pytest.mark.parametrize("chunk", range(CHUNKS))
@settings(max_examples=SEQUENCES // CHUNKS, deadline=None, database=None, phases=[Phase.generate, Phase.shrink])
@given(kinds=EVENTS_OF_A_SEQUENCE, seed=st.integers(0, 10**6), world=st.integers(2, 4))
def test_random_events(chunk: int, kinds: list[str], seed: int, world: int) -> None:
    """Hypothesis finds the events and, where one fails, the shortest sequence that still does."""
    texts = run_threads(world, lambda rank: live(kinds, seed, world))
    assert all(one == texts[0] for one in texts), f"ranks have raised different errors: {texts}"
