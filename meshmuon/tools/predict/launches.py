"""Kernel launches per rank and step, from a plan alone. Launching takes the host of a GPU most of its time.

The counts are those of the default kernels on a GPU, and equal what the step executes launch by launch: a test compares
them on every rank with a recording stand-in for a GPU. Whoever adds launches to the executor changes this module too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ...execute.program_builder import batch_keys
from ...layout import ShardedMatrix
from ...ortho import Scheme, blocks_for, pitch, polar_express, scratch_bytes
from ...ortho.remez import Quintic
from ...plan import NO_WAVE, BatchItem, PlanData, PlannedParam, Task, plan_batches

_NUMBER = r"[-+.e\d]+"
_QUINTIC = re.compile(rf"\(({_NUMBER}) ({_NUMBER}) ({_NUMBER})\)")
_OF_RULES = {"NorMuon(": 20, "MuonPlus(": 9, "MuonEq(": 11}  # launches per batch
_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 4: 36}  # of torch's operations on lists, by the number of lists
_ELEMENTS_PER_LAUNCH = 320 * 65536  # the same limit, of its blocks


@dataclass(slots=True)
class Launches:
    """What one rank launches in a step."""

    lists: int = 0  # kernels over lists of tensors: momentum, packing and unpacking, updates of the weights
    exchanges: int = 0
    products: int = 0  # of the orthogonalisation, with the norms before and the copy after
    rules: int = 0  # by update rules, with the copies of their state
    adamw: int = 0
    # (matrices, rows, cols) → number of batches
    batches: Counter[tuple[int, int, int]] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.lists + self.exchanges + self.products + self.rules + self.adamw

    def add(self, other: Launches) -> None:
        for name in ("lists", "exchanges", "products", "rules", "adamw"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.batches.update(other.batches)


class PartKind(NamedTuple):
    """Properties of a parameter that are not in a plan."""

    group: Hashable = None  # its param group, and its dtypes where those of a group differ
    flipped: bool = False  # rows are inputs


def launches_of(
    plan: PlanData,
    kinds: Sequence[PartKind] | None = None,
    *,
    averages: bool = False,
    counters: int = 0,
    batch_budget: int | None = None,
) -> dict[int, Launches]:
    """Rank → what it launches in a step of ``Muon`` or, with ``averages``, of ``DistMuon``; without AdamW.

    ``kinds`` has an entry for each part of the plan; without it, all are in one param group. ``counters`` is the number
    of stochastically rounded parameters, ``batch_budget`` the scratch bytes of a batch if they differ from the plan's
    budget.
    """
    budget = batch_budget or plan.options.budget
    return _Counter(plan, kinds or [PartKind()] * len(plan.params), budget, averages=averages).count(counters)


def adamw_launches(tensors: int, elements: int) -> int:
    """Of torch's fused kernel on the tensors of one param group, and of their step counts."""
    if not tensors:
        return 0
    of_counts = -(-tensors // _TENSORS_PER_LAUNCH[1])
    return of_counts + max(-(-tensors // _TENSORS_PER_LAUNCH[4]), -(-elements // _ELEMENTS_PER_LAUNCH))


class _Part:
    """The matrices of one parameter, as batches see them."""

    def __init__(self, planned: PlannedParam, kind: PartKind) -> None:
        sharded = planned.sharded_matrices(planned.layouts[0])[:1]
        self.rows, self.cols = (sharded[0].rows, sharded[0].cols) if sharded else (0, 0)
        self.fill_list, self.apply_list = kind.group, (kind, self.rows, self.cols)
        self.compute_dtype: torch.dtype = getattr(torch, planned.compute_dtype or "bfloat16")
        self.update_dtype = torch.float64 if "torch.float64" in str(planned.lane).rpartition(",")[2] else torch.float32
        self.scheme = _scheme(planned.how)
        self.staged = planned.staged
        self.rule = sum(count * planned.how.count(name) for name, count in _OF_RULES.items())
        self.remembers = "NorMuon(" in planned.how
        flipped = kind.flipped and self.rule > 0  # rules see outputs × inputs
        self.treatment = planned.how, planned.staged, self.update_dtype, self.compute_dtype, flipped

    def item(self, count: int, key: Hashable) -> BatchItem:
        """As ``StepParam.batch_item``."""
        size = pitch(self.rows, self.cols, self.update_dtype) * self.update_dtype.itemsize
        steps = () if self.scheme is None else self.scheme.steps
        scratch = scratch_bytes(self.rows, self.cols, steps, self.compute_dtype, self.update_dtype)
        return BatchItem(count, self.rows, self.cols, (self.treatment, key), size + scratch)

    def products(self, size: int) -> int:
        """Launches of ``iterate`` on a batch: norms, products, the copy at the end."""
        if self.scheme is None:  # code of the user: only the copy of its result is known
            return 1
        n, m = sorted((self.rows, self.cols))
        blocks = blocks_for(self.rows, self.cols, self.scheme, form="auto", dtype=self.compute_dtype)
        # Products that are not symmetric are torch's, one matrix after the other where there are gaps between matrices.
        wide = size if pitch(n, m, self.compute_dtype) != n * m else 1
        square = size if pitch(n, n, self.compute_dtype) != n * n else 1
        launches = 2
        for length in blocks:
            launches += 2 + wide + (length - 1) * (3 + square)
        copied = self.compute_dtype != self.update_dtype or len(blocks) % 2 == 0
        return launches + copied


def _scheme(how: str) -> Scheme | None:
    """The scheme of a plan's text; None if the user's code orthogonalises.

    ``"auto"`` is ``polar_express`` in the 16 bits that GPUs multiply in; rational steps count as that, too.
    """
    steps = tuple(Quintic(*map(float, step)) for step in _QUINTIC.findall(how))
    if steps:
        return Scheme("planned", steps, "a plan")
    return polar_express() if not how or how.startswith(("scheme ", "steps ")) else None


class _Counter:
    def __init__(self, plan: PlanData, kinds: Sequence[PartKind], budget: int, *, averages: bool) -> None:
        self._plan, self._budget, self._averages = plan, budget, averages
        known: dict[Hashable, _Part] = {}  # layers repeat the same few
        self._parts: list[_Part] = []
        for planned, kind in zip(plan.params, kinds, strict=True):
            key = (
                planned.layouts[0].shape,
                planned.window,
                planned.stack_dims,
                planned.how,
                planned.lane,
                planned.staged,
                kind,
            )
            if key not in known:
                known[key] = _Part(planned, kind)
            self._parts.append(known[key])
        numbers: dict[Hashable, int] = {}
        self._keys = {matrix: numbers.setdefault(key, len(numbers)) for matrix, key in batch_keys(plan).items()}
        self._seen: dict[Hashable, Launches] = {}  # what equal lists of matrices launch

    def count(self, counters: int) -> dict[int, Launches]:
        total = {rank: Launches() for rank in self._plan.ranks}
        for rank, tasks in self._local_tasks().items():
            total[rank].add(self._batches(tasks, local=True))
        owned: dict[tuple[int, int], list[Task]] = {}
        for task in self._plan.tasks:
            if task.wave != NO_WAVE:
                owned.setdefault((task.wave, task.owner), []).append(task)
        for (_, owner), tasks in owned.items():
            total[owner].add(self._batches(tasks, local=False))
        self._add_waves(total)
        self._add_rule_state(total, {owner for (_, owner), tasks in owned.items() if self._remembered(tasks)})
        for launches in total.values() if counters else ():
            launches.lists += -(-counters // _TENSORS_PER_LAUNCH[1])
        return total

    def _local_tasks(self) -> dict[int, list[Task]]:
        """Rank → the matrices that stay on it."""
        by_matrix: dict[ShardedMatrix, list[int]] = {}
        for index, task in enumerate(self._plan.tasks):
            if task.wave == NO_WAVE:
                by_matrix.setdefault(task.sharded, []).append(index)
        of_rank: dict[int, list[int]] = {}
        for sharded, indices in by_matrix.items():
            for rank in sharded.holdings:
                of_rank.setdefault(rank, []).extend(indices)
        return {rank: [self._plan.tasks[index] for index in sorted(indices)] for rank, indices in of_rank.items()}

    def _batches(self, tasks: Sequence[Task], *, local: bool) -> Launches:
        """Launches of one rank for its local matrices, or for those that it gathers in one wave."""
        matrices = tuple((id(self._parts[task.param]), self._keys[task.param, task.matrix]) for task in tasks)
        if (matrices, local) not in self._seen:
            self._seen[matrices, local] = self._new_batches(tasks, local=local)
        return self._seen[matrices, local]

    def _new_batches(self, tasks: Sequence[Task], *, local: bool) -> Launches:
        launches = Launches()
        items = [self._parts[task.param].item(1, self._keys[task.param, task.matrix]) for task in tasks]
        for batch in plan_batches(items, budget=self._budget, chunk_size=self._plan.options.chunk_size):
            parts = [self._parts[tasks[part.item].param] for part in batch.slices]
            first, fills, applies = parts[0], {part.fill_list for part in parts}, {part.apply_list for part in parts}
            launches.batches[batch.size, batch.rows, batch.cols] += 1
            launches.products += first.products(batch.size)
            launches.rules += first.rule
            if self._averages:
                others = len(self._plan.ranks) - 1
                additions = others * -(-batch.size // _TENSORS_PER_LAUNCH[2]) + -(-batch.size // _TENSORS_PER_LAUNCH[1])
                launches.lists += 1 + additions + len(fills) + len(applies) + others
            elif local:
                launches.lists += 2 if first.staged else len(fills) + len(applies)
            else:
                launches.lists += 2  # unpacking and packing
            if first.remembers and (local or self._averages):
                launches.rules += 2  # its state comes and goes
        return launches

    def _remembered(self, tasks: Sequence[Task]) -> bool:
        return any(self._parts[task.param].remembers for task in tasks)

    def _add_waves(self, total: dict[int, Launches]) -> None:
        """Exchanges of each wave, and launches of its holders: momentum before, weights after."""
        plan = self._plan
        # Wave → number of a matrix → the lists that its pieces are in, and the replica of its owner.
        lists: list[dict[int, set[tuple[Hashable, Hashable, int]]]] = [{} for _ in plan.wave_lanes]
        numbers, staged = plan.wave_owners.kinds.numbers, [False] * len(lists)
        for task in plan.tasks:
            if task.wave != NO_WAVE:
                part, replica = self._parts[task.param], task.sharded.holdings[task.owner][1]
                of_matrix = lists[task.wave].setdefault(numbers[task.sharded, plan.params[task.param].wire], set())
                of_matrix.add((part.fill_list, part.apply_list, replica))
                staged[task.wave] = part.staged
        kinds = plan.wave_owners.kinds
        for wave, of_wave in enumerate(lists):
            of_kinds = []
            for held in kinds.held:
                entries = [(piece.replica, *entry) for piece in held for entry in of_wave.get(piece.matrix, ())]
                sent = {(fill, mine == owners) for mine, fill, _, owners in entries}
                count = len(sent) + len({apply for _, _, apply, _ in entries})
                if entries and (staged[wave] or self._averages):
                    count = 2  # copies between host and device, or of gradients to the buffer and of weights from it
                of_kinds.append(count)
            for rank, launches in total.items():
                launches.lists += of_kinds[kinds.kind_of[rank]] if rank in kinds.kind_of else 0
                launches.exchanges += 2

    def _add_rule_state(self, total: dict[int, Launches], owners: set[int]) -> None:
        """The exchange of rule state: to the owners before the first wave, and back after the last."""
        if self._averages or not owners:
            return
        holders = {
            rank
            for task in self._plan.tasks
            if task.wave != NO_WAVE and self._remembered([task])
            for rank in task.sharded.holdings
        }
        for rank, launches in total.items():
            launches.exchanges += 2
            launches.rules += 2 * ((rank in holders) + (rank in owners))
