"""The page of ``meshmuon plan --html``: one file that needs no network, with the report inside."""

from __future__ import annotations

import importlib
import json
from importlib import resources
from string import Template
from types import ModuleType
from typing import Any

from ...errors import ConfigError
from .report import Figures

_FOLDER = "page_files"


def require_plotly() -> ModuleType:
    """``plotly.offline``, which holds the library that draws the figures.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        return importlib.import_module("plotly.offline")
    except ImportError:
        raise ConfigError(
            "--html needs plotly: pip install 'meshmuon[plan]'. --json writes the same numbers without it."
        ) from None


def render_page(report: Figures) -> str:
    """The page as text; its figures are drawn from the numbers of ``build_report``.

    Raises:
        ConfigError: if plotly is missing.
    """
    files = resources.files(__package__) / _FOLDER
    template = Template((files / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=_escaped(f"{report.model.title} on {report.mesh.text}"),
        style=(files / "page.css").read_text(encoding="utf-8"),
        script=(files / "page.js").read_text(encoding="utf-8"),
        report=_embedded(report),
        library=require_plotly().get_plotlyjs(),
    )


def _embedded(content: dict[str, Any]) -> str:
    """JSON that cannot end the script element it stands in, whatever a parameter is called."""
    return json.dumps(content).replace("<", "\\u003c")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
