"""The table of options as text: for ``help(Muon)`` and for docs/optimizer.md.

``python -m meshmuon.params.option_docs`` prints the block between the markers of docs/optimizer.md.
"""

from __future__ import annotations

import re
import textwrap
from typing import TypeVar

from .option_table import OPTIONS, Option, Scope

_WIDTH = 130
_Class = TypeVar("_Class", bound=type)


def with_options(cls: _Class) -> _Class:
    """Class decorator: replaces ``{options}`` in the docstring by the list of options."""
    if cls.__doc__ is not None:  # python -OO removes docstrings
        arguments = "\n".join(map(_argument, OPTIONS))
        cls.__doc__ = cls.__doc__.replace(" " * 8 + "{options}", textwrap.indent(arguments, " " * 8))
    return cls


def _argument(option: Option) -> str:
    """An option as an entry of a docstring's Args section, not indented."""
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
    rows = ["● = may differ from group to group.", "", "| option | default | used by | meaning |", "|---|---|---|---|"]
    for option in OPTIONS:
        mark = "" if option.scope is Scope.OPTIMIZER else "● "
        default = f'`"{option.default}"`' if isinstance(option.default, str) else repr(option.default)
        text = (option.help + _alias_text(option)).replace("``", "`").replace("|", r"\|")
        meaning = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)
        rows.append(f"| {mark}`{option.name}` | {default} | {option.scope.value} | {meaning} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown_table())
