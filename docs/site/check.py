"""Follows every link of a built site: ``python docs/site/check.py build/site``.

Sphinx checks what it writes itself. This reads the finished HTML files and style sheets, so that raw HTML counts too:

- every local link leads to a file, and to an anchor that is in it;
- no tag of a page and no style sheet names an address on another host that a browser would load by itself;
- every public name of meshmuon has an anchor.

Scripts are not read, so a request that one of them makes is not seen. The exit code is 1 if anything is found.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import public_names

_IN_CSS = re.compile(r"""url\(\s*['"]?([^'")]+)|@import\s+['"]([^'"]+)""")
_FETCHED_LINKS = {
    "stylesheet",
    "preload",
    "modulepreload",
    "prefetch",
    "icon",
    "preconnect",
    "dns-prefetch",
    "manifest",
}


@dataclass
class Page:
    """What a browser makes of one HTML file."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    """Addresses that a reader may follow."""
    fetched: list[str] = field(default_factory=list)
    """Addresses that the browser loads by itself."""


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = Page()
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        self.page.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        self.page.fetched += _css_addresses(values.get("style", ""))
        self.page.fetched += [part.split()[0] for part in values.get("srcset", "").split(",") if part.strip()]
        if tag == "a":
            self.page.links += [values["href"]] if "href" in values else []
        elif tag != "link":
            self.page.fetched += [
                values[name] for name in ("src", "poster", "data", "href", "xlink:href") if values.get(name)
            ]
        elif _FETCHED_LINKS & set(values.get("rel", "").split()):
            self.page.fetched.append(values.get("href", ""))
        else:
            self.page.links.append(values.get("href", ""))

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.page.fetched += _css_addresses(data)


def _css_addresses(text: str) -> list[str]:
    return [first or second for first, second in _IN_CSS.findall(re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))]


def read_page(path: Path) -> Page:
    """Anchors and addresses of one HTML file."""
    reader = _Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    return reader.page


def problems(site: Path) -> list[str]:
    """What is wrong with the site in this folder, one line each."""
    pages = {path: read_page(path) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site} has no pages"]
    for path, page in pages.items():
        shown = path.relative_to(site)
        for address in [*page.links, *page.fetched]:
            found += [f"{shown}: {address} {fault}" for fault in _faults(address, path, pages)]
        found += [f"{shown}: fetches {address} from another host" for address in page.fetched if _is_remote(address)]
    for path in sorted(site.rglob("*.css")):
        for address in _css_addresses(path.read_text(encoding="utf-8")):
            found += [f"{path.relative_to(site)}: fetches {address} from another host"] if _is_remote(address) else []
    return found


def _is_remote(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def _faults(address: str, page: Path, pages: dict[Path, Page]) -> list[str]:
    parts = urlsplit(address)
    if _is_remote(address) or parts.scheme:
        return []
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return ["leads to no file"]
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return ["leads to no anchor"]
    return []


def names_without_anchor(site: Path) -> list[str]:
    """Public names that no page of the reference describes."""
    anchors = set().union(*(read_page(path).anchors for path in (site / "docs" / "api").glob("*.html")))
    return [name for name in public_names.public_names() if name not in anchors]


def main(site: Path) -> int:
    """Prints what is wrong. Returns the exit code."""
    found = problems(site.resolve())
    found += [f"{name} is not in the reference" for name in names_without_anchor(site)]
    print(
        "\n".join(found)
        if found
        else f"{site}: {len(list(site.rglob('*.html')))} pages, all links lead somewhere on the site"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
