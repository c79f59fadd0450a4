"""A rule's numbers per output: they live with the parameter's shards and visit the owner of the matrix during a step.

One small exchange before the first wave brings them to the owners, one after the last takes them home. They lie on the mesh as
the parameter does, with one element along the inputs: whoever holds the first input of an output holds its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..layout import Layout, Piece, Ranges, length
from ..plan import NO_WAVE, Plan, PlannedParam, Task
from ..transport import Exchange, Pending
from .shard_views import ShardView, grouped
from .step_param import StepParam, local_part
from .wave import CopyPairs, ExchangeBuffers

__all__ = ["RuleStateExchange", "load_rule_state", "rule_state_exchanges", "rule_state_param", "store_rule_state"]


@dataclass(slots=True)
class RuleStateExchange:
    """The visits of one rank.

    Attributes:
        leaving: the rank's own numbers and where they are put to go to the owners.
        fetch: the way to the owners.
        unpack: from what has arrived to the owned matrices' memory.
        pack: from there to what goes back.
        give: the way home.
        returned: the rank's own numbers and where they arrive.
    """

    leaving: list[ShardView]
    fetch: ExchangeBuffers
    unpack: CopyPairs
    pack: CopyPairs
    give: ExchangeBuffers
    returned: list[ShardView]
    _pending: Pending | None = None

    def start(self, step_params: Sequence[StepParam], exchange: Exchange) -> None:
        """Sends the numbers to the owners."""
        load_rule_state(self.leaving, step_params)
        self._pending = self.fetch.start(exchange, "gather")

    def arrive(self) -> None:
        """Puts them where the owned matrices are."""
        assert self._pending is not None
        self._pending.wait()
        self.unpack.run()

    def leave(self, exchange: Exchange) -> None:
        """Sends them home."""
        self.pack.run()
        self._pending = self.give.start(exchange, "scatter")

    def settle(self, step_params: Sequence[StepParam]) -> None:
        """Puts them back where they live."""
        assert self._pending is not None
        self._pending.wait()
        store_rule_state(self.returned, step_params)


def load_rule_state(parts: Sequence[ShardView], step_params: Sequence[StepParam]) -> None:
    """Copies parts of the numbers' tensors into the parts' views."""
    CopyPairs([part.view for part in parts], [part.of(_memory(step_params[part.param_index])) for part in parts]).run()


def store_rule_state(parts: Sequence[ShardView], step_params: Sequence[StepParam]) -> None:
    """Copies the parts' views into the numbers' tensors, except where nothing may change."""
    for part in parts:
        target, skip_mask = part.of(_memory(step_params[part.param_index])), step_params[part.param_index].settings.skip_mask
        target.copy_(part.view if skip_mask is None else torch.where(skip_mask, target, part.view))


def _memory(step_params: StepParam) -> Tensor:
    assert step_params.rule_state is not None
    return local_part(step_params.rule_state)


def rule_state_param(entry: PlannedParam, step_params: StepParam) -> PlannedParam:
    """The rule's numbers of a parameter as an entry of their own, laid out alike."""
    shape = step_params.matrices.memory_shape(entry.layouts[0].shape)
    layouts = tuple(Layout(shape, layout.mesh, layout.placements) for layout in entry.layouts)
    return replace(entry, layouts=layouts, window=step_params.matrices.memory_window)


@dataclass(frozen=True, slots=True)
class _Visit:
    """Numbers of a matrix's outputs, in ``ranges`` of them, that a holder exchanges with the owner."""

    task: int
    holder: int
    owner: int
    ranges: Ranges
    fetched: bool  # whether this holder sends them; other replicas only receive

    @property
    def size(self) -> int:
        return length(self.ranges)


def rule_state_exchanges(
    plan: Plan,
    rank: int,
    step_params: Sequence[StepParam],
    exchange: Exchange | None,
    kept: Mapping[int, Tensor],
    part_of: Callable[[int, Tensor], ShardView],
) -> list[RuleStateExchange]:
    """The visits of ``rank``, one set per device and dtype, in an order that is the same on every rank.

    Args:
        plan: the plan.
        rank: this rank.
        work: the parameters of the plan's entries.
        exchange: how they travel.
        kept: for each task that this rank owns in a wave, where its numbers are during a step.
        part_of: this rank's numbers of a task, with a view of a buffer for them.
    """
    if exchange is None:
        return []
    tasks = [t for t, task in enumerate(plan.tasks) if task.wave != NO_WAVE and step_params[task.param].rule_state is not None]
    found = []
    for _, some in grouped(tasks, lambda t: _lane(step_params[plan.tasks[t].param])):
        visits = [visit for t in some for visit in _visits(plan, t, step_params) if rank in (visit.holder, visit.owner)]
        visits.sort(key=lambda one: (one.holder, one.owner, one.task, one.ranges))
        like = step_params[plan.tasks[some[0]].param]
        found.append(_Builder(rank, visits, like, exchange, kept, part_of).build())
    return found


