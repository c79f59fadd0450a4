"""Processes that import Triton in one way or the other: it chooses between compiler and interpreter once, when it
is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_python(arguments: list[str], **environment: str) -> str:
    """What a Python process prints, without TRITON_INTERPRET unless it is in ``environment``."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, *arguments],
        env=inherited | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def run_interpreted(tests: Path) -> None:
    """Runs a file of tests in Triton's interpreter."""
    out = run_python(["-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)], TRITON_INTERPRET="1")
    assert " passed" in out
