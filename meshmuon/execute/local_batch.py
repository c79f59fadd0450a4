"""Matrices that are whole on their rank: momentum, orthogonalisation and update without an exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .buffers import Stage
from .ortho_batch import OrthoBatch
from .shards import MomentumViews, ShardView, UpdateViews, load_rule_state, restore, store_rule_state
from .step_param import RunningStep

STAGED_IN_FLIGHT = 2
"""Staged batches in flight: one is orthogonalised while the host works on the one before and on the next."""


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """Matrices beside their weights: momentum, orthogonalise, update."""

    ortho_batch: OrthoBatch  # where they are orthogonalised
    momentum_views: MomentumViews  # their place in the parameters, and their views of ``ortho_batch``
    update_views: UpdateViews  # the same
    rule_state: list[ShardView]  # the place of their rule state, and its views of ``ortho_batch``
    frees: Sequence[int]  # the parameters whose gradients it is the last to read

    def run(self, step: RunningStep) -> None:
        if self.ortho_batch.is_idle(step.idle):
            return
        with step.observer.phase("momentum"):
            old_momenta = self.update_views.copy_momenta(step)
            fallible_momenta = self.momentum_views.fill(step)
            load_rule_state(self.rule_state, step)
        step.free_gradients(self.frees)
        if not self.ortho_batch.orthogonalise(step):
            restore(fallible_momenta)
            return
        with step.observer.phase("update"):
            self.update_views.apply(step, old_momenta=old_momenta)
            store_rule_state(self.rule_state, step)


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """Matrices whose weights are in host memory: a ``LocalBatch`` with a way to the device and back."""

    batch: LocalBatch  # whose views are of the host memory of ``stage``
    stage: Stage  # between that memory and the ``ortho_batch``

    def run(self, step: RunningStep) -> Iterator[None]:
        """Yields when its matrices are on their way to the device, and when the device has been given them to
        orthogonalise.

        Other batches can be copied meanwhile.
        """
        batch, streams = self.batch, step.streams
        if batch.ortho_batch.is_idle(step.idle):
            yield from (None, None)
            return
        with streams.on_side_stream(step.ready), step.observer.phase("momentum"):
            old_momenta = batch.update_views.copy_momenta(step)
            fallible_momenta = batch.momentum_views.fill(step)
            load_rule_state(batch.rule_state, step)
            if not step.only_compiles:
                self.stage.to_device()
            loaded = streams.side_mark()
        step.free_gradients(batch.frees)
        yield
        streams.main_waits(loaded)
        succeeded = batch.ortho_batch.orthogonalise(step)
        computed = streams.main_mark()
        yield
        if not succeeded:
            restore(fallible_momenta)
            return
        # Not behind the next batch, if the main stream has it by now.
        with streams.on_side_stream(computed), step.observer.phase("update"):
            if not step.only_compiles:
                self.stage.to_host()
            batch.update_views.apply(step, old_momenta=old_momenta)
            store_rule_state(batch.rule_state, step)
