"""How the ranks of a doctor tell each other where they are: by keys in the launcher's store, never by what is being checked.

A check can leave process groups broken or ranks waiting in them. The store still answers then. Each rank posts its findings, a
sign of life with its present phase, and, when the doctor is ended early, where it was. No call waits for another rank.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch.distributed as dist

from .check import Finding

Store: TypeAlias = Any
"""One of torch's stores, whose class only a private module declares."""

_RANKS_PER_POLL = 64  # with more ranks each asks less often, so that one store can serve thousands


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign of life."""

    beat: int  # how many the rank has given
    where: str  # check and phase


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks do after a check."""

    passed: bool  # no rank has a problem
    go_on: bool  # with the next check


class Board:
    """One rank's access to the common keys. Both threads of a rank use it."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._store = dist.PrefixStore("meshmuon doctor", store)  # type: ignore[attr-defined]
        self._rank = rank
        self._world = world
        self._lock = threading.Lock()  # a call is a question and its answer on one connection
        self.pause = 0.005 * max(1.0, world / _RANKS_PER_POLL)  # seconds between two questions of a loop

    # Findings: every rank posts, rank 0 reads and posts its verdict.

    def post_finding(self, check: str, finding: Finding) -> None:
        """This rank is done with ``check``."""
        self._set(f"{check}/finding {self._rank}", asdict(finding))
        with self._lock:
            self._store.add(f"{check}/done", 1)
            if finding.raised:
                self._store.add(f"{check}/raised", 1)

    def done(self, check: str) -> int:
        """How many ranks are done with ``check``."""
        return self._count(f"{check}/done")

    def raised(self, check: str) -> int:
        """How many ranks were ended by an exception in ``check``."""
        return self._count(f"{check}/raised")

    def findings(self, check: str) -> dict[int, Finding]:
        """The findings posted so far, by rank."""
        present = self._present({rank: f"{check}/finding {rank}" for rank in range(self._world)})
        return {rank: Finding(**value) for rank, value in present.items()}

    def post_verdict(self, check: str, verdict: Verdict) -> None:
        """Rank 0 has read the findings of all ranks."""
        self._set(f"{check}/verdict", asdict(verdict))

    def verdict(self, check: str) -> Verdict | None:
        """What rank 0 makes of the findings; None while that is not known."""
        value = self._get(f"{check}/verdict")
        return None if value is None else Verdict(**value)

    # Signs of life.

    def post_sign(self, sign: Sign) -> None:
        """Tells where this rank is."""
        self._set(f"sign {self._rank}", asdict(sign))

    def signs(self, ranks: Iterable[int]) -> dict[int, Sign]:
        """The last sign of each of ``ranks`` that has given one."""
        present = self._present({rank: f"sign {rank}" for rank in ranks})
        return {rank: Sign(**value) for rank, value in present.items()}

    # The end.

    def end_early(self, reason: str) -> None:
        """Asks all ranks to stop where they are."""
        self._set("end", reason)

    def ended_early(self) -> bool:
        """Whether rank 0 has asked all ranks to stop."""
        return self._get("end") is not None

    def post_last(self, where: str) -> None:
        """Where this rank was when it was ended."""
        self._set(f"last {self._rank}", where)

    def lasts(self) -> dict[int, str]:
        """Where ranks were when they were ended, for those that could still tell."""
        return self._present({rank: f"last {rank}" for rank in range(self._world)})

    def post_reported(self) -> None:
        """Rank 0 has written its report."""
        self._set("reported", True)

    def await_reported(self, seconds: float) -> bool:
        """Waits until rank 0 has written its report, so that a launcher does not end rank 0 because of this rank's exit code."""
        try:
            return self._await(lambda: self._get("reported") is not None, seconds)
        except RuntimeError:  # the store has ended together with rank 0, which therefore is done
            return True
        finally:
            self._leave()

    def await_leaving(self, seconds: float) -> None:
        """Rank 0 may host the store: it stays until the others have read that it is done."""
        self._await(lambda: self._count("left") >= self._world - 1, seconds)

    def _leave(self) -> None:
        try:
            with self._lock:
                self._store.add("left", 1)
        except RuntimeError:
            pass

    def _await(self, happened: Any, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > end:
                return False
            time.sleep(self.pause)
        return True

    def _set(self, key: str, value: Any) -> None:
        with self._lock:
            self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        with self._lock:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _present(self, keys: dict[int, str]) -> dict[int, Any]:
        """What is stored under those of the ``keys`` that exist. All at once if all do, which is the usual case."""
        with self._lock:
            if not self._store.check(list(keys.values())):
                keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
            values = self._store.multi_get(list(keys.values())) if keys else []
        return dict(zip(keys, map(json.loads, values), strict=True))

    def _count(self, key: str) -> int:
        with self._lock:
            return self._store.add(key, 0)
