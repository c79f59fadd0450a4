"""``prepare()``: what a first step does beside stepping, before the first batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from ..errors import KeptError, MeshmuonError
from ..routing.table import is_first_of_ranks
from ..torch_compat import never_traced
from .muon_step import MuonStep, logger

_SLOW_SECONDS = 5.0  # after which a phase is shown


class PreparedStep(MuonStep):
    """A step whose costs can be paid before."""

    @never_traced
    @torch.no_grad()
    def prepare(self) -> None:
        """Does before the first batch what the first step would do beside stepping. All ranks call it, or none.

        It plans for all parameters that require a gradient; creates process groups, state and buffers; tunes and
        compiles kernels, and records CUDA graphs; and exchanges a number with every rank that this one will exchange
        pieces with. Call it once the parameters are final: after ``fully_shard``, before or after ``load_state_dict``.
        It is optional and changes no bit of any step. A second call finds everything there.

        If something fails on one rank, all ranks raise the same error, which names the phase and the rank. Nothing is
        half done: the next ``step()`` or ``prepare()`` does what is missing. Only if ranks have lost each other, that
        raises as well.
        """
        began, failure = time.monotonic(), KeptError()
        self._planner.begin(counts=False)
        self._only_prepared = self._only_prepared or not self.state
        with self._resident_state(failure):
            with self._phase("planning"):
                step = self._inspect(None, failure, only_prepares=True)
                self._agree(step)
            with self._phase("making of state, buffers and kernels"):
                self._prepare(step)
            if step.decision.prepares:
                with self._phase("warm-up exchange"):
                    self._executor.warm_up(self._planner.shared_id)
        if step.decision.prepares and is_first_of_ranks(self._groups):
            logger.info("prepare() took %.1f s", time.monotonic() - began)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Names the phase in errors, and on the first rank in the log if it takes long."""
        over, first = threading.Event(), False
        with suppress(Exception):  # param groups that have lost their parameters: the phase refuses them, on all ranks
            first = is_first_of_ranks(self._groups)
        if first:
            threading.Thread(
                target=_show_while_slow, args=(name, over), name="meshmuon: prepare()", daemon=True
            ).start()
        try:
            yield
        except Exception as error:
            failed = f"prepare() failed in its {name}"
            if isinstance(error, MeshmuonError):
                raise type(error)(f"{failed}: {error}") from error
            raise MeshmuonError(f"{failed}: {type(error).__name__}: {error}") from error
        finally:
            over.set()


def _show_while_slow(phase: str, over: threading.Event) -> None:
    """Logs that a phase is still going on: after 5, 10, 20, 40 … seconds."""
    text = "prepare() has been in its %s for %.0f s. Ranks wait there for each other, up to the timeout of their group."
    seconds = next_in = _SLOW_SECONDS
    while not over.wait(next_in):
        logger.warning(text, phase, seconds)
        next_in, seconds = seconds, 2 * seconds
