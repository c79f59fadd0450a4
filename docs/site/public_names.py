"""The public names of meshmuon, read from the source: what the reference must show and what must have a docstring.

Public are ``__all__`` of ``meshmuon`` and of ``meshmuon.metrics``, and the functions and classes without a leading underscore of
``meshmuon.checkpoint``, of ``meshmuon.migrate`` and of the adapters in ``meshmuon.integrations``. Nothing is imported: the
adapters need trainers that an environment may lack.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "meshmuon"
EXPORTING = [PACKAGE, PACKAGE / "metrics"]
MODULES = [
    PACKAGE / "tools" / "checkpoint.py",
    PACKAGE / "tools" / "migrate.py",
    *sorted((PACKAGE / "integrations").glob("[!_]*.py")),
]
INTERNAL = {"factory"}  # shared by the adapters

_Definition = ast.ClassDef | ast.FunctionDef


def public_names() -> dict[str, _Definition]:
    """Full name of every public class and function, with its definition."""
    names: dict[str, _Definition] = {}
    for package in EXPORTING:
        dotted = ".".join(package.relative_to(PACKAGE.parent).parts)
        names |= {f"{dotted}.{name}": _definition(module, name) for name, module in _exports(package / "__init__.py").items()}
    for module in MODULES:
        dotted = ".".join(
            part for part in module.relative_to(ROOT).with_suffix("").parts if part != "tools"
        )  # as users import it
        for node in _tree(module).body if module.stem not in INTERNAL else []:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                names[f"{dotted}.{node.name}"] = node
    return names


def undocumented() -> list[str]:
    """Public names without a docstring, and their public methods. A setter needs none beside its getter."""
    missing = []
    for name, node in public_names().items():
        members = [child for child in node.body if isinstance(child, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else []
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


def _exports(init: Path) -> dict[str, Path]:
    """The names of ``__all__`` in an ``__init__.py``, each with the module that it is imported from."""
    body = _tree(init).body
    lists = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    sources = _imports(init)
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


def _definition(module: Path, name: str) -> _Definition:
    """The definition of a name, also where the module only passes it on."""
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    return _definition(_imports(module)[name], name)
