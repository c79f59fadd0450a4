"""The public names of meshmuon, read from the source: what the reference must show and what must have a docstring.

Public are the classes and functions in ``__all__`` of ``meshmuon``, ``meshmuon.metrics``, ``meshmuon.checkpoint`` and
``meshmuon.migrate``, and those without a leading underscore of the adapters in ``meshmuon.integrations``. Nothing is
imported: the adapters need trainers that an environment may lack.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "meshmuon"
EXPORTING = {
    "meshmuon": PACKAGE / "__init__.py",
    "meshmuon.metrics": PACKAGE / "metrics" / "__init__.py",
    "meshmuon.checkpoint": PACKAGE / "checkpoint.py",
    "meshmuon.migrate": PACKAGE / "migrate.py",
}
# which they share
ADAPTERS = [path for path in sorted((PACKAGE / "integrations").glob("[!_]*.py")) if path.stem != "factory"]

_Definition = ast.ClassDef | ast.FunctionDef


def public_names() -> dict[str, _Definition]:
    """Full name of every public class and function, with its definition."""
    names: dict[str, _Definition] = {}
    for dotted, module in EXPORTING.items():
        exports = {name: _definition(source, name) for name, source in _exports(module).items()}
        names |= {f"{dotted}.{name}": node for name, node in exports.items() if node is not None}
    for module in ADAPTERS:
        for node in _tree(module).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                names[f"meshmuon.integrations.{module.stem}.{node.name}"] = node
    return names


def undocumented() -> list[str]:
    """Public names without a docstring, and their public methods. A setter needs none beside its getter."""
    missing = []
    for name, node in public_names().items():
        members = (
            [child for child in node.body if isinstance(child, ast.FunctionDef)]
            if isinstance(node, ast.ClassDef)
            else []
        )
        public = [(f"{name}.{member.name}", member) for member in members if not member.name.startswith("_")]
        documented = {full for full, definition in [(name, node), *public] if ast.get_docstring(definition)}
        missing += [full for full in dict.fromkeys([name, *(full for full, _ in public)]) if full not in documented]
    return missing


def shown_in_reference() -> list[str]:
    """Names that the pages of docs/api show, in order, once for each time."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    return re.findall(r"^\.\. auto(?:class|function|exception):: (\S+)", text, flags=re.MULTILINE)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _exports(module: Path) -> dict[str, Path]:
    """The names of ``__all__``, each with the module that it is imported from."""
    body = _tree(module).body
    lists = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    sources = _imports(module)
    return {name: sources[name] for name in ast.literal_eval(lists[0])}


def _imports(module: Path) -> dict[str, Path]:
    """Names that a module imports relatively, each with the file it comes from."""
    found = {}
    for node in ast.walk(_tree(module)):  # also where only type checkers look
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = module.parents[node.level - 1]
            base = folder.joinpath(*(node.module or "").split("."))
            source = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            found |= {alias.asname or alias.name: source for alias in node.names}
    return found


def _definition(module: Path, name: str) -> _Definition | None:
    """The class or function of this name, also where the module only passes it on; None for any other value."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    source = _imports(module).get(name)
    return None if source is None else _definition(source, name)
