"""Runs the checks in one thread and watches them from another, so that a hang ends in a report.

On every rank a worker thread goes through the checks, all ranks at the same time. The main thread is the supervisor: it gives
signs of life, and looks at the clock, at the other ranks and at signals. A worker that waits for a lost rank cannot be woken;
the supervisor reports without it, and the process ends with it.

- Rank 0 collects the findings of a check from all ranks, and tells them whether to go on. After an exception on any rank they do
  not go on, since ranks may be out of step.
- Rank 0 ends the doctor early if a check takes longer than its limit, if a rank gives no sign of life, or if a launcher
  terminates it because another rank has died. Every rank then posts where it is, and the report says so.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import torch

from ..device import hardware_of
from .board import Board, Sign, Verdict
from .check import Check, Finding, Outcome, Status, by_text, ranks_text
from .context import Context

_TICK = 0.05  # seconds between two looks of the supervisor
_SIGN_EVERY = 0.5  # seconds between two signs of life, of up to _FEW ranks
_FEW = 256
_MOST_SILENCE = 15.0  # seconds without a sign of life after which a rank counts as dead
_AFTER_THE_LIMIT = 3.0  # seconds by which process groups time out before the supervisor ends the check: their errors say more
_FAREWELL = 2.0  # seconds for ranks to tell where they were
_LETTING_GO = 1.0  # seconds for a worker that waits for nobody any longer to end
_LOOKS_AFTER_AN_ERROR = 10  # of the supervisor, until the ranks that an error has left waiting are given up
_REPORTING = 20.0  # seconds for rank 0 to write its report


_PACKAGE, _OWN_ROOM = "/meshmuon/", "meshmuon/doctor/"


def _place(frame: traceback.FrameSummary) -> str:
    """File and line; inside the package without the folders above it."""
    _, inside, path = frame.filename.rpartition(_PACKAGE)
    return f"{'meshmuon/' + path if inside else frame.filename}:{frame.lineno}"


def _text_of(error: Exception) -> str:
    """An error in one line, with the place that raised it."""
    place = _place(traceback.extract_tb(error.__traceback__)[-1])
    return f"{type(error).__name__}: {' '.join(str(error).split())} ({place})"


class Reporter(Protocol):
    """Shows what happens, on rank 0."""

    def begin(self, check: Check) -> None:
        """A check begins."""

    def end(self, outcome: Outcome) -> None:
        """A check has ended."""


class Runner:
    """Runs ``checks`` on this rank; ``outcomes`` has those that are over, on rank 0 only."""

    def __init__(self, context: Context, checks: Sequence[Check], reporter: Reporter) -> None:
        self._context, self._checks, self._reporter = context, checks, reporter
        self._board = Board(context.session.store, context.rank, context.world)
        self._current = checks[0]
        self._began = time.monotonic()
        self._awaiting_verdict = False
        self._ended = threading.Event()  # the worker must not wait for other ranks any longer
        self._leader_lost = False  # rank 0 gives no sign of life
        self._passed = True
        self._completed = False  # the worker has come to its end, and not to an error of its own
        self._signal = 0
        self._handlers: dict[int, Any] = {}  # of the signals that the doctor catches, as they were before
        self._beats = 0
        self._raised_looks = 0  # at how many looks in a row some rank had been ended by an error in this check
        self._seen: dict[int, tuple[int, float]] = {}  # of each rank, its last beat and when this rank first saw it
        self.outcomes: list[Outcome] = []
        self.stuck = False  # whether the worker could not be ended: the process must end with it

    def run(self) -> bool:
        """Runs all checks; every rank must call, from its main thread. Returns whether all is well, on every rank alike."""
        threads = torch.get_num_threads()
        worker = threading.Thread(target=self._work, args=(threads,), name="meshmuon doctor", daemon=True)
        self._handlers = self._catch_signals()
        worker.start()
        if ended_because := self._supervise(worker):
            self._end_early(ended_because)
            self._ended.set()
            worker.join(_LETTING_GO)
            self._passed = False
        self.stuck = worker.is_alive()
        return self._passed and self._completed

    def farewell(self) -> None:
        """Rank 0, after its report: lets the others go; they wait for it here. The store may end with rank 0."""
        try:
            if self._context.rank == 0:
                self._board.post_reported()
                self._board.await_leaving(_FAREWELL)
            elif not self._leader_lost and not self._board.await_reported(_REPORTING):
                print(f"meshmuon doctor, rank {self._context.rank}: rank 0 has not reported.", file=sys.stderr)
        except RuntimeError:  # the store is gone: nobody waits any longer
            return

    def release_signals(self) -> None:
        """From now on signals end the process again.

        Only at the very end: a launcher terminates rank 0 when another rank ends with an exit code.
        """
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    # The worker's thread.

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)  # a new thread starts with the default
        hardware_of(self._context.device).use(self._context.device)
        for check in self._checks:
            self._context.phase = check.title
            self._current, self._began = check, time.monotonic()
            if self._context.rank == 0:
                self._reporter.begin(check)
            try:
                self._board.post_finding(check.name, self._find(check))
                go_on = self._agree(check)
            except Exception as error:  # the store is gone, or the figures of the ranks do not fit together
                if self._context.rank == 0 and not self._ended.is_set():
                    self._fail(f"{self._context.phase}: {_text_of(error)}")
                return
            if not go_on:
                break
        self._completed = True

    def _find(self, check: Check) -> Finding:
        if self._context.world < check.fewest_ranks:
            return Finding(f"needs {check.fewest_ranks} ranks: start it with torchrun", skipped=True)
        try:
            return check.run(self._context)
        except Exception as error:
            return Finding("", problems=(f"{self._context.phase}: {_text_of(error)}",), raised=True)

    def _agree(self, check: Check) -> bool:
        """Rank 0 collects the findings and decides; the others wait for its verdict. Returns whether to go on."""
        board = self._board
        if self._context.rank == 0:
            while board.done(check.name) < self._context.world:
                if self._ended.wait(board.pause):
                    return False
            findings = board.findings(check.name)
            outcome = self._outcome(check, findings)
            in_step = self._context.world == 1 or not any(finding.raised for finding in findings.values())
            verdict = Verdict(outcome.status is not Status.FAILED, in_step)
            self.outcomes.append(outcome)
            self._reporter.end(outcome)
            board.post_verdict(check.name, verdict)
            if not verdict.go_on:
                self._report_not_run()
        else:
            self._awaiting_verdict = True
            while (awaited := board.verdict(check.name)) is None:
                if self._ended.wait(board.pause):
                    return False
            verdict, self._awaiting_verdict = awaited, False
        self._passed = self._passed and verdict.passed
        return verdict.go_on

    def _outcome(self, check: Check, findings: Mapping[int, Finding]) -> Outcome:
        seconds = time.monotonic() - self._began
        problems = {rank: finding.problems for rank, finding in findings.items() if finding.problems}
        if problems:
            advice = check.advice_for(stuck=any(finding.raised for finding in findings.values()))
            return Outcome(check.name, check.title, Status.FAILED, seconds, by_text(problems), advice)
        first = findings[0]
        if first.skipped:
            return Outcome(check.name, check.title, Status.SKIPPED, seconds, first.detail)
        if check.summarise is None:
            return Outcome(check.name, check.title, Status.PASSED, seconds, first.detail)
        summary = check.summarise(self._context, [findings[rank].data for rank in sorted(findings)])
        self._context.figures[check.name] = summary.figures
        return Outcome(check.name, check.title, Status.PASSED, seconds, summary.detail, figures=summary.figures)

    def _report_not_run(self) -> None:
        over = {outcome.name for outcome in self.outcomes}
        for check in self._checks:
            if check.name not in over:
                text = "the connection between ranks is in doubt after the failure above"
                outcome = Outcome(check.name, check.title, Status.NOT_RUN, 0.0, text)
                self.outcomes.append(outcome)
                self._reporter.end(outcome)

    # The main thread.

    def _catch_signals(self) -> dict[int, Any]:
        def note(number: int, frame: FrameType | None) -> None:
            self._signal = number

        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}

    def _supervise(self, worker: threading.Thread) -> str:
        """Returns once the worker is done, or why it must not be waited for any longer."""
        every = _SIGN_EVERY * max(1.0, self._context.world / _FEW)
        next_sign = 0.0
        while worker.is_alive():
            worker.join(_TICK)
            if self._signal == signal.SIGINT:
                return "it was interrupted"
            if self._signal:
                return "the launcher has terminated this process, as launchers do when another rank has died"
            if time.monotonic() >= next_sign:
                next_sign = time.monotonic() + every
                if reason := self._look_around():
                    return reason
        return ""

    def _look_around(self) -> str:
        """Gives a sign of life and looks for those of others. Returns a reason to end early, or nothing."""
        limit, taken = self._context.options.limit, time.monotonic() - self._began
        self._beats += 1
        try:
            self._board.post_sign(Sign(self._beats, self._where()))
            silent = self._silent()
            if self._context.rank:
                if self._board.ended_early():
                    return "rank 0 has ended it"
                self._leader_lost = bool(silent)
                return "rank 0 gives no sign of life" if silent else ""
            if silent:
                return f"{ranks_text(silent)} {'gives' if len(silent) == 1 else 'give'} no sign of life"
            raised = self._board.raised(self._current.name)
        except RuntimeError as error:
            return f"the launcher's store does not answer ({error})"
        if taken > limit + _AFTER_THE_LIMIT:
            return f"it took longer than its limit of {limit:g} s"
        self._raised_looks = self._raised_looks + 1 if raised else 0
        if self._raised_looks > _LOOKS_AFTER_AN_ERROR:
            return "it has failed on some ranks, and not all others have come to its end"
        return ""

    def _silent(self) -> list[int]:
        """The ranks that have given no sign of life for too long; all but rank 0 look at rank 0 only."""
        now, most = time.monotonic(), min(_MOST_SILENCE, self._context.options.limit)
        watched = range(self._context.world) if self._context.rank == 0 else range(1)
        signs = self._board.signs(watched)
        for rank in watched:
            beat = signs[rank].beat if rank in signs else 0
            if self._seen.get(rank, (-1, 0.0))[0] != beat:
                self._seen[rank] = beat, now
        return [rank for rank in watched if now - self._seen[rank][1] > most]

    def _where(self) -> str:
        """What this rank is doing: the phase, and the innermost function of meshmuon that its worker is in."""
        if self._awaiting_verdict:
            return "done"
        frames = sys._current_frames()
        worker = next((thread for thread in threading.enumerate() if thread.name == "meshmuon doctor"), None)
        stack = [] if worker is None or worker.ident not in frames else traceback.extract_stack(frames[worker.ident])
        inside = [frame for frame in stack if _PACKAGE in frame.filename and not _place(frame).startswith(_OWN_ROOM)]
        return f"{self._context.phase}, in {inside[-1].name} ({_place(inside[-1])})" if inside else self._context.phase

    def _end_early(self, reason: str) -> None:
        """Reports the check that did not end, on rank 0; tells where this rank was, on all."""
        try:
            if self._context.rank == 0:
                self._board.end_early(reason)
            self._board.post_last(self._where())
            if self._context.rank == 0:
                self._report_early_end(reason)
        except RuntimeError as error:
            self._leader_lost = True
            reason = f"{reason}; the launcher's store does not answer ({error})"
            if self._context.rank == 0:
                self._fail(reason)
        if self._context.rank and self._leader_lost:  # nobody else will report
            print(f"meshmuon doctor, rank {self._context.rank}: {reason}; this rank: {self._where()}", file=sys.stderr)

    def _report_early_end(self, reason: str) -> None:
        check, end = self._current, time.monotonic() + _FAREWELL
        while len(self._board.lasts()) < self._context.world and time.monotonic() < end:
            time.sleep(_TICK)
        findings, lasts = self._board.findings(check.name), self._board.lasts()
        texts: dict[int, list[str]] = {}
        for rank in range(self._context.world):
            if rank in findings:
                texts[rank] = list(findings[rank].problems) or ["done"]
            elif rank in lasts:
                texts[rank] = [f"still in {lasts[rank]}"]
            else:
                texts[rank] = ["no sign of life"]
        self._fail(f"{reason}. {by_text(texts)}")

    def _fail(self, detail: str) -> None:
        check, self._passed = self._current, False
        if any(outcome.name == check.name for outcome in self.outcomes):  # it ended just now
            self._report_not_run()
            return
        seconds, advice = time.monotonic() - self._began, check.advice_for(stuck=True)
        outcome = Outcome(check.name, check.title, Status.FAILED, seconds, detail, advice)
        self.outcomes.append(outcome)
        self._reporter.end(outcome)
        self._report_not_run()
