"""Batches of matrices that are whole on their rank: nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ..device import Mark, Streams
from .ortho_batch import OrthoBatch
from .rule_state import load_rule_state, store_rule_state
from .shard_views import GradientReads, ShardView, ShardViews
from .step_param import Observer, StepParam
from .wave import Stage

STAGED_IN_FLIGHT = 2
"""How many staged batches are under way: one is orthogonalised while the host works on the one before and on the next."""


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """Matrices beside their weights: momentum, orthogonalise, update."""

    ortho_batch: OrthoBatch  # where they are orthogonalised
    shard_views: ShardViews  # their place in the parameters, and their views of ``ortho_batch``
    gradient_reads: GradientReads  # the parameters whose gradients it is the first or the last to read
    rule_state: list[ShardView]  # the place of their rule state, and its views of ``ortho_batch``

    def run(self, step_params: Sequence[StepParam], idle: AbstractSet[int], observer: Observer) -> None:
        """One step of the batch, without what belongs to ``idle`` parameters."""
        if self.ortho_batch.is_idle(idle):
            return
        with observer.phase("momentum"):
            self.gradient_reads.accumulate_momentum(step_params, idle)
            self.shard_views.fill(step_params, idle)
            load_rule_state(self.rule_state, step_params, idle)
        self.gradient_reads.free_gradients(step_params)
        if not self.ortho_batch.orthogonalise(idle, observer):
            return
        with observer.phase("update"):
            self.shard_views.apply(step_params, idle)
            store_rule_state(self.rule_state, step_params, idle)


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Matrices whose weights are in host memory: they go to the device, are orthogonalised there, and come back as updates."""

    ortho_batch: OrthoBatch  # where they are orthogonalised, in memory that the batch before and the next do not share
    shard_views: ShardViews  # their place in the parameters, and their views of the host memory of ``stage``
    gradient_reads: GradientReads  # the parameters whose gradients it is the first or the last to read
    rule_state: list[ShardView]  # the place of their rule state, and its views of ``ortho_batch``
    stage: Stage  # between ``ortho_batch`` and the memory that ``shard_views`` are of

    def run(
        self, step_params: Sequence[StepParam], idle: AbstractSet[int], streams: Streams, ready: Mark, observer: Observer
    ) -> Iterator[None]:
        """One step of the batch, without what belongs to ``idle`` parameters.

        Yields when its matrices are on their way to the device, and when the device has been given them to orthogonalise: other
        batches can be copied meanwhile. ``ready`` marks what the main stream was given before the step. At least one parameter
        must not be idle.
        """
        with streams.beside(ready), observer.phase("momentum"):
            self.gradient_reads.accumulate_momentum(step_params, idle)
            self.shard_views.fill(step_params, idle)
            load_rule_state(self.rule_state, step_params, idle)
            self.stage.to_device()
            loaded = streams.side_mark()
        self.gradient_reads.free_gradients(step_params)
        yield
        streams.main_waits(loaded)
        succeeded = self.ortho_batch.orthogonalise(idle, observer)
        computed = streams.main_mark()
        yield
        if not succeeded:
            return
        with streams.beside(computed), observer.phase("update"):  # not behind the next batch, if the main stream has it by now
            self.stage.to_host()
            self.shard_views.apply(step_params, idle)
            store_rule_state(self.rule_state, step_params, idle)
