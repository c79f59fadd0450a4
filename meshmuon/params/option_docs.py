"""The table of options as text: for ``help(Muon)`` and for docs/optimizer.md.

``python -m meshmuon.params.option_docs`` prints the block between the markers of docs/optimizer.md.
"""

from __future__ import annotations

import re
import textwrap
from typing import TypeVar

from .option_table import OPTIONS, Option, Scope

__all__ = ["argument_list", "markdown_table", "with_options"]

_WIDTH = 130
_PLACE = "{options}"

_Class = TypeVar("_Class", bound=type)


def with_options(cls: _Class) -> _Class:
    """Class decorator: replaces ``{options}`` in the docstring by the list of options."""
    if cls.__doc__ is not None:  # python -OO removes docstrings
        cls.__doc__ = cls.__doc__.replace(" " * 8 + _PLACE, textwrap.indent(argument_list(), " " * 8))
    return cls


def argument_list() -> str:
    """All options as the entries of a docstring's Args section, not indented."""
    return "\n".join(_argument(option) for option in OPTIONS)


def _argument(option: Option) -> str:
    scope = "" if option.scope is Scope.OPTIMIZER else " (per group)"
    text = f"{option.name}{scope}: {option.help}{_alias_text(option)}"
    return textwrap.fill(text, _WIDTH - 8, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _alias_text(option: Option) -> str:
    if not option.aliases:
        return ""
    names = ", ".join(f"``{alias}``" for alias in option.aliases)
    return f" Older name: {names}." if option.scope is Scope.OPTIMIZER else f" A group may also say {names}."


def markdown_table() -> str:
    """All options as a table in Markdown, with links relative to docs/."""
    rows = [
        "● = may differ from group to group.",
        "",
        "| option | default | used by | meaning |",
        "|---|---|---|---|",
    ]
    for option in OPTIONS:
        mark = "" if option.scope is Scope.OPTIMIZER else "● "
        default = f'`"{option.default}"`' if isinstance(option.default, str) else repr(option.default)
        meaning = _markdown(option.help + _alias_text(option))
        rows.append(f"| {mark}`{option.name}` | {default} | {option.scope.value} | {meaning} |")
    return "\n".join(rows)


def _markdown(text: str) -> str:
    text = text.replace("``", "`").replace("|", r"\|")
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


if __name__ == "__main__":
    print(markdown_table())
