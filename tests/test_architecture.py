"""The rooms of the package: imports point down the list only, and what is pure stays pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "meshmuon"

# From the front door to the cellar. A room may import what stands below it, and itself.
ROOMS = (
    "__init__",
    "cli",
    "simulate",
    "integrations",
    "checkpoint",
    "optim",
    "execute",
    "transport",
    "plan",
    "layout",
    "matrices",
    "ortho",
    "device",
    "errors",
)
PURE = {"plan", "layout", "matrices"}  # no tensors there


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def imported_rooms(path: Path) -> Iterator[tuple[str, int]]:
    """(room, line) of every import from inside the package, also those inside functions."""
    package = ("meshmuon", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            target = (*base, *(node.module.split(".") if node.module else ()))
            names = [(*target, alias.name) for alias in node.names] if target == ("meshmuon",) else [target]
        elif isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == "meshmuon" and len(name) > 1:
                yield name[1], node.lineno


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = ROOMS.index(room_of(path))
    upward = [f"line {line}: {room}" for room, line in imported_rooms(path) if ROOMS.index(room) < here]
    assert not upward, f"{path.relative_to(PACKAGE)} imports from above: {upward}"


@pytest.mark.parametrize("path", [p for p in MODULES if room_of(p) in PURE], ids=lambda path: str(path.relative_to(PACKAGE)))
def test_pure_rooms_know_no_tensors(path: Path) -> None:
    imports = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert not any(name.split(".")[0] == "torch" for name in imports)


def test_every_room_is_listed() -> None:
    assert {room_of(path) for path in MODULES} <= set(ROOMS)


def test_an_upward_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself can fail: relative, absolute and late imports are all seen."""
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "ortho").mkdir()
    module = tmp_path / "ortho" / "bad.py"
    module.write_text("from ..optim import Muon\nimport meshmuon.plan\ndef f():\n    from meshmuon import execute\n")
    assert [room for room, _ in imported_rooms(module)] == ["optim", "plan", "execute"]


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    """pytest leaves out folders by name, among them "dist" by default."""
    folders = {path.parent.name for path in Path(__file__).parent.rglob("test_*.py")}
    assert not folders & set(pytestconfig.getini("norecursedirs"))
