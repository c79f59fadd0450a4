"""Pages that name code or quote its messages cannot go stale: each name and each message is looked up in the
package.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import meshmuon

from .test_architecture import MODULES, imported_rooms, room_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "meshmuon"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]
LONGEST_LINE, LONGEST_CODE = 120, 130
OF_TORCH = {"ProcessGroup", "all_to_all_single"}


def table_cells(page: Path) -> Iterator[list[str]]:
    """The cells of every row of every table, without headings and rules."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    for row, below in zip(rows, [*rows[1:], ""], strict=True):
        if not set(row) <= set("|-: ") and not (below and set(below) <= set("|-: ")):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


@cache
def names_in_package() -> frozenset[str]:
    """Names of all modules, classes, functions, methods (``Class.method``), arguments and fields of the package."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        names |= {path.stem, path.parent.name}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                members = [member for member in node.body if isinstance(member, ast.FunctionDef)]
                names |= {node.name, *(f"{node.name}.{member.name}" for member in members)}
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return frozenset(names)


def missing_names(texts: list[str]) -> list[str]:
    """Those of the backticked texts that look like a path or a name and are neither in the repository nor in torch."""
    missing = []
    for text in texts:
        if re.fullmatch(r"(meshmuon|tests|examples|benchmarks|docs)(/[\w.]+)+", text):
            if not (ROOT / text).exists():
                missing.append(text)
        elif re.fullmatch(r"[A-Za-z_]\w*|[A-Z]\w*\.\w+", text) and text not in names_in_package() | OF_TORCH:
            missing.append(text)
    return missing


def test_architecture_names_what_exists() -> None:
    texts = [
        text for cells in table_cells(DOCS / "architecture.md") for text in re.findall(r"`([^`]+)`", " ".join(cells))
    ]
    assert len(texts) > 100
    assert not missing_names(texts)


def test_architecture_names_are_in_the_files_before_them() -> None:
    """``meshmuon/x.py`: `A`, `B.c``` in a table: ``A`` and ``B`` are made in that file."""
    cells = "\n".join(cell for cells in table_cells(DOCS / "architecture.md") for cell in cells)
    listed = re.findall(r"`(meshmuon/[\w/]+\.py)`: ((?:`[A-Za-z_][\w.]*`(?:, )?)+)", cells)
    assert len(listed) > 50
    for path, names in listed:
        tree = ast.parse((ROOT / path).read_text())
        made = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
        assigned = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
        names_in = (name for node in assigned for name in ast.walk(node) if isinstance(name, ast.Name))
        made |= {name.id for name in names_in if isinstance(name.ctx, ast.Store)}
        assert {name.split(".")[0] for name in re.findall(r"`([^`]+)`", names)} <= made, path


def test_the_walk_of_one_gradient_stays_short() -> None:
    walk = (DOCS / "architecture.md").read_text().split("## The walk of one gradient")[1].split("\n## ")[0]
    files = set(re.findall(r"`(meshmuon/[\w/]+\.py)`", walk))
    assert 20 < len(files) <= 25
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= 5_900


def test_the_drawing_of_the_rooms_shows_imports() -> None:
    arrows = re.findall(r"^ +(\w[\w& ]*) --> (\w[\w& ]*)$", (DOCS / "architecture.md").read_text(), flags=re.MULTILINE)
    drawn = {
        (source, target) for left, right in arrows for source in left.split(" & ") for target in right.split(" & ")
    }
    imports = {
        (room_of(path).split("/")[-1], room.split("/")[-1]) for path in MODULES for room, _ in imported_rooms(path)
    }
    imports |= {(source, "base") for source, target in imports if target in ("device", "torch_compat", "errors")}
    assert len(drawn) > 20
    assert not drawn - imports


def test_a_name_that_is_gone_is_seen() -> None:
    gone = ["meshmuon/optim/gone.py", "NoSuchClass", "Muon.no_such_method"]
    assert missing_names([*gone, "meshmuon/optim/muon.py", "MuonStep.step", 'replicas="share"']) == gone


def test_the_annotated_plan_is_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    match = re.search(
        r"```python\n(.*?)```\n+```text\n(.*?)```", (DOCS / "architecture.md").read_text(), flags=re.DOTALL
    )
    assert match
    exec(compile(match[1], "architecture.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == match[2]


@cache
def messages() -> tuple[str, ...]:
    """All text of the package but docstrings, with a NUL in place of each formatted value."""
    texts: list[str] = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside | docstrings:
                texts.append(node.value)
    return tuple(" ".join(text.split()) for text in texts if " " in text)


def is_said(phrase: str) -> bool:
    """Whether a message contains ``phrase``, in which … stands for a value or for left-out words."""
    pattern = re.compile(".*".join(re.escape(" ".join(part.split())) for part in phrase.split("…")))
    return any(pattern.search(message) for message in messages())


def quoted_phrases() -> list[str]:
    first = [re.findall(r"`([^`]+)`", cells[0]) for cells in table_cells(DOCS / "errors.md")]
    # the first table lists the classes
    return [text for texts in first for text in texts if text not in meshmuon.__all__]


ERROR_PHRASES = quoted_phrases()


def test_the_error_index_is_long() -> None:
    assert len(ERROR_PHRASES) > 100
    assert len(set(ERROR_PHRASES)) == len(ERROR_PHRASES)


@pytest.mark.parametrize("phrase", ERROR_PHRASES)
def test_error_index_quotes_what_is_raised(phrase: str) -> None:
    assert is_said(phrase), f"docs/errors.md quotes {phrase!r}, which no message of meshmuon says"


def test_a_message_that_is_gone_is_seen() -> None:
    assert is_said("there is no plan yet")
    assert is_said("group … has no")
    assert not is_said("there is no such message")
    assert not is_said("What the phases of a step")  # a docstring


def test_every_error_class_is_in_the_index() -> None:
    text = (DOCS / "errors.md").read_text()
    classes = [name for name in meshmuon.__all__ if name.endswith(("Error", "Warning"))]
    assert not [name for name in classes if f"`{name}`" not in text]


@cache
def all_tests() -> frozenset[str]:
    """Names of all tests of the repository."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "tests").rglob("*.py")]
    return frozenset(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    """By path, by file name in any folder, or by function; … leaves out the end of a name."""
    missing = []
    for text in re.findall(r"`([^`\n]+)`", page.read_text()):
        missing += [path for path in re.findall(r"\btests/[\w/.]*\w", text) if not (ROOT / path).exists()]
        for folder, name, ending in re.findall(r"(tests/(?:\w+/)*)?\b(test_\w+)(\.py|…)?", text):
            if ending == ".py":
                found = (ROOT / folder / f"{name}.py").exists() if folder else any((ROOT / "tests").rglob(f"{name}.py"))
            else:
                found = any(function.startswith(name) if ending else function == name for function in all_tests())
            if not found:
                missing.append(text)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_short(page: Path) -> None:
    """Except in tables, which cannot be broken. Code may be as long as elsewhere."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    long = [line for line in text.splitlines() if len(line) > LONGEST_LINE and not line.startswith("|")]
    code = "".join(re.findall(r"^```.*?^```", page.read_text(), flags=re.MULTILINE | re.DOTALL))
    assert not [*long, *(line for line in code.splitlines() if len(line) > LONGEST_CODE)]


def test_the_index_lists_every_page() -> None:
    index = (DOCS / "README.md").read_text()
    assert not [page.name for page in DOCS.glob("*.md") if page.name != "README.md" and f"({page.name})" not in index]


def test_each_argument_and_attribute_begins_a_line() -> None:
    """What goes on from the line before stands further in, or else it would read as an entry of its own."""
    seen, wrong = 0, []
    for path in sorted(PACKAGE.rglob("*.py")):
        nodes = (
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef | ast.FunctionDef)
        )
        for text in filter(None, map(ast.get_docstring, nodes)):
            for section in re.findall(r"^(?:Args|Attributes):\n((?: {4}.*\n?)+)", text, re.MULTILINE):
                entries = [line for line in section.splitlines() if re.match(r" {4}\S", line)]
                seen += len(entries)
                names = r" {4}(\{\w+\}$|[*`\w]+(, [*`\w]+)*: (?!.*\. [a-z_]+: ))"
                wrong += [f"{path.name}: {line}" for line in entries if not re.match(names, line)]
    assert seen > 100
    assert wrong == []
