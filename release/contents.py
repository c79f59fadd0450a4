"""Compares what a wheel and an sdist contain with the repository: ``python release/contents.py dist``.

The wheel must hold every file of ``meshmuon/`` and its metadata, and nothing else. The sdist must hold the same
package, what builds it, and neither tests, benchmarks nor examples. Exit code 1 if not.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BESIDE_THE_PACKAGE = {"CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg"}


def package_files() -> set[str]:
    """Files of ``meshmuon/`` relative to the repository, without what Python and editors leave there."""
    paths = (path for path in (ROOT / "meshmuon").rglob("*") if path.is_file())
    return {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if "__pycache__" not in path.parts and not path.name.startswith(".")
    }


def differences(shown: str, there: Iterable[str], wanted: set[str], also: set[str]) -> list[str]:
    """One line for each file that is missing or foreign. ``also`` may be there."""
    there = set(there)
    missing = [f"{shown}: {name} is missing" for name in sorted(wanted - there)]
    return missing + [f"{shown}: {name} does not belong there" for name in sorted(there - wanted - also)]


def wheel_problems(wheel: Path) -> list[str]:
    """What is wrong with the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    wanted = {"METADATA", "entry_points.txt", "licenses/LICENSE"}
    missing = wanted - {name.split("/", 1)[1] for name in metadata}
    found = [f"{wheel.name}: the metadata lacks {name}" for name in sorted(missing)]
    return found + differences(wheel.name, set(names) - metadata, package_files(), set())


def sdist_problems(sdist: Path) -> list[str]:
    """What is wrong with the files of an sdist."""
    with tarfile.open(sdist) as archive:
        names = [member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()]
    built = {name for name in names if name.startswith("meshmuon.egg-info/")}
    return differences(
        sdist.name, names, package_files() | {"LICENSE", "README.md", "pyproject.toml"}, BESIDE_THE_PACKAGE | built
    )


def main(folder: Path) -> int:
    """Prints what is wrong with the one wheel and the one sdist in a folder. Returns the exit code."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    found = (
        [] if (len(wheels), len(sdists)) == (1, 1) else [f"{folder} has {len(wheels)} wheels and {len(sdists)} sdists"]
    )
    found += [problem for wheel in wheels for problem in wheel_problems(wheel)]
    found += [problem for sdist in sdists for problem in sdist_problems(sdist)]
    print("\n".join(found) or f"{folder}: {len(package_files())} files of the package in both, nothing foreign")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
