"""What plans by default are compared with: ``plans/best.json``, the fastest plans that a search has found for 32 rows.

    python -m tests.spine.write_plans --compare   # today's plans by default, each ÷ the best of the file

The file was written once, by meshmuon 0.1.0 while an optimizer still compared plans by itself. That search is gone, so
the file is never written anew. Each row has seconds, exchange buffers and options of the plan by default and of the
fastest whose buffers are allowed, and [seconds, buffers] of every option that was set by hand. All are predicted by the
machine ``plans/h100.json``; the rates that follow from it for a job inside a node and for one on several are in the
file, and each row names its own. ``benchmarks/choices.py`` makes the comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent
FILE = HERE / "plans" / "best.json"
HARDWARE = str(HERE / "plans" / "h100.json")
COMPARISON = HERE.parents[1] / "benchmarks" / "choices.py"


def report_of(row: dict[str, Any]) -> dict[str, Any]:
    """What ``meshmuon plan`` predicts of a row's model and mesh, by the machine with which the file was made."""
    command = ["meshmuon", "plan", "--model", row["model"], "--mesh", row["mesh"], "--param-dtype", row["param_dtype"]]
    output = io.StringIO()
    command += ["--hardware", HARDWARE, "--json", "-"]
    with patch.object(sys, "argv", command), contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        runpy.run_module("meshmuon", run_name="__main__")
    report: dict[str, Any] = json.loads(output.getvalue())
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true", required=True, help="other options are those of choices.py")
    others = parser.parse_known_args()[1]
    sys.path.insert(0, str(COMPARISON.parent))
    with patch.object(sys, "argv", [str(COMPARISON), *others]):
        runpy.run_path(str(COMPARISON), run_name="__main__")


if __name__ == "__main__":
    main()
