"""The order of the site: the tables of docs/README.md, read by the build and by the tests."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "docs" / "README.md"


def sections() -> dict[str, list[str]]:
    """Headings of docs/README.md, each with the pages that its table links in the first column, relative to the
    repository.
    """
    found: dict[str, list[str]] = {}
    heading = ""
    for line in INDEX.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            heading = line[3:].strip()
        elif link := re.match(r"\| \[[^\]]+\]\(([^)#]+)\)", line):
            found.setdefault(heading, []).append(_from_root(link[1]))
    return found


def _from_root(link: str) -> str:
    parts: list[str] = ["docs"]
    for part in PurePosixPath(link).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def missing_pages() -> list[str]:
    """Pages of docs/ that the index does not list, and those that it lists but that are not there."""
    listed = {page for pages in sections().values() for page in pages}
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md") if path != INDEX}
    return sorted((there - listed) | {page for page in listed if not (ROOT / page).exists()})


def toctrees() -> str:
    """The sections as hidden toctrees, which the build appends to README.md, the first page of the site."""
    blocks = ["```{toctree}\n:hidden:\n\ndocs/README\n```"]
    for heading, pages in sections().items():
        names = "\n".join(page.removesuffix(".md") for page in pages)
        blocks.append(f"```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{names}\n```")
    return "\n\n" + "\n\n".join(blocks) + "\n"
