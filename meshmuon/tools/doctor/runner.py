"""Runs each check in a thread of its own and watches it from the main thread, so that a hang ends in a report.

Ranks tell each other where they are by keys in the launcher's store, never by what is being checked: a check can leave process
groups broken or ranks waiting in them, and the store still answers. Each rank posts a ``_RankState`` twice a second, and when a
check has ended. Rank 0 reads those of all ranks and posts one ``_Verdict`` per check.

- After an exception on any rank the verdict is not to go on, since ranks may be out of step.
- Rank 0 ends the doctor early if a check takes longer than its limit, if a rank gives no sign of life, or if a launcher
  terminates it because another rank has died. The report then says where every rank was.
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
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ...device import hardware_of
from .check import Check, Finding, Outcome, Status, by_text, ranks_text
from .context import Context
from .report import Reporter

_TICK = 0.05  # seconds between two looks at a check that runs
_SIGN_EVERY = 0.5  # seconds between two signs of life, of up to _FEW ranks
_FEW = 256
_RANKS_PER_POLL = 64  # with more ranks each asks less often, so that one store can serve thousands
_MOST_SILENCE = 15.0  # seconds without a sign of life after which a rank counts as dead
_AFTER_THE_LIMIT = 3.0  # seconds by which process groups time out before the check is ended: their errors say more
_FAREWELL = 2.0  # seconds for ranks to tell where they were
_LETTING_GO = 1.0  # seconds for a thread that waits for nobody any longer to end
_LOOKS_AFTER_AN_ERROR = 10  # until the ranks that an error has left waiting are given up
_REPORTING = 20.0  # seconds for rank 0 to write its report
_PACKAGE, _OWN_ROOM = "/meshmuon/", "meshmuon/tools/doctor/"


@dataclass(frozen=True, slots=True)
class _RankState:
    check: str
    beat: int  # how many states the rank has posted
    where: str  # phase and function
    finding: Mapping[str, Any] | None  # of the check, once it has ended


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What all ranks do after a check."""

    passed: bool  # no rank has a problem
    go_on: bool  # with the next check
    ended_early: bool = False


