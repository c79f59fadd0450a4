"""The rooms of the package: imports point down the list only, and what is pure stays pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "meshmuon"

# Two halves, each from the front door to the cellar. A room may import what stands below it, and itself. The core
# trains, and stands below the tools: it imports nothing of them.
TOOLS = (
    "__main__",
    "migrate",
    "checkpoint",
    "tools/cli",
    "tools/simulate",
    "tools/doctor",
    "tools/predict",
    "tools/migrate",
    "tools/foreign_state",
    "tools/__init__",
)
CORE = (
    "integrations",
    "__init__",
    "optim",
    "metrics",
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
    "models",
    "matrices",
    "ortho",
    "device",
    "torch_compat",
    "errors",
    "dropped",
)
ROOMS = (*TOOLS, *CORE)
PURE = {"plan", "layout", "matrices"}  # no tensors there


def room_of(path: Path) -> str:
    return room_named(path.relative_to(PACKAGE).with_suffix("").parts)


def room_named(parts: tuple[str, ...]) -> str:
    """The room of a module, from the names after ``meshmuon``: ("tools", "cli", "plan") is in "tools/cli"."""
    return "/".join(parts[:2]) if parts[0] == "tools" else parts[0]


def imports_of(path: Path) -> Iterator[tuple[tuple[str, ...], int]]:
    """(dotted name from ``meshmuon`` on, line) of every import from inside the package, also those inside functions.

    ``from ..plan.cost import cost_of`` in ``meshmuon/optim/muon.py`` gives ("meshmuon", "plan", "cost", "cost_of").
    """
    package = ("meshmuon", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            names = [(*module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name[0] == "meshmuon" and len(name) > 1)


def imported_rooms(path: Path) -> Iterator[tuple[str, int]]:
    """(room, line) of every import from inside the package."""
    yield from ((room_named(name[1:]), line) for name, line in imports_of(path))


def private_imports(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything private that a module takes from another room, also as an attribute of a
    module.

    ``from ..plan import owners`` and then ``owners._heaviest`` counts as an import of ``_heaviest``.
    """
    here, modules = room_of(path), {}
    for name, line in imports_of(path):
        if room_named(name[1:]) != here:
            modules[name[-1]] = name
            if any(is_private(part) for part in name):
                yield ".".join(name), line
    tree = ast.parse(path.read_text())
    renamed = {
        alias.asname: alias.name.split(".")[-1]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if alias.asname
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and is_private(node.attr):
            module = modules.get(renamed.get(node.value.id, node.value.id))
            if module is not None:
                yield ".".join((*module, node.attr)), node.lineno


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    here = ROOMS.index(room_of(path))
    upward = [f"line {line}: {room}" for room, line in imported_rooms(path) if ROOMS.index(room) < here]
    assert not upward, f"{path.relative_to(PACKAGE)} imports from above: {upward}"


ROOT = PACKAGE.parent
FRONT_DOORS = [PACKAGE / room / "__init__.py" for room in ("execute", "layout", "models", "ortho", "plan", "transport")]


def taken_from(room: str) -> set[str]:
    """The names that some file imports from a room itself, rather than from one of its modules."""
    paths = [
        *MODULES,
        *(path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")),
    ]
    imports = re.compile(rf"from (?:\.+|meshmuon\.){room} import (\([^)]*\)|.*)")
    return {name for path in paths for names in imports.findall(path.read_text()) for name in re.findall(r"\w+", names)}


@pytest.mark.parametrize("path", FRONT_DOORS, ids=room_of)
def test_a_room_offers_what_somebody_takes(path: Path) -> None:
    """Its imports are the only list of what it offers, so that ruff finds no unused ones there."""
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    assert {alias.name for node in imports for alias in node.names} <= taken_from(room_of(path))


ENGINE = ("execute", "transport", "plan", "layout")


def imports_inside(folder: Path) -> dict[str, set[str]]:
    """Module → the modules of the same room that it imports, also inside functions and for type checking only."""
    imports: dict[str, set[str]] = {}
    for path in sorted(folder.glob("*.py")):
        nodes = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.level == 1
        ]
        named = {
            name for node in nodes for name in ([node.module] if node.module else [alias.name for alias in node.names])
        }
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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_names_stay_in_their_room(path: Path) -> None:
    private = [f"line {line}: {name}" for name, line in private_imports(path)]
    assert not private, f"{path.relative_to(PACKAGE)} uses what belongs to other rooms alone: {private}"


@pytest.mark.parametrize(
    "path", [p for p in MODULES if room_of(p) in PURE], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_pure_rooms_know_no_tensors(path: Path) -> None:
    imports = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert not any(name.split(".")[0] == "torch" for name in imports)


# The package may only become lighter: whoever makes a room smaller lowers its numbers, nobody raises them.
BUDGETS = {  # room of the house → the modules that are in it today, their most statements, their most lines
    "optim": (("optim", "params", "state", "__init__"), 2_995, 5_162),
    "step": (("execute", "agree"), 3_236, 5_556),
    "comm": (("transport",), 1_012, 1_548),
    "plan": (("plan",), 1_121, 1_789),
    "geometry": (("layout", "matrices"), 501, 845),
    "ortho": (("ortho",), 1_233, 2_238),
    "base": (("device", "torch_compat", "errors", "dropped"), 617, 1_167),
    "models": (("models", "routing"), 1_115, 1_870),
    "qk_clip": (("qk_clip",), 684, 1_162),
    "clipping": (("clipping",), 321, 530),
    "metrics": (("metrics",), 473, 776),
    "integrations": (("integrations",), 231, 449),
    "tools": (("tools", "__main__", "checkpoint", "migrate"), 3_990, 6_439),
}


def size_of(modules: tuple[str, ...]) -> tuple[int, int]:
    """Statements, as ``ast`` counts them, and lines of all files of these modules and folders."""
    sources = [path.read_text() for path in MODULES if path.relative_to(PACKAGE).with_suffix("").parts[0] in modules]
    statements = sum(isinstance(node, ast.stmt) for source in sources for node in ast.walk(ast.parse(source)))
    return statements, sum(source.count("\n") for source in sources)


@pytest.mark.parametrize("room", BUDGETS)
def test_no_room_grows(room: str) -> None:
    modules, *most = BUDGETS[room]
    assert all(size <= limit for size, limit in zip(size_of(modules), most, strict=True)), size_of(modules)


def test_every_module_is_in_one_room_with_a_budget() -> None:
    counted = [module for modules, *_ in BUDGETS.values() for module in modules]
    assert sorted(counted) == sorted({path.relative_to(PACKAGE).with_suffix("").parts[0] for path in MODULES})


PRIVATE = {
    "_layout",
    "_local_tensor",
    "_mesh_resources",
    "_orig_mod",
    "_rank_map",
    "_spec",
    "_unsharded_param",
    "pg_names",
}
PUBLIC = re.compile(r"__\w+__|_foreach_(?!utils)\w+")  # torch documents the latter in spite of the underscore


def private_names_of_torch(source: str) -> Iterator[tuple[str, int]]:
    """(name, line) of everything that belongs to torch alone: private modules, functions and attributes, also as
    strings.
    """
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
    names = "._orig_mod" if path.stem == "matrices" else ""  # there it is a component of parameters' names
    private = [f"line {line}: {name}" for name, line in private_names_of_torch(path.read_text()) if name != names]
    assert not private, f"{path.relative_to(PACKAGE)} uses what belongs into torch_compat: {private}"


def test_private_names_are_seen() -> None:
    """The check itself can fail."""
    source = (
        "import torch.utils._pytree\nfrom torch.utils._foreach_utils import x\nfrom torch.distributed.tensor import "
        "_y\n"
        'a = torch._C.z\nb = p._local_tensor\nc = attrgetter("_spec")\nd = dist.distributed_c10d._world\n'
        "e = torch._foreach_add_\nf = self._own\n"
    )
    assert sorted(line for _, line in set(private_names_of_torch(source))) == [1, 2, 3, 4, 4, 5, 6, 7]


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert not {name: modules for name, modules in places.items() if len(modules) > 1}


def test_the_list_has_exactly_the_rooms_that_exist() -> None:
    assert sorted(ROOMS) == sorted({room_of(path) for path in MODULES})
    assert set(ROOMS) > PURE


def test_an_upward_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself can fail: relative, absolute and late imports are all seen."""
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "ortho").mkdir()
    module = tmp_path / "ortho" / "bad.py"
    module.write_text("from ..optim import Muon\nimport meshmuon.plan\ndef f():\n    from meshmuon import execute\n")
    assert [room for room, _ in imported_rooms(module)] == ["optim", "plan", "execute"]


def test_a_private_name_of_another_room_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself can fail: names, modules and attributes of modules; not the room's own, and no
    ``__version__``.
    """
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path)
    (tmp_path / "optim").mkdir()
    module = tmp_path / "optim" / "bad.py"
    module.write_text(
        "from ..plan.owners import _heaviest\nfrom ..plan._cost import cost\nfrom ..plan import owners\n"
        "from ..transport import groups as made\nfrom .muon import _own\nfrom .. import __version__\n"
        "a = owners._lightest\nb = made._new_group\nc = owners.assign\nd = _own._inner\ne = self._planner\n"
        "def late():\n    from meshmuon.ortho import _late\n"
    )
    assert sorted((line, name.split(".")[-1]) for name, line in private_imports(module)) == [
        (1, "_heaviest"),
        (2, "cost"),
        (7, "_lightest"),
        (8, "_new_group"),
        (13, "_late"),
    ]


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    """pytest leaves out folders by name, among them "dist" by default."""
    folders = {path.parent.name for path in Path(__file__).parent.rglob("test_*.py")}
    assert not folders & set(pytestconfig.getini("norecursedirs"))
