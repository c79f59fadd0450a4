"""Breaks the package one line at a time and counts what the tests catch.

    python tests/mutation/run.py                       the curated list and a sample of the systematic mutations
    python tests/mutation/run.py --only ortho lr.py    only mutants whose file or change contains one of these texts
    python tests/mutation/run.py --list --sample 0     show the curated list

Each mutant is a temporary copy of the package and the tests with one change, on which the tests that belong to the changed file
are run until the first failure. A test that fails without any change is left out, and named. A mutant that no test notices
survives; one that cannot be noticed is declared in ``curated/`` with the reason, and not counted.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.mutation.curated import CURATED, EQUIVALENT, Equivalent  # noqa: E402
from tests.mutation.patterns import PatternError  # noqa: E402
from tests.mutation.systematic import changes, lines  # noqa: E402

SYSTEMATIC_FOLDERS = (
    *("ortho", "params", "optim", "state", "agree", "routing", "models", "clipping", "qk_clip", "metrics"),
    *("execute", "plan", "layout", "transport"),
)
SYSTEMATIC_FILES = ("matrices.py",)
# Texts, sizes and seconds, most of which may be otherwise; adapters.
NOT_SYSTEMATIC = ("cli", "doctor", "integrations", "simulate")

# Tests of a file, nearest first. The first entry that the path starts with counts.
_ORTHO = ("tests/ortho/test_orthogonalize.py", "tests/ortho/test_blocks.py", "tests/ortho/test_cost.py")
_RATIONAL = "tests/ortho/test_rational.py"
_STEP = ("tests/optim", "tests/params", "tests/state", "tests/execute", "tests/matrices", "tests/plan")
TESTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("meshmuon/ortho/remez.py", ("tests/ortho/test_remez.py", "tests/ortho/test_schemes.py")),
    ("meshmuon/ortho/schemes.py", ("tests/ortho/test_schemes.py", "tests/ortho/test_orthogonalize.py", _RATIONAL)),
    ("meshmuon/ortho/cost.py", ("tests/ortho/test_cost.py", "tests/ortho/kernels/test_products.py", _RATIONAL)),
    (
        "meshmuon/ortho/blocks.py",
        ("tests/ortho/test_blocks.py", "tests/ortho/test_cost.py", "tests/ortho/test_orthogonalize.py", _RATIONAL),
    ),
    ("meshmuon/ortho/rational.py", (_RATIONAL,)),
    ("meshmuon/ortho/choice.py", (_RATIONAL,)),
    ("meshmuon/ortho/kernels/inverse.py", (_RATIONAL,)),
    ("meshmuon/ortho/kernels/panels.py", ("tests/ortho/test_cost.py", "tests/ortho/kernels/test_products.py", _RATIONAL)),
    ("meshmuon/ortho/aligned.py", ("tests/test_rounding.py",)),
    ("meshmuon/ortho/workspace.py", ("tests/ortho/test_workspace.py", *_ORTHO)),
    ("meshmuon/ortho/kernels/products.py", ("tests/ortho/kernels/test_products.py", *_ORTHO, "tests/test_rounding.py")),
    ("meshmuon/ortho/kernels/triton_symmetric.py", ("tests/ortho/kernels/test_triton_symmetric.py",)),
    ("meshmuon/ortho/", (*_ORTHO, _RATIONAL, "tests/ortho/test_workspace.py", "tests/test_rounding.py")),
    (
        "meshmuon/execute/elementwise.py",
        (
            "tests/execute/test_shard_views.py",
            "tests/execute/test_portions.py",
            "tests/test_rounding.py",
            "tests/execute",
            "tests/optim",
        ),
    ),
    ("meshmuon/execute/one_pass.py", ("tests/execute/test_portions.py",)),
    ("meshmuon/execute/portions.py", ("tests/execute/test_portions.py", "tests/execute/test_rounding_of_weights.py")),
    ("meshmuon/execute/small_stack.py", ("tests/execute/test_portions.py", "tests/execute/test_memory.py")),
    ("meshmuon/execute/rounding.py", ("tests/execute/test_rounding_of_weights.py", "tests/optim/test_stochastic_rounding.py")),
    ("meshmuon/execute/rule_state.py", ("tests/execute/test_rule_memory.py", "tests/dist/test_rules.py")),
    ("meshmuon/execute/data_parallel.py", ("tests/execute/test_executor.py", "tests/dist/test_dist_muon.py")),
    ("meshmuon/execute/ortho_batch.py", ("tests/params/test_rules.py", "tests/execute")),
    ("meshmuon/execute/", ("tests/execute", "tests/optim", "tests/plan")),
    ("meshmuon/plan/", ("tests/plan", "tests/execute", "tests/optim")),
    ("meshmuon/matrices.py", ("tests/matrices", "tests/models/test_contents.py", "tests/optim", "tests/execute")),
    ("meshmuon/layout/", ("tests/layout", "tests/plan", "tests/execute")),
    ("meshmuon/transport/", ("tests/transport", "tests/agree", "tests/dist")),
    ("meshmuon/doctor/", ("tests/doctor/test_parts.py", "tests/doctor")),
    ("meshmuon/cli/", ("tests/doctor/test_command.py",)),
    ("meshmuon/checkpoint.py", ("tests/checkpoint",)),
    ("meshmuon/migrate.py", ("tests/migrate",)),
    ("meshmuon/clipping/", ("tests/clipping",)),
    ("meshmuon/metrics/spectra.py", ("tests/metrics/test_spectra.py", "tests/metrics/test_metrics.py")),
    ("meshmuon/metrics/alarms.py", ("tests/metrics/test_alarms.py",)),
    ("meshmuon/metrics/writers.py", ("tests/metrics/test_writers.py",)),
    ("meshmuon/metrics/", ("tests/metrics/test_metrics.py", "tests/metrics/test_layouts.py")),
    ("meshmuon/qk_clip/", ("tests/qk_clip",)),
    ("meshmuon/models/", ("tests/models/test_contents.py", "tests/models/test_parts.py", "tests/models", "tests/routing")),
    ("meshmuon/routing/", ("tests/routing", "tests/models/test_contents.py", "tests/optim")),
    ("meshmuon/optim/collect.py", ("tests/optim/test_collector.py", "tests/agree/test_agreement.py", *_STEP)),
    ("meshmuon/optim/group_snapshot.py", ("tests/optim/test_collector.py", *_STEP)),
    ("meshmuon/params/rules.py", ("tests/params/test_rules.py",)),
    ("meshmuon/agree/planner.py", ("tests/agree", "tests/dist", "tests/optim")),
    ("meshmuon/agree/local_planner.py", ("tests/agree", "tests/dist", "tests/optim")),
    ("meshmuon/agree/identity.py", ("tests/agree/test_identity.py",)),
    ("meshmuon/agree/state_presence.py", ("tests/agree/test_lost_state.py",)),
    ("meshmuon/agree/link.py", ("tests/faults/test_new_process_group.py",)),
    ("meshmuon/agree/differences.py", ("tests/agree", "tests/dist")),
    ("meshmuon/optim/dist_muon.py", ("tests/dist/test_dist_muon.py",)),
    ("meshmuon/params/dtensors.py", ("tests/params", "tests/optim", "tests/dist")),
    ("meshmuon/device.py", ("tests/test_device.py", "tests/happens_before")),
    ("meshmuon/torch_compat.py", ("tests/test_torch_compat.py", "tests/optim/test_overwritten.py")),
    ("meshmuon/", _STEP),
)


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    before: str  # the changed line or lines
    what: str  # "old -> new"
    source: bytes

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}    in: {self.before}"


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    caught_by: str  # name of the first failing test, "timeout", or "" for a survivor
    seconds: float


def curated_mutants() -> list[Mutant]:
    """The curated list; a pattern that does not match exactly one place is an error."""
    mutants = []
    for curated in CURATED:
        try:
            mutated = curated.mutate(ROOT)
        except PatternError as error:
            sys.exit(f"{error}\nUpdate tests/mutation/curated.")
        what = " ".join(f"{mutated.old} -> {mutated.new}".split())
        mutants.append(Mutant(curated.file, mutated.line, f"{curated.function}()", what, mutated.source.encode()))
    return mutants


def systematic_mutants() -> tuple[list[Mutant], list[tuple[Mutant, Equivalent]]]:
    """All systematic mutations: those to try, and those declared equivalent."""
    tried: list[Mutant] = []
    equivalent: list[tuple[Mutant, Equivalent]] = []
    package = ROOT / "meshmuon"
    paths = [path for folder in SYSTEMATIC_FOLDERS for path in sorted((package / folder).rglob("*.py"))]
    for path in (*paths, *(package / file for file in SYSTEMATIC_FILES)):
        file, source = path.relative_to(ROOT).as_posix(), path.read_bytes()
        texts = list(lines(source))
        for change in changes(source):
            what = f"{change.old} -> {change.new}"
            mutant = Mutant(file, change.line, texts[change.line - 1], what, change.apply(source))
            declared = _declared(mutant)
            if declared is None:
                tried.append(mutant)
            else:
                equivalent.append((mutant, declared))
    return tried, equivalent


def _declared(mutant: Mutant) -> Equivalent | None:
    for equivalent in EQUIVALENT:
        same_line = equivalent.file == mutant.file and equivalent.line == mutant.before
        if same_line and equivalent.mutation in ("", mutant.what):
            return equivalent
    return None


def tests_of(file: str) -> tuple[str, ...]:
    """The tests to run for a file."""
    return next(tests for prefix, tests in TESTS if file.startswith(prefix))


class Copy:
    """A working copy of the package and its tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("meshmuon", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        shutil.copy(ROOT / "pyproject.toml", folder)

    def run(self, arguments: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """Runs pytest on the copy."""
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH", "")]))
        # One thread: several mutants run side by side. No bytecode: a file may change twice within one second.
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=no", "-rfE", *arguments]
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=timeout, check=False)

    def try_mutant(self, mutant: Mutant, excluded: Iterable[str], timeout: float) -> Verdict:
        """Applies a mutant, runs its tests until one fails, and takes it back."""
        target, begin = self.folder / mutant.file, time.monotonic()
        original = target.read_bytes()
        target.write_bytes(mutant.source)
        try:
            deselect = [part for test in excluded for part in ("--deselect", test)]
            done = self.run(["-x", *tests_of(mutant.file), *deselect], timeout)
            caught = "" if done.returncode == 0 else next(iter(failures(done.stdout)), "the run itself")
        except subprocess.TimeoutExpired:
            caught = "timeout"
        finally:
            target.write_bytes(original)
        return Verdict(mutant, caught, time.monotonic() - begin)


def failures(output: str) -> list[str]:
    """The tests that pytest's summary names as failed."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, flags=re.MULTILINE)


def baseline(copy: Copy, files: Iterable[str]) -> list[str]:
    """The tests that fail without any mutation: they would catch everything."""
    tests = sorted({test for file in files for test in tests_of(file)})
    done = copy.run(tests, timeout=1800)
    broken = failures(done.stdout)
    if done.returncode not in (0, 1):
        sys.exit(f"the tests do not run at all:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return broken


def progress(done: int, total: int, survived: int, begin: float) -> None:
    filled = 30 * done // max(total, 1)
    left = (time.monotonic() - begin) / max(done, 1) * (total - done) / 60
    bar = f"[{'#' * filled}{'.' * (30 - filled)}] {done}/{total}  caught {done - survived}  survived {survived}"
    end = "" if sys.stderr.isatty() and done < total else "\n"
    print(f"\r{bar}  {left:.0f} min left", end=end, file=sys.stderr, flush=True)


def try_all(mutants: Sequence[Mutant], jobs: int, timeout: float) -> tuple[list[Verdict], list[str]]:
    """Verdicts of all mutants, and the tests that were left out because they fail anyway."""
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        first = Copy(Path(folder, "0"))
        print("running the tests without any mutation ...", file=sys.stderr, flush=True)
        broken = baseline(first, {mutant.file for mutant in mutants})
        copies.put(first)
        for index in range(1, jobs):
            copies.put(Copy(Path(folder, str(index))))

        def task(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                return copy.try_mutant(mutant, broken, timeout)
            finally:
                copies.put(copy)

        begin = time.monotonic()
        with ThreadPoolExecutor(jobs) as pool:
            for future in as_completed([pool.submit(task, mutant) for mutant in mutants]):
                verdicts.append(future.result())
                progress(len(verdicts), len(mutants), sum(not verdict.caught_by for verdict in verdicts), begin)
    return sorted(verdicts, key=lambda verdict: (verdict.mutant.file, verdict.mutant.line, verdict.mutant.what)), broken


def report(verdicts: Sequence[Verdict], equivalent: Sequence[tuple[Mutant, Equivalent]], broken: Sequence[str]) -> str:
    """Markdown: caught ÷ tried per file, survivors, declared equivalents, tests left out."""
    rows = ["| file | caught | tried |", "|---|---|---|"]
    for file in sorted({verdict.mutant.file for verdict in verdicts}):
        of_file = [verdict for verdict in verdicts if verdict.mutant.file == file]
        rows.append(f"| {file} | {sum(bool(verdict.caught_by) for verdict in of_file)} | {len(of_file)} |")
    rows.append(f"| **all** | **{sum(bool(verdict.caught_by) for verdict in verdicts)}** | **{len(verdicts)}** |")
    survivors = [verdict.mutant for verdict in verdicts if not verdict.caught_by]
    rows += ["", "Survivors:" if survivors else "No survivors.", *(f"- {mutant}" for mutant in survivors)]
    hung = [verdict.mutant for verdict in verdicts if verdict.caught_by == "timeout"]
    rows += ["", "Caught by the timeout alone:", *(f"- {mutant}" for mutant in hung)] if hung else []
    if equivalent:
        rows += ["", "Declared equivalent, not tried:", *(f"- {mutant} ({entry.reason})" for mutant, entry in equivalent)]
    rows += ["", "Left out because they fail without any mutation:", *(f"- {test}" for test in broken)] if broken else []
    return "\n".join(rows) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="only mutants whose file or change contains a TEXT"
    )
    parser.add_argument("--kind", choices=("both", "curated", "systematic"), default="both")
    parser.add_argument("--sample", type=int, default=60, metavar="N", help="how many systematic mutants, -1 for all (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried at a time (2)")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for the tests of one mutant (300)")
    parser.add_argument("--list", action="store_true", help="show the mutants and stop")
    parser.add_argument("--report", type=Path, default=ROOT / "runs" / "mutants.md", help="where the result is written")
    return parser.parse_args()


def main() -> int:
    options = parse()

    def chosen(mutant: Mutant) -> bool:
        return any(text in str(mutant) for text in options.only)

    mutants = [mutant for mutant in curated_mutants() if chosen(mutant)] if options.kind != "systematic" else []
    equivalent: list[tuple[Mutant, Equivalent]] = []
    if options.kind != "curated":
        systematic, declared = systematic_mutants()
        systematic = [mutant for mutant in systematic if chosen(mutant)]
        if 0 <= options.sample < len(systematic):
            systematic = random.Random(options.seed).sample(systematic, options.sample)
        mutants += systematic
        equivalent = [(mutant, entry) for mutant, entry in declared if chosen(mutant)]
    if options.list:
        print(*mutants, sep="\n")
        return 0
    verdicts, broken = try_all(mutants, options.jobs, options.timeout)
    text = report(verdicts, equivalent, broken)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(text)
    print(text)
    return 0 if all(verdict.caught_by for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
