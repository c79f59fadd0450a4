"""Breaks the package in one place at a time and counts what the tests catch.

    python tests/mutation/run.py                                    sixty mutants, drawn over the core
    python tests/mutation/run.py --seed 7 --only meshmuon/agree/    others, of one room
    python tests/mutation/run.py --list --sample -1                 show all

Each mutant is a change in a copy of the package. The tests of the changed file's room run until the first failure; a
mutant that no test notices survives. Not every survivor is a fault of the tests: some changes cannot be noticed.
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

from tests.mutation.systematic import Change, changes  # noqa: E402

# Texts, sizes and seconds, most of which may be otherwise; adapters; converters; what differs on a GPU.
OUTSIDE_CORE = (
    "tools",
    "cli",
    "doctor",
    "integrations",
    "simulate",
    "migrate.py",
    "checkpoint.py",
    "device.py",
    "torch_compat.py",
)

# A mutant is tried on the folder of its room, tests/<room>, then on these.
_STEP = ("optim", "execute", "dist")
FURTHER_TESTS: dict[str, tuple[str, ...]] = {
    "ortho": ("test_rounding.py",),
    "layout": ("plan", "execute"),
    "plan": ("execute", "optim"),
    "execute": ("optim", "dist", "test_rounding.py"),
    "transport": ("agree", "faults", "dist"),
    "agree": ("faults", "dist", "optim"),
    "state": ("checkpoint", *_STEP),
    "models": ("routing",),
    "routing": ("models", "optim"),
    "optim": ("state", "agree", "dist"),
}


@dataclass(frozen=True)
class Mutant:
    file: str
    change: Change
    source: bytes  # the file without the change

    def __str__(self) -> str:
        line = self.source.splitlines()[self.change.line - 1].decode().strip()
        return f"{self.file}:{self.change.line}: {self.change.old} -> {self.change.new}    in: {line}"


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    caught_by: str  # name of the first failing test, "timeout", or "" for a survivor
    seconds: float


def core_mutants() -> list[Mutant]:
    package = ROOT / "meshmuon"
    inside = [path for path in sorted(package.rglob("*.py")) if path.relative_to(package).parts[0] not in OUTSIDE_CORE]
    sources = [(path.relative_to(ROOT).as_posix(), path.read_bytes()) for path in inside]
    return [Mutant(file, change, source) for file, source in sources for change in changes(source)]


def chosen_tests(file: str) -> list[str]:
    """What to run for a file of the package: tests of its name first, then its room's, then those of
    ``FURTHER_TESTS``.
    """
    path, tests = Path(file), ROOT / "tests"
    room = Path(path.parts[1]).stem
    same_name = sorted(tests.glob(f"{room}/**/test_{path.stem}*.py"))
    folders = [tests / name for name in (room, *FURTHER_TESTS.get(room, _STEP))]
    return [str(chosen.relative_to(ROOT)) for chosen in (*same_name, *folders) if chosen.exists()]


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
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "--tb=no",
            "-rfE",
            *arguments,
        ]
        return subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def try_mutant(self, mutant: Mutant, excluded: Iterable[str], timeout: float) -> Verdict:
        """Applies a mutant, runs its tests until one fails, and takes it back."""
        target, begin = self.folder / mutant.file, time.monotonic()
        target.write_bytes(mutant.change.apply(mutant.source))
        try:
            deselect = [part for test in excluded for part in ("--deselect", test)]
            done = self.run(["-x", *chosen_tests(mutant.file), *deselect], timeout)
            caught = "" if done.returncode == 0 else next(iter(failures(done.stdout)), "the run itself")
        except subprocess.TimeoutExpired:
            caught = "timeout"
        finally:
            target.write_bytes(mutant.source)
        return Verdict(mutant, caught, time.monotonic() - begin)


def failures(output: str) -> list[str]:
    """The tests that pytest's summary names as failed."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, flags=re.MULTILINE)


def failing_anyway(copy: Copy, files: Iterable[str]) -> list[str]:
    """The tests that fail without any mutation: they would catch everything."""
    done = copy.run(sorted({test for file in files for test in chosen_tests(file)}), timeout=1800)
    if done.returncode not in (0, 1):
        sys.exit(f"the tests do not run at all:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return failures(done.stdout)


def try_all(mutants: Sequence[Mutant], jobs: int, timeout: float, *, trusted: bool) -> tuple[list[Verdict], list[str]]:
    """Verdicts of all mutants, and the tests that were left out because they fail anyway, unless these are
    ``trusted``.
    """
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for index in range(jobs):
            copies.put(Copy(Path(folder, str(index))))
        broken: list[str] = []
        if not trusted:
            print("running the tests without any mutation ...", flush=True)
            first = copies.get()
            broken = failing_anyway(first, {mutant.file for mutant in mutants})
            copies.put(first)

        def task(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                return copy.try_mutant(mutant, broken, timeout)
            finally:
                copies.put(copy)

        for future in as_completed([pool.submit(task, mutant) for mutant in mutants]):
            verdict = future.result()
            verdicts.append(verdict)
            done = f"{len(verdicts)}/{len(mutants)} {verdict.seconds:4.0f} s"
            print(f"{done} {verdict.caught_by or 'SURVIVES'}: {verdict.mutant}", flush=True)
    return sorted(verdicts, key=lambda verdict: str(verdict.mutant)), broken


def report(verdicts: Sequence[Verdict], broken: Sequence[str]) -> str:
    """Markdown: caught ÷ tried per room, survivors, tests left out."""
    rows = ["| room | caught | tried |", "|---|---|---|"]
    by_room: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_room.setdefault(verdict.mutant.file.split("/")[1], []).append(verdict)
    for room, of_room in (*sorted(by_room.items()), ("**all**", list(verdicts))):
        rows.append(f"| {room} | {sum(bool(verdict.caught_by) for verdict in of_room)} | {len(of_room)} |")
    survivors = [verdict.mutant for verdict in verdicts if not verdict.caught_by]
    rows += ["", "Survivors:" if survivors else "No survivors.", *(f"- {mutant}" for mutant in survivors)]
    hung = [verdict.mutant for verdict in verdicts if verdict.caught_by == "timeout"]
    rows += ["", "Caught by the timeout alone:", *(f"- {mutant}" for mutant in hung)] if hung else []
    rows += (
        ["", "Left out because they fail without any mutation:", *(f"- {test}" for test in broken)] if broken else []
    )
    return "\n".join(rows) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="mutants whose file or change contains a TEXT"
    )
    parser.add_argument("--sample", type=int, default=60, metavar="N", help="how many mutants, -1 for all (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried at a time (2)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="for the tests of one mutant (300)"
    )
    parser.add_argument(
        "--trust", action="store_true", help="do not look first for tests that fail without any mutation"
    )
    parser.add_argument("--list", action="store_true", help="show the mutants and stop")
    parser.add_argument("--report", type=Path, default=ROOT / "runs" / "mutants.md", help="where the result is written")
    return parser.parse_args()


def main() -> int:
    options = parse()
    mutants = [mutant for mutant in core_mutants() if any(text in str(mutant) for text in options.only)]
    if 0 <= options.sample < len(mutants):
        mutants = random.Random(options.seed).sample(mutants, options.sample)
    if options.list:
        print(*mutants, sep="\n")
        return 0
    verdicts, broken = try_all(mutants, options.jobs, options.timeout, trusted=options.trust)
    text = report(verdicts, broken)
    options.report.parent.mkdir(parents=True, exist_ok=True)
    options.report.write_text(text)
    print(text)
    return 0 if all(verdict.caught_by for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
