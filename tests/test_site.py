"""The site without building it: its order, its reference and the follower of links. ``make docs`` checks the rest."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs" / "site"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules that build the site and need nothing but Python."""
    monkeypatch.syspath_prepend(str(SITE))
    names = ("nav", "public_names", "check")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def test_the_navigation_lists_every_page(tools: dict[str, ModuleType]) -> None:
    """Once each; a page that is missing here belongs into a table of docs/README.md."""
    assert tools["nav"].missing_pages() == []
    pages = [page for section in tools["nav"].sections().values() for page in section]
    assert len(pages) > 20
    assert len(set(pages)) == len(pages)
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "docs/optimizer.md", "docs/api/optimizers.md"} <= set(pages)


def test_a_page_outside_the_navigation_is_seen(tools: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    pages = tools["nav"].sections()
    without = {heading: [page for page in section if page != "docs/proofs.md"] for heading, section in pages.items()}
    monkeypatch.setattr(tools["nav"], "sections", lambda: {**without, "more": ["docs/no_such_page.md"]})
    assert tools["nav"].missing_pages() == ["docs/no_such_page.md", "docs/proofs.md"]


def test_every_public_name_has_a_docstring_and_a_place_in_the_reference(tools: dict[str, ModuleType]) -> None:
    names = tools["public_names"]
    assert names.undocumented() == []
    shown = names.shown_in_reference()
    assert sorted(shown) == sorted(names.public_names())
    assert {"meshmuon.Muon", "meshmuon.checkpoint.convert_torch_state", "meshmuon.integrations.torchtitan.muon"} <= set(
        shown
    )


def test_a_missing_docstring_is_seen(
    tools: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "meshmuon" / "hf.py"
    module.parent.mkdir()
    source = (
        "class A:\n  'Text.'\n  def bare(self): ...\n  def told(self): 'Text.'\n  def _own(self): ...\ndef bare(): "
        "...\n"
    )
    module.write_text(source)
    names = tools["public_names"]
    monkeypatch.setattr(names, "ADAPTERS", [module])
    assert names.undocumented() == ["meshmuon.integrations.hf.A.bare", "meshmuon.integrations.hf.bare"]


PAGE = """<html><head><link rel="stylesheet" href="a.css"><style>b {{ background: url(c.png) }}</style></head>
<body id="top"><a href="#top">x</a><a href="https://example.org/">x</a>
<a href="sub/b.html#here">x</a>{more}</body></html>"""


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("", None),
        ('<a href="gone.html">x</a>', "a.html: gone.html leads to no file"),
        ('<a href="sub/b.html#gone">x</a>', "a.html: sub/b.html#gone leads to no anchor"),
        ('<a href="#gone">x</a>', "a.html: #gone leads to no anchor"),
        ('<img src="gone.png">', "a.html: gone.png leads to no file"),
        (
            '<script src="https://cdn.example/x.js"></script>',
            "a.html: fetches https://cdn.example/x.js from another host",
        ),
        ('<img src="//cdn.example/x.png">', "a.html: fetches //cdn.example/x.png from another host"),
        ('<p style="background: url(https://x.example/y)">', "a.html: fetches https://x.example/y from another host"),
    ],
)
def test_links_of_a_built_site_are_followed(
    tools: dict[str, ModuleType], tmp_path: Path, more: str, problem: str | None
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text(PAGE.format(more=more))
    (tmp_path / "sub" / "b.html").write_text('<p id="here"><a href="../a.html">x</a>')
    (tmp_path / "a.css").write_text("/* url(https://example.org) */ p { background: url(data:image/png;base64,00) }")
    (tmp_path / "c.png").write_bytes(b"")
    assert tools["check"].problems(tmp_path.resolve()) == ([problem] if problem else [])


def test_a_style_sheet_that_fetches_is_seen(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text("<p>x</p>")
    (tmp_path / "a.css").write_text("@import 'https://fonts.example/f.css';")
    assert tools["check"].problems(tmp_path.resolve()) == [
        "a.css: fetches https://fonts.example/f.css from another host"
    ]


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return set(found)


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_anchors_of_links_exist(page: Path) -> None:
    broken = []
    for path, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text()):
        target = page.parent / path if path else page
        if target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{path}#{anchor}")
    assert not broken
