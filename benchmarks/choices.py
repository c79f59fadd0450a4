"""How near plans by default come to the fastest that a search has found: predicted seconds, row by row.

The search has left the optimizer. What it had found for 32 models and meshes is frozen in
``tests/spine/plans/best.json``, with the machine that predicted it, which predicts today's plans here as well. Nothing
is measured.

    python benchmarks/choices.py
    python benchmarks/choices.py --models kimi-k2 llama3-8b
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import common  # first: it sets what torch reads when it starts
from common import Goal, Report

sys.path.insert(0, str(common.ROOT))  # for the frozen plans
from tests.spine.write_plans import FILE, report_of

QUICK = (14, 29)  # rows that take a second
SLOWER = 1.10  # what a plan by default may take of the fastest


def measure(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    results = []
    for row in report.each(options.rows, lambda row: f"{row['model']} {row['mesh']}"):
        seconds, best = report_of(row)["step"]["seconds"], row["best"]
        results.append(
            {
                "model": row["model"],
                "mesh": row["mesh"],
                "seconds": seconds,
                "best": best["seconds"],
                "option": best["option"],
                "relayed": best["plan"]["relayed"],
                "ratio": seconds / best["seconds"],
            }
        )
    return results


def show(results: Sequence[dict[str, Any]], report: Report) -> None:
    rows = [
        (
            f"{row['model']} {row['mesh']}",
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['best'] * 1e3:.2f}",
            f"{row['ratio']:.3f}",
            row["option"] + ", relays" * row["relayed"],
        )
        for row in results
    ]
    columns = ("model and mesh", "default, ms", "best, ms", "default ÷ best", "found by the search")
    report.table("predicted step with the plan by default, and with the fastest that a search had found", columns, rows)
    report.note(f"median of {len(rows)} rows: {statistics.median(row['ratio'] for row in results):.3f}")


def goals_of(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Goal]:
    worst = max(results, key=lambda row: float(row["ratio"]))
    over = sum(row["ratio"] > SLOWER for row in results)
    where = f"{worst['model']} {worst['mesh']}; {over} of {len(results)} rows take more"
    return [Goal("plan by default ÷ fastest found, worst row", worst["ratio"], most=SLOWER, note=where)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=None, help="rows of these models alone (default all)")


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    rows = json.loads(FILE.read_text())["rows"]
    known = sorted({row["model"] for row in rows})
    if unknown := set(options.models or ()) - set(known):
        parser.error(f"no row has the models {sorted(unknown)}; there are {known}")
    rows = [rows[k] for k in QUICK] if options.quick and not options.models else rows
    options.rows = [row for row in rows if options.models is None or row["model"] in options.models]


if __name__ == "__main__":
    common.Benchmark("choices", __doc__, measure, show, goals_of, add_options, settle_options).main()