class Runner:
    """Runs ``checks`` on this rank; ``outcomes`` has those that are over, on rank 0 only."""

    def __init__(self, context: Context, checks: Sequence[Check], reporter: Reporter) -> None:
        self._context, self._checks, self._reporter = context, checks, reporter
        self._rank, self._world = context.rank, context.world
        self._store = dist.PrefixStore("meshmuon doctor", context.session.store)  # type: ignore[attr-defined]
        self._pause = 0.005 * max(1.0, context.world / _RANKS_PER_POLL)
        self._check = checks[0]
        self._worker = threading.Thread()
        self._finding: Finding | None = None
        self._began = 0.0
        self._beats = 0
        self._looks_after_error = 0
        self._states: dict[int, _RankState] = {}  # of the ranks that this one watches
        self._seen: dict[int, tuple[int, float]] = {}  # of each of them, its last beat and when this rank first saw it
        self._leader_lost = False  # rank 0 gives no sign of life, or the store does not answer
        self._signal = 0
        self._handlers: dict[int, Any] = {}  # of the signals that the doctor catches, as they were before
        self.outcomes: list[Outcome] = []
        self.stuck = False  # whether a thread could not be ended: the process must end with it

    def run(self) -> bool:
        """Runs all checks; every rank must call, from its main thread. Returns whether all is well, on every rank alike."""
        self._catch_signals()
        passed = True
        for check in self._checks:
            try:
                verdict = self._run_check(check)
            except RuntimeError as error:
                self._leader_lost = True
                verdict = self._give_up(f"the launcher's store does not answer ({error})")
            passed = passed and verdict.passed
            if not verdict.go_on:
                if self._rank == 0:
                    self._report_not_run()
                break
        self._worker.join(_LETTING_GO)
        self.stuck = self._worker.is_alive()
        return passed

    def farewell(self) -> None:
        """Rank 0, after its report: lets the others go; they wait for it here. The store may end with rank 0."""
        try:
            if self._rank == 0:
                self._store.set("reported", "yes")
                self._await(lambda: self._store.add("left", 0) >= self._world - 1, _FAREWELL)
            elif not self._leader_lost:
                if not self._await(lambda: self._store.check(["reported"]), _REPORTING):
                    print(f"meshmuon doctor, rank {self._rank}: rank 0 has not reported.", file=sys.stderr)
                self._store.add("left", 1)
        except RuntimeError:  # the store is gone, together with rank 0: nobody waits any longer
            return

    def release_signals(self) -> None:
        """From now on signals end the process again.

        Only at the very end: a launcher terminates rank 0 when another rank ends with an exit code.
        """
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _catch_signals(self) -> None:
        def note(number: int, frame: FrameType | None) -> None:
            self._signal = number

        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}

    def _run_check(self, check: Check) -> _Verdict:
        """Starts a check, and looks at this rank and the others until there is a verdict."""
        self._check, self._context.phase, self._finding = check, check.title, None
        self._began, self._looks_after_error = time.monotonic(), 0
        if self._rank == 0:
            self._reporter.begin(check)
        self._worker = threading.Thread(target=self._work, args=(torch.get_num_threads(),), daemon=True)
        self._worker.start()
        next_sign, told = 0.0, False
        while True:
            running = self._worker.is_alive()
            due = time.monotonic() >= next_sign
            if due or not (running or told):
                next_sign, told = time.monotonic() + _SIGN_EVERY * max(1.0, self._world / _FEW), not running
                self._post()
            if due or not running:
                verdict = self._decide(sign_due=due) if self._rank == 0 else self._follow()
                if verdict is not None:
                    return verdict
            if self._signal:
                launcher = "the launcher has terminated this process, as launchers do when another rank has died"
                return self._end_early("it was interrupted" if self._signal == signal.SIGINT else launcher)
            if running:
                self._worker.join(_TICK)
            else:
                time.sleep(self._pause)

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

    def _decide(self, *, sign_due: bool) -> _Verdict | None:
        """Rank 0: reads the states of all ranks. Posts and returns a verdict once there is one."""
        self._read_states(range(self._world))
        findings = self._findings()
        if len(findings) == self._world:
            return self._conclude(findings)
        if not sign_due:
            return None
        limit = self._context.options.limit
        raised = any(finding.raised for finding in findings.values())
        self._looks_after_error = self._looks_after_error + 1 if raised else 0
        if silent := self._silent():
            return self._end_early(f"{ranks_text(silent)} {'gives' if len(silent) == 1 else 'give'} no sign of life")
        if time.monotonic() - self._began > limit + _AFTER_THE_LIMIT:
            return self._end_early(f"it took longer than its limit of {limit:g} s")
        if self._looks_after_error > _LOOKS_AFTER_AN_ERROR:
            return self._end_early("it has failed on some ranks, and not all others have come to its end")
        return None

    def _follow(self) -> _Verdict | None:
        """Other ranks: the verdict of rank 0, if there is one; an end of their own if rank 0 is lost."""
        key = f"verdict {self._check.name}"
        if self._store.check([key]):
            verdict = _Verdict(**json.loads(self._store.get(key)))
            if verdict.ended_early:
                self._post()  # where this rank was
            return verdict
        self._read_states(range(1))
        if self._silent():
            self._leader_lost = True
            return self._give_up("rank 0 gives no sign of life")
        return None

    def _conclude(self, findings: Mapping[int, Finding]) -> _Verdict:
        try:
            outcome = self._outcome(self._check, findings)
        except Exception as error:  # the figures of the ranks do not fit together
            return self._give_up(f"{self._context.phase}: {_text_of(error)}")
        in_step = self._world == 1 or not any(finding.raised for finding in findings.values())
        self._end(outcome)
        return self._posted(_Verdict(outcome.status is not Status.FAILED, in_step))

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

    def _end_early(self, reason: str) -> _Verdict:
        """Stops all ranks where they are, if this is rank 0, and reports where that was."""
        if self._rank:
            self._post()
            return self._give_up(reason)
        verdict = self._posted(_Verdict(passed=False, go_on=False, ended_early=True))
        before = {rank: state.beat for rank, state in self._states.items()}
        self._post()

        def all_told() -> bool:
            self._read_states(range(self._world))
            return all(rank in self._states and self._states[rank].beat > before.get(rank, 0) for rank in range(self._world))

        self._await(all_told, _FAREWELL)
        findings, texts = self._findings(), dict[int, Sequence[str]]()
        for rank in range(self._world):
            state = self._states.get(rank)
            if rank in findings:
                texts[rank] = findings[rank].problems or ["done"]
            elif state is not None and state.beat > before.get(rank, 0):
                texts[rank] = [f"still in {state.where}"]
            else:
                texts[rank] = ["no sign of life"]
        self._fail(f"{reason}. {by_text(texts)}")
        return verdict

    def _give_up(self, reason: str) -> _Verdict:
        """Without the others: rank 0 reports, another rank says what it knows if nobody else will."""
        verdict = _Verdict(passed=False, go_on=False)
        if self._rank == 0:
            self._fail(reason)
            if not self._leader_lost:
                self._posted(verdict)
        elif self._leader_lost:
            print(f"meshmuon doctor, rank {self._rank}: {reason}; this rank: {self._where()}", file=sys.stderr)
        return verdict

    def _fail(self, detail: str) -> None:
        check = self._check
        seconds, advice = time.monotonic() - self._began, check.advice_for(stuck=True)
        self._end(Outcome(check.name, check.title, Status.FAILED, seconds, detail, advice))

    def _report_not_run(self) -> None:
        text = "the connection between ranks is in doubt after the failure above"
        for check in self._checks[len(self.outcomes) :]:
            self._end(Outcome(check.name, check.title, Status.NOT_RUN, 0.0, text))

    def _end(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._reporter.end(outcome)

    # What is in the store.

    def _post(self) -> None:
        self._beats += 1
        finding = None if self._finding is None else asdict(self._finding)
        self._store.set(
            f"rank {self._rank}", json.dumps(asdict(_RankState(self._check.name, self._beats, self._where(), finding)))
        )

    def _posted(self, verdict: _Verdict) -> _Verdict:
        self._store.set(f"verdict {self._check.name}", json.dumps(asdict(verdict)))
        return verdict

    def _read_states(self, ranks: range) -> None:
        keys = {rank: f"rank {rank}" for rank in ranks}
        if not self._store.check(list(keys.values())):  # at the beginning
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        values = self._store.multi_get(list(keys.values())) if keys else []
        self._states = {rank: _RankState(**json.loads(value)) for rank, value in zip(keys, values, strict=True)}
        now = time.monotonic()
        for rank in ranks:
            beat = self._states[rank].beat if rank in self._states else 0
            if self._seen.get(rank, (-1, 0.0))[0] != beat:
                self._seen[rank] = beat, now

    def _findings(self) -> dict[int, Finding]:
        """Of the present check, by rank."""
        here = {rank: state.finding for rank, state in self._states.items() if state.check == self._check.name}
        return {rank: Finding(**finding) for rank, finding in here.items() if finding is not None}

    def _silent(self) -> list[int]:
        """Of the ranks that are watched, those that have given no sign of life for too long."""
        now, most = time.monotonic(), min(_MOST_SILENCE, self._context.options.limit)
        return [rank for rank, (_, since) in self._seen.items() if now - since > most]

    def _await(self, happened: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > end:
                return False
            time.sleep(self._pause)
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
