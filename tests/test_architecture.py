"""The rooms of the package: imports point down the list only, and what is pure stays pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "meshmuon"

# From the front door to the cellar. A room may import what stands below it, and itself.
ROOMS = (
    "__init__",
    "checkpoint",
    "optim",
    "qk_clip",
    "clipping",
    "routing",
    "agree",
    "state",
    "params",
    "execute",
    "transport",
    "plan",
    "layout",
    "matrices",
    "ortho",
    "device",
    "torch_compat",
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


ENGINE = ("execute", "transport", "plan", "layout", "matrices")


def imports_inside(folder: Path) -> dict[str, set[str]]:
    """Module → the modules of the same room that it imports, also inside functions and for type checking only."""
    imports: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.level == 1]
        named = {name for node in nodes for name in ([node.module] if node.module else [alias.name for alias in node.names])}
        imports[path.stem] = {name for name in named if (folder / f"{name}.py").exists()}
    return imports


def cycle_in(imports: dict[str, set[str]]) -> set[str]:
    """The modules that are left when those that import none of the others are taken away again and again."""
    left = dict(imports)
    while leaves := [module for module, targets in left.items() if not targets & set(left)]:
        for module in leaves:
            del left[module]
    return set(left)


@pytest.mark.parametrize("room", ENGINE)
def test_modules_of_a_room_do_not_import_each_other_in_a_circle(room: str) -> None:
    assert not cycle_in(imports_inside(PACKAGE / room))


def test_a_circle_is_seen(tmp_path: Path) -> None:
    """The check itself can fail: an import for type checking only closes the circle."""
    (tmp_path / "plan.py").write_text("from .report import describe\n")
    (tmp_path / "report.py").write_text("if TYPE_CHECKING:\n    from .plan import Plan\n")
    (tmp_path / "routes.py").write_text("def f():\n    from . import plan\n")
    assert imports_inside(tmp_path) == {"plan": {"report"}, "report": {"plan"}, "routes": {"plan"}}
    assert cycle_in(imports_inside(tmp_path)) >= {"plan", "report"}


@pytest.mark.parametrize("path", [p for p in MODULES if room_of(p) in PURE], ids=lambda path: str(path.relative_to(PACKAGE)))
def test_pure_rooms_know_no_tensors(path: Path) -> None:
    imports = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert not any(name.split(".")[0] == "torch" for name in imports)


PRIVATE = {"_layout", "_local_tensor", "_mesh_resources", "_orig_mod", "_rank_map", "_spec", "_unsharded_param", "pg_names"}
PUBLIC = re.compile(r"__\w+__|_foreach_(?!utils)\w+")  # torch documents the latter in spite of the underscore


def private_names_of_torch(source: str) -> Iterator[tuple[str, int]]:
    """(name, line) of everything that belongs to torch alone: private modules, functions and attributes, also as strings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = (getattr(node, "module", None) or "") if not getattr(node, "level", 0) else ""
            names = [(f"{module}.{alias.name}" if module else alias.name) for alias in node.names]
            texts = [name for name in names if name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            text = re.sub(r".*[^\w.]", "", ast.unparse(node), flags=re.DOTALL)  # without calls and subscripts before it
            texts = [text] if text.split(".")[0] in ("torch", "dist", "c10d") else [f".{node.attr}"]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            texts = [f".{part}" for part in node.value.split(".")]
        else:
            continue
        for text in texts:
            first, *parts = text.split(".")
            hidden = [part for part in parts if part.startswith("_") and not PUBLIC.fullmatch(part)]
            if any(part in PRIVATE or (first and part in hidden) for part in parts):
                yield text, node.lineno


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.stem != "torch_compat"], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_private_parts_of_torch_are_in_one_module(path: Path) -> None:
    names = "._orig_mod" if path.stem == "param_groups" else ""  # there it is a component of parameters' names
    found = [f"line {line}: {name}" for name, line in private_names_of_torch(path.read_text()) if name != names]
    assert not found, f"{path.relative_to(PACKAGE)} uses what belongs into torch_compat: {found}"


def test_private_names_are_seen() -> None:
    """The check itself can fail."""
    source = (
        "import torch.utils._pytree\nfrom torch.utils._foreach_utils import x\nfrom torch.distributed.tensor import _y\n"
        'a = torch._C.z\nb = p._local_tensor\nc = attrgetter("_spec")\nd = dist.distributed_c10d._world\n'
        "e = torch._foreach_add_\nf = self._own\n"
    )
    assert sorted(line for _, line in set(private_names_of_torch(source))) == [1, 2, 3, 4, 4, 5, 6, 7]


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
