"""``meshmuon doctor``: proves and measures the library on the machines that it runs on."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from .catalog import chosen_checks
from .context import Context
from .environment import environment_of
from .measurements import calibration_of
from .report import report_as_json, report_for
from .runner import Runner


@dataclass(frozen=True, slots=True)
class Ending:
    """How the doctor ended on this rank."""

    code: int  # exit code: 0 if all is well, 1 otherwise
    stuck: bool  # a thread still waits for a lost rank: only the end of the process ends it


def run_doctor(context: Context, stream: TextIO | None = None) -> Ending:
    """Runs the checks that the options ask for. Every rank calls it, from its main thread.

    Rank 0 reports to ``stream``, by default standard output, and writes the files.
    """
    began, options = time.monotonic(), context.options
    report = report_for(context.rank, stream)
    runner = Runner(context, chosen_checks(options), report)
    environment = environment_of(context.device) if context.rank == 0 else {}
    report.title(context.world, environment)
    passed = runner.run()
    if context.rank == 0:
        seconds = time.monotonic() - began
        report.close(runner.outcomes, seconds)
        calibration = calibration_of(context)
        saved = None if calibration is None else calibration.to_json()
        if options.json_file is not None:
            passed &= _written(options.json_file, report_as_json(context.world, environment, runner.outcomes, seconds, saved))
        if options.save_file is not None and saved is not None:
            passed &= _written(options.save_file, saved)
        passed &= report.is_read
    runner.farewell()
    if not runner.stuck:
        context.leave()
    runner.release_signals()
    return Ending(0 if passed else 1, runner.stuck)


def _written(path: Path, content: Any) -> bool:
    """Writes a file; says so if that fails."""
    try:
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"meshmuon doctor: {path} was not written: {error.strerror}.", file=sys.stderr)
        return False
    return True
