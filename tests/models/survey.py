"""Routes every architecture of transformers, and models of timm, torchvision and diffusers: ``make test-models``.

Each model is built on the meta device, with a few layers, and checked by ``checks.py``. The result is a table of counts and a
list of problems; the exit code is 1 if there are any. ``--list`` names the models that could not be built, and why.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple, NoReturn

from rich.console import Console
from rich.table import Table
from torch import nn

from tests.models.checks import check_model
from tests.support import architectures

SECONDS = 120  # for a single model
COLUMNS = ("built", "not built", "refused", "problems", "warnings", "muon", "adamw", "expert stacks", "fused weights")


class Job(NamedTuple):
    """A model to build and check."""

    library: str
    names: tuple[str, ...]  # of transformers the model type and the class


class Outcome(NamedTuple):
    """What came of it."""

    job: Job
    counts: Counter[str]
    problems: list[str]
    not_built: str  # why it could not be built; "" if it was


BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "transformers": architectures.build_transformers,
    "timm": architectures.build_timm,
    "torchvision": architectures.build_torchvision,
    "diffusers": architectures.build_diffusers,
}


def jobs_of(library: str) -> list[Job]:
    """All models of a library."""
    if library == "transformers":
        return [Job(library, names) for names in architectures.transformers_classes()]
    listed = {"timm": architectures.timm_names, "torchvision": architectures.torchvision_names}
    return [Job(library, (name,)) for name in listed.get(library, architectures.diffusers_names)()]


def _too_slow(*_: object) -> NoReturn:
    raise TimeoutError(f"not built within {SECONDS} s")


def run_job(job: Job) -> Outcome:
    """Builds and checks a model; runs in a process of its own."""
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGALRM, _too_slow)
    signal.alarm(SECONDS)
    try:
        model = BUILDERS[job.library](*job.names)
    except Exception as error:
        return Outcome(job, Counter(), [], f"{type(error).__name__}: {error}".splitlines()[0])
    finally:
        signal.alarm(0)
    findings = check_model(model)
    return Outcome(job, findings.counts, findings.problems, "")


def summarised(library: str, outcomes: list[Outcome]) -> Counter[str]:
    """The counts of a library, and of transformers also how many architectures (model types) they belong to."""
    total: Counter[str] = Counter()
    for outcome in outcomes:
        total.update(outcome.counts)
        total["not built" if outcome.not_built else "built"] += 1
        total["refused"] += any(problem.startswith("refused") for problem in outcome.problems)
        total["problems"] += len(outcome.problems)
    if library == "transformers":
        total["architectures"] = len({outcome.job.names[0] for outcome in outcomes if not outcome.not_built})
    return total


def main() -> int:
    """Runs the survey and prints its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("libraries", nargs="*", default=list(BUILDERS), help="which libraries; all by default")
    parser.add_argument("--list", action="store_true", help="name the models that could not be built")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    console = Console(width=max(140, Console().width))
    problems = 0
    context = multiprocessing.get_context("spawn")
    for library in options.libraries:
        start = time.perf_counter()
        with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
            outcomes = list(pool.map(run_job, jobs_of(library), chunksize=8))
        total = summarised(library, outcomes)
        name = f"{library}, {total['architectures']} architectures" if total["architectures"] else library
        table = Table("library", *COLUMNS, title=f"get_default_muon_param_groups, {time.perf_counter() - start:.0f} s")
        table.add_row(name, *(str(total[column]) for column in COLUMNS))
        console.print(table)
        problems += total["problems"]
        for outcome in outcomes:
            for problem in outcome.problems:
                console.print(f"{' '.join(outcome.job.names)}: {problem}", soft_wrap=True, markup=False)
            if options.list and outcome.not_built:
                console.print(f"not built: {' '.join(outcome.job.names)}: {outcome.not_built}", soft_wrap=True, markup=False)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
