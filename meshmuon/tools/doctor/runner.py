"""Runs each check in a separate thread and watches it from the main thread, so that a hang ends in a report.

Ranks tell each other where they are by keys in the launcher's store, never by what is being checked: a check can leave
process groups broken or ranks waiting in them, and the store still answers. Each rank posts one ``Finding`` per check.
Rank 0 waits for those of all ranks and posts one verdict.

- After an exception on any rank the verdict is to stop, since ranks may be out of step.
- Rank 0 stops early if a check takes longer than its limit, if an error has left ranks waiting, or if a launcher
  terminates it because another rank has died. A rank that is still in the check then posts where; one that posts
  nothing is lost.
- A thread that waits for a lost rank cannot be woken; the process reports without it, and ends with it.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ...device import hardware_of
from .context import Check, Context, Finding, Outcome, Status, by_text
from .report import Report

_LOOK_EVERY = 0.25  # seconds between two looks at the store while the check runs
_PAUSE = 0.005  # seconds between two looks of a rank that has nothing else to do
_FEW = 64  # with more ranks each looks less often, so that one store can serve thousands
_AFTER_THE_LIMIT = 3.0  # seconds by which process groups time out before the check is ended: their errors say more
_AFTER_AN_ERROR = 5.0  # seconds until the ranks that an error has left waiting are given up
_FAREWELL = 2.0  # seconds for ranks to tell where they were
_LETTING_GO = 1.0  # seconds for a thread to end that no longer waits for other ranks
_LATE_VERDICT = 15.0  # seconds by which a verdict may be late until rank 0 counts as dead
_REPORTING = 20.0  # seconds for rank 0 to write its report
_STOP = "stop"  # the verdict after which no other check runs; otherwise it is the status of the check
_PACKAGE, _OWN_ROOM = "/meshmuon/", "meshmuon/tools/doctor/"


class Runner:
    """Runs ``checks`` on this rank; ``outcomes`` has those that are over, on rank 0 only."""

    def __init__(self, context: Context, checks: Sequence[Check], report: Report) -> None:
        self._context, self._checks, self._report = context, checks, report
        self._rank, self._world = context.rank, context.world
        self._store = dist.PrefixStore("meshmuon doctor", context.store)  # type: ignore[attr-defined]
        self._patience = max(1.0, context.world / _FEW)
        self._check = checks[0]
        self._worker = threading.Thread()
        self._finding: Finding | None = None
        self._posted = False  # whether this rank has posted its finding
        self._began, self._deadline = 0.0, 0.0
        self._leader_lost = False  # rank 0 posts no verdict, or the store does not answer
        self._signal = 0
        self._handlers: dict[int, Any] = {}  # of the signals that the doctor catches, as they were before
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        self.outcomes: list[Outcome] = []

    def run(self) -> bool:
        """Runs all checks; every rank must call, from its main thread. Returns whether all is well, the same on
        every rank.
        """
        passed = True
        for check in self._checks:
            try:
                verdict = self._run_check(check)
            except RuntimeError as error:
                self._leader_lost, verdict = True, _STOP
                self._end_alone(f"the launcher's store does not answer ({error})")
            passed = passed and verdict in ("passed", "skipped")
            if verdict == _STOP:
                break
        for check in self._checks[len(self.outcomes) :] if self._rank == 0 else ():
            self._end(check, "not run", "the connection between ranks is in doubt after the failure above")
        self._worker.join(_LETTING_GO)
        return passed

    def close(self) -> None:
        """After rank 0's report: rank 0 lets the others go, which wait for it here, since the store may end with it.

        Signals end the process again only at the very end: a launcher terminates rank 0 when another rank ends with an
        exit code.
        """
        with suppress(RuntimeError):  # the store is gone, together with rank 0: no rank waits any longer
            if self._rank == 0:
                self._store.set("reported", "yes")
                self._await(lambda: self._store.add("left", 0) >= self._world - 1, _FAREWELL)
            elif not self._leader_lost:
                if not self._await(lambda: self._store.check(["reported"]), _REPORTING):
                    print(f"meshmuon doctor, rank {self._rank}: rank 0 has not reported.", file=sys.stderr)
                self._store.add("left", 1)
        # a thread that waits for a lost rank ends with the process
        if dist.is_initialized() and not self._worker.is_alive():
            dist.destroy_process_group()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def _run_check(self, check: Check) -> str:
        """Starts a check, and looks at this rank and the others until there is a verdict."""
        self._check, self._context.phase, self._finding, self._posted = check, check.title, None, False
        self._began = time.monotonic()
        late = 0.0 if self._rank == 0 else _LATE_VERDICT
        self._deadline = self._began + self._context.options.limit + _AFTER_THE_LIMIT + late
        self._report.begin(check)
        self._worker = threading.Thread(target=self._work, args=(torch.get_num_threads(),), daemon=True)
        self._worker.start()
        while True:
            running = self._worker.is_alive()
            if not running:
                self._post()
            verdict = self._decide() if self._rank == 0 else self._follow()
            if verdict is None and self._signal:
                launcher = "the launcher has terminated this process, as launchers do when another rank has died"
                verdict = self._end_early("it was interrupted" if self._signal == signal.SIGINT else launcher)
            if verdict is not None:
                return verdict
            if running:
                self._worker.join(_LOOK_EVERY * self._patience)
            else:
                time.sleep(_PAUSE * self._patience)

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a new thread starts with the default
        hardware_of(self._context.device).use(self._context.device)
        if self._world < self._check.fewest_ranks:
            self._finding = Finding(f"needs {self._check.fewest_ranks} ranks: start it with torchrun", skipped=True)
            return
        try:
            self._finding = self._check.run(self._context)
        except Exception as error:
            self._finding = Finding("", problems=(f"{self._context.phase}: {_text_of(error)}",), raised=True)

    def _decide(self) -> str | None:
        """Rank 0: posts and returns a verdict, once there is one."""
        if self._all_posted():
            return self._conclude(self._findings())
        if self._store.check([self._key("error")]):
            self._deadline = min(self._deadline, time.monotonic() + _AFTER_AN_ERROR)
        if time.monotonic() < self._deadline:
            return None
        limit = self._context.options.limit
        if time.monotonic() < self._began + limit + _AFTER_THE_LIMIT:
            return self._end_early("it has failed on some ranks, and not all others have come to its end")
        return self._end_early(f"it took longer than its limit of {limit:g} s")

    def _follow(self) -> str | None:
        """Other ranks: the verdict of rank 0, if there is one; they end by themselves if rank 0 is lost."""
        if self._store.check([self._key("verdict")]):
            verdict: str = self._store.get(self._key("verdict")).decode()
            if verdict == _STOP:
                self._post()
            return verdict
        if time.monotonic() < self._deadline:
            return None
        self._leader_lost = True
        self._end_alone("rank 0 gives no sign of life")
        return _STOP

    def _conclude(self, findings: Mapping[int, Finding]) -> str:
        """The verdict on a check that all ranks have come to the end of."""
        check, result = self._check, findings[0]
        raised = any(finding.raised for finding in findings.values())
        problems = {rank: finding.problems for rank, finding in findings.items() if finding.problems}
        if problems:
            self._end(check, "failed", by_text(problems), check.advice_for(stuck=raised))
            return self._tell(_STOP if raised and self._world > 1 else "failed")
        status: Status = "skipped" if result.skipped else "passed"
        self._end(check, status, result.detail, figures=result.figures)
        return self._tell(status)

    def _end_early(self, reason: str) -> str:
        """Stops all ranks where they are, if this is rank 0, and reports where that was."""
        self._post()
        if self._rank == 0:
            self._tell(_STOP)
            self._await(self._all_posted, _FAREWELL)
            texts = {rank: finding.problems or ["done"] for rank, finding in self._findings().items()}
            lost = {rank: ["no sign of life"] for rank in range(self._world) if rank not in texts}
            self._end_alone(f"{reason}. {by_text({**texts, **lost})}")
        return _STOP

    def _end_alone(self, reason: str) -> None:
        """Rank 0 reports; another rank prints what it knows, since rank 0 will not."""
        if self._rank == 0:
            self._end(self._check, "failed", reason, self._check.advice_for(stuck=True))
        else:
            print(f"meshmuon doctor, rank {self._rank}: {reason}; this rank: {self._where()}", file=sys.stderr)

    def _end(
        self, check: Check, status: Status, detail: str, advice: str = "", figures: Mapping[str, Any] | None = None
    ) -> None:
        seconds = 0.0 if status == "not run" else time.monotonic() - self._began
        self.outcomes.append(Outcome(check, status, seconds, detail, advice, figures or {}))
        self._report.end(self.outcomes[-1])

    # What is in the store.

    def _key(self, what: int | str) -> str:
        return f"{self._check.name} {what}"

    def _post(self) -> None:
        """What this rank has found, or where it still is; once."""
        if not self._posted:
            self._posted = True
            finding = self._finding or Finding("", [f"still in {self._where()}"], raised=True)
            self._store.set(self._key(self._rank), json.dumps(asdict(finding)))
            if finding.raised:
                self._store.set(self._key("error"), "")
                self._deadline = min(self._deadline, time.monotonic() + _LATE_VERDICT)

    def _tell(self, verdict: str) -> str:
        self._store.set(self._key("verdict"), verdict)
        return verdict

    def _all_posted(self) -> bool:
        posted: bool = self._store.check([self._key(rank) for rank in range(self._world)])
        return posted

    def _findings(self) -> dict[int, Finding]:
        """Those that have been posted, by rank."""
        ranks = [rank for rank in range(self._world) if self._store.check([self._key(rank)])]
        values = self._store.multi_get([self._key(rank) for rank in ranks])
        return {rank: Finding(**json.loads(value)) for rank, value in zip(ranks, values, strict=True)}

    def _await(self, happened: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE * self._patience)
        return True

    def _where(self) -> str:
        """What this rank is doing: the phase, and the innermost function of meshmuon that the check is in."""
        frame = sys._current_frames().get(self._worker.ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None and self._worker.is_alive() else []
        inside = [frame for frame in stack if _PACKAGE in frame.filename and not _place(frame).startswith(_OWN_ROOM)]
        return f"{self._context.phase}, in {inside[-1].name} ({_place(inside[-1])})" if inside else self._context.phase


def _place(frame: traceback.FrameSummary) -> str:
    """File and line; inside the package without the folders above it."""
    _, inside, path = frame.filename.rpartition(_PACKAGE)
    return f"{'meshmuon/' + path if inside else frame.filename}:{frame.lineno}"


def _text_of(error: Exception) -> str:
    """An error in one line, with the place that raised it."""
    place = _place(traceback.extract_tb(error.__traceback__)[-1])
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({place})"