def _lane(step_params: StepParam) -> tuple[str, torch.dtype]:
    return step_params.param.device.type, step_params.update_dtype


def _visits(plan: Plan, index: int, step_params: Sequence[StepParam]) -> Iterator[_Visit]:
    task = plan.tasks[index]
    entry, flipped = rule_state_param(plan.params[task.param], step_params[task.param]), step_params[task.param].matrices.flipped
    for piece in _pieces(task, entry):
        holders = [
            rank for rank in piece.holders if rank in task.sharded.piece_and_replica
        ]  # of the replicas that the task is for
        source = task.owner if task.owner in holders else holders[0]
        for holder in holders:
            yield _Visit(index, holder, task.owner, piece.cols if flipped else piece.rows, holder == source)


def _pieces(task: Task, entry: PlannedParam) -> Sequence[Piece]:
    layout = next(one for one in entry.layouts if task.owner in one.mesh.ranks)
    return entry.sharded_matrices(layout)[task.matrix].pieces


class _Builder:
    def __init__(
        self,
        rank: int,
        visits: Sequence[_Visit],
        like: StepParam,
        exchange: Exchange,
        kept: Mapping[int, Tensor],
        part_of: Callable[[int, Tensor], ShardView],
    ) -> None:
        self.rank, self.like, self.exchange, self.kept, self.part_of = rank, like, exchange, kept, part_of
        mine = [one for one in visits if one.owner != rank]
        theirs = [one for one in visits if one.holder != rank]
        self.own = [one for one in visits if one.owner == one.holder]
        self.fetched_out, self.fetched_in = [one for one in mine if one.fetched], [one for one in theirs if one.fetched]
        self.given_out, self.given_in = theirs, mine

    def build(self) -> RuleStateExchange:
        out, inward = self._buffer(self.fetched_out), self._buffer(self.fetched_in)
        back_out, back_in = self._buffer(self.given_out), self._buffer(self.given_in)
        own = self._buffer(self.own)
        unpack, pack = CopyPairs([], []), CopyPairs([], [])
        for visits, buffer in ((self.fetched_in, inward), (self.own, own)):
            self._add(unpack.target, unpack.source, visits, buffer)
        for visits, buffer in ((self.given_out, back_out), (self.own, own)):
            self._add(pack.source, pack.target, visits, buffer)
        return RuleStateExchange(
            leaving=[*self._parts(self.fetched_out, out), *self._parts(self.own, own)],
            fetch=self._flow(inward, self.fetched_in, out, self.fetched_out),
            unpack=unpack,
            pack=pack,
            give=self._flow(back_in, self.given_in, back_out, self.given_out),
            returned=[*self._parts(self.given_in, back_in), *self._parts(self.own, own)],
        )

    def _buffer(self, visits: Sequence[_Visit]) -> Tensor:
        size = sum(visit.size for visit in visits)
        return torch.zeros(size, dtype=self.like.update_dtype, device=self.like.param.device)

    def _parts(self, visits: Sequence[_Visit], buffer: Tensor) -> list[ShardView]:
        views = torch.split(buffer, [visit.size for visit in visits])
        return [self.part_of(visit.task, view) for visit, view in zip(visits, views, strict=True)]

    def _add(self, kept: list[Tensor], flat: list[Tensor], visits: Sequence[_Visit], buffer: Tensor) -> None:
        """Views of the owned matrices' memory and of a buffer, range by range."""
        for visit, view in zip(visits, torch.split(buffer, [visit.size for visit in visits]), strict=True):
            kept.extend(self.kept[visit.task][start:stop] for start, stop in visit.ranges)
            flat.extend(torch.split(view, [stop - start for start, stop in visit.ranges]))

    def _flow(self, received: Tensor, comes: Sequence[_Visit], sent: Tensor, goes: Sequence[_Visit]) -> ExchangeBuffers:
        return ExchangeBuffers(received, self._splits(comes), sent, self._splits(goes))

    def _splits(self, visits: Sequence[_Visit]) -> list[int]:
        """Elements per other rank."""
        counts: dict[int, int] = {}
        for visit in visits:
            other = visit.owner if visit.holder == self.rank else visit.holder
            counts[other] = counts.get(other, 0) + visit.size
        return self.exchange.splits(counts)
