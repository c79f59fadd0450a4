"""The demo with an accident: before a given step one process is killed by SIGKILL, once.

Usage: killed_worker.py MARKER CONTENDER STEP WHO, then the demo's own flags. MARKER is a file that says that it has
happened. WHO is a rank, or "node" for a process of whatever rank together with the launcher that started it, as when a
machine is lost.

The accident is arranged outside of `if __name__`, because processes that the demo starts itself import this file.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_gpt
from demo.train import Run

MARKER, CONTENDER, STEP, WHO = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
step_of_the_demo = Run._step


def step_or_die(self: Run, step: int) -> None:
    meant = WHO in ("node", str(self.runtime.rank))
    if meant and (self.result.name, step) == (CONTENDER, STEP) and not MARKER.exists():
        MARKER.touch()
        if WHO == "node":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    step_of_the_demo(self, step)


Run._step = step_or_die  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(train_gpt.main(sys.argv[5:]))
