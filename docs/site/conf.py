"""Sphinx configuration: README.md, CONTRIBUTING.md, CHANGELOG.md and docs/ as a site. ``make docs`` builds it.

The source folder is the root of the repository, so that links between README.md and docs/ are the same on GitHub and
here.
"""

from __future__ import annotations

import inspect
import os
import pydoc
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX10_1_512")

import nav  # noqa: E402
import public_names  # noqa: E402

import meshmuon  # noqa: E402
from meshmuon.params.option_table import TIERS  # noqa: E402

project = "meshmuon"
author = "The meshmuon authors"
copyright = author  # noqa: A001  # Sphinx's name
version = release = meshmuon.__version__

root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/api/*.md"]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "runs",
    "venv",
    "node_modules",
    "tests",
    "meshmuon",
    "*.egg-info",
    "**/__pycache__",
]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "drawings"]

myst_heading_anchors = 4  # GitHub's anchors
myst_enable_extensions = ["html_image"]  # <img> with a width, as GitHub takes it
myst_fence_as_directive = ["mermaid"]
suppress_warnings: list[str] = []
highlight_language = "default"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_mock_imports = ["accelerate", "lightning", "torchtitan", "transformers"]
autodoc_default_options = {"members": True, "undoc-members": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = [(tier, "params_style") for tier in TIERS]  # of the options in help(Muon)
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False
nitpicky = True  # a reference in a docstring that leads nowhere is a warning
nitpick_ignore_regex = [("py:class|py:obj|py:data|py:attr", ".*")]  # types in signatures: torch's pages are not at hand

html_theme = "furo"
html_title = f"meshmuon {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_additional_pages = {"index": "forward.html"}
templates_path = ["templates"]
html_theme_options = {"navigation_with_keys": True}

_log = logging.getLogger(__name__)


def _append_navigation(app: Sphinx, docname: str, content: list[str]) -> None:
    if docname == root_doc:
        content[0] += nav.toctrees()


def _attributes(described: type) -> dict[str, list[str]]:
    """What the section ``Attributes`` of a class's docstring says of each attribute."""
    found: dict[str, list[str]] = {}
    section = re.search(r"^Attributes:\n((?:    .*\n?|\n)+)", inspect.getdoc(described) or "", flags=re.MULTILINE)
    for name, text in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", section[1] if section else "", flags=re.MULTILINE):
        found[name] = [" ".join(text.split())]
    return found


def _list_attributes_once(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Describes fields where autodoc lists them with type and default, not a second time in the class's own text."""
    if what == "class" and isinstance(obj, type):
        shown = "\n".join(lines) + "\n"
        for attribute in _attributes(obj):
            shown = re.sub(rf"^:ivar {attribute}:.*\n(?:[ \t]+.*\n)*", "", shown, flags=re.MULTILINE)
        lines[:] = shown.rstrip("\n").split("\n")
    elif what == "attribute":
        described = pydoc.locate(name.rpartition(".")[0])
        if isinstance(described, type) and (text := _attributes(described).get(name.rpartition(".")[2])):
            lines[:] = text


def _mend_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [
        re.sub(r"\bdocs/(\w+)\.md(#[\w-]+)?", r":doc:`/docs/\1`", line) for line in lines
    ]  # a path in help(), a link here
    own = name.rsplit(".", 1)[-1]
    if what in ("class", "exception", "function", "method", "property") and not own.startswith("_") and not any(lines):
        _log.warning("%s has no docstring", name, location=name)


def _warn_of_names_not_shown(app: Sphinx, env: Any) -> None:
    shown = public_names.shown_in_reference()
    for name in sorted(set(public_names.public_names()) ^ set(shown)):
        _log.warning("%s is public but not in docs/api, or in docs/api but not public", name)
    for name in nav.missing_pages():
        _log.warning("%s is in docs/ but not in a table of docs/README.md, or the other way round", name)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _append_navigation)
    app.connect("autodoc-process-docstring", _list_attributes_once, priority=600)  # after napoleon
    app.connect("autodoc-process-docstring", _mend_docstring, priority=700)
    app.connect("env-updated", _warn_of_names_not_shown)
