"""Runs the tests while random processes of theirs are stopped for seconds at a time: a machine that is slow in the
worst places.

``python -m tests.support.pauses [--seed N] [--longest SECONDS] [arguments of pytest]``. A test that the clock decides
fails here sooner or later, on any machine. pytest's own processes are stopped less often than the ranks and scripts
that tests start.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

_BREAK = 0.2  # seconds between two pauses


@contextmanager
def paused(process: psutil.Process) -> Iterator[None]:
    """Stops ``process``, and lets it go on at the end whatever happens."""
    with suppress(psutil.NoSuchProcess):
        process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _is_of_pytest(process: psutil.Process) -> bool:
    """Whether it runs tests itself, or is the server that ranks and scripts are forked from; these have its command
    line too.
    """
    command, parents = (" ".join(one.cmdline()) for one in (process, process.parent() or process))
    is_server = "forkserver" in command and "forkserver" not in parents
    return is_server or any(word in command for word in ("execnet", "-m pytest", "resource_tracker"))


def _choose(root: psutil.Process, draw: random.Random) -> psutil.Process | None:
    ranks, others = list[psutil.Process](), list[psutil.Process]()
    for process in root.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                (others if _is_of_pytest(process) else ranks).append(process)
    chosen = ranks if ranks and draw.random() < 0.9 else others
    return draw.choice(chosen) if chosen else None


def main(arguments: list[str]) -> int:
    """Returns pytest's exit code."""
    parser = argparse.ArgumentParser(description="Run pytest while random processes of it are paused.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=4.0, help="the longest pause, in seconds")
    options, of_pytest = parser.parse_known_args(arguments)
    draw, pauses, began = random.Random(options.seed), 0, time.monotonic()
    running = subprocess.Popen([sys.executable, "-m", "pytest", *of_pytest])
    root = psutil.Process(running.pid)
    try:
        while running.poll() is None:
            with suppress(psutil.NoSuchProcess):
                if chosen := _choose(root, draw):
                    with paused(chosen):
                        time.sleep(draw.uniform(0.0, options.longest))
                    pauses += 1
            time.sleep(_BREAK)
    finally:
        running.kill()
        running.wait()
    print(f"{pauses} pauses in {time.monotonic() - began:.0f} s, seed {options.seed}")
    return running.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
