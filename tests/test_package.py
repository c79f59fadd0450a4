"""The metadata, and the comparison of built files with the repository. ``make package`` builds and tries the wheel
itself.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import meshmuon

ROOT = Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()
METADATA = ("METADATA", "entry_points.txt", "licenses/LICENSE")


@pytest.fixture(scope="module")
def contents() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contents", ROOT / "release" / "contents.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def extras() -> set[str]:
    section = PROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0]
    return set(re.findall(r"^(\w+) = \[", section, flags=re.MULTILINE))


def test_extras_exist_and_refer_to_each_other() -> None:
    assert {"demo", "plan", "kernels", "hf", "lightning", "torchtitan", "docs", "all"} <= extras()
    used = {name for names in re.findall(r"meshmuon\[([\w,]+)\]", PROJECT) for name in names.split(",")}
    assert used <= extras()


def write(folder: Path, names: set[str]) -> tuple[Path, Path]:
    """A wheel and an sdist with these files of the repository, all empty."""
    wheel, sdist = folder / "meshmuon-1-py3-none-any.whl", folder / "meshmuon-1.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in [*sorted(names), *(f"meshmuon-1.dist-info/{name}" for name in METADATA)]:
            archive.writestr(name, "")
    with tarfile.open(sdist, "w:gz") as packed:
        for name in sorted(names | {"LICENSE", "README.md", "pyproject.toml"}):
            packed.addfile(tarfile.TarInfo(f"meshmuon-1/{name}"))
    return wheel, sdist


def test_whole_packages_pass(contents: ModuleType, tmp_path: Path) -> None:
    files = contents.package_files()
    assert {"meshmuon/py.typed", "meshmuon/optim/muon.py"} <= files
    write(tmp_path, files)
    assert contents.main(tmp_path) == 0


@pytest.mark.parametrize(
    ("missing", "foreign"),
    [("meshmuon/py.typed", None), ("meshmuon/optim/muon.py", None), (None, "tests/test_bounds.py")],
)
def test_missing_and_foreign_files_are_seen(
    contents: ModuleType, tmp_path: Path, missing: str | None, foreign: str | None
) -> None:
    wheel, sdist = write(tmp_path, contents.package_files() - {missing} | ({foreign} if foreign else set()))
    said = f"{missing} is missing" if missing else f"{foreign} does not belong there"
    assert contents.wheel_problems(wheel) == [f"{wheel.name}: {said}"]
    assert contents.sdist_problems(sdist) == [f"{sdist.name}: {said}"]
    assert contents.main(tmp_path) == 1


def test_public_names_are_those_that_type_checkers_see() -> None:
    """They are imported when they are first asked for; type checkers read the imports that are there for them."""
    tree = ast.parse((ROOT / "meshmuon" / "__init__.py").read_text())
    for_checkers = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in for_checkers.body if isinstance(node, ast.ImportFrom) and node.level]
    seen = {alias.name: importlib.import_module(f"meshmuon.{node.module}") for node in imports for alias in node.names}
    assert sorted(seen) == sorted(meshmuon.__all__)
    for name, module in seen.items():
        assert getattr(meshmuon, name) is getattr(module, name)
        assert name in dir(meshmuon)
    with pytest.raises(AttributeError, match="module 'meshmuon' has no attribute 'Moun'"):
        getattr(meshmuon, "Moun")  # noqa: B009


IN_A_NEW_PROCESS = """
import sys, meshmuon
assert "torch" not in sys.modules
meshmuon.ortho.keller, meshmuon.optim.Muon, meshmuon.Muon
assert not [name for name in sys.modules if name.startswith("meshmuon.tools")], "a step needs no tool"
from meshmuon import *
Muon, DistMuon
"""


def test_names_and_modules_come_when_they_are_asked_for() -> None:
    subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], check=True, timeout=60)


@pytest.mark.parametrize("room", ["ortho", "plan", "metrics", "checkpoint", "migrate", "integrations.hf", "clipping"])
def test_any_room_may_be_imported_first(room: str) -> None:
    subprocess.run([sys.executable, "-c", f"import meshmuon.{room}"], check=True, timeout=60)
