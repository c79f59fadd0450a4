"""The options as text, tier by tier: for ``help(Muon)`` and for docs/optimizer.md.

``python -m meshmuon.params.option_docs`` prints the block between the markers of docs/optimizer.md.
"""

from __future__ import annotations

import re
import textwrap
from typing import TypeVar

from .option_table import Option, Scope, options_by_tier

_WIDTH = 130
_Class = TypeVar("_Class", bound=type)


def with_options(cls: _Class) -> _Class:
    """Class decorator: replaces ``{options}`` in the docstring by a section for each tier."""
    if cls.__doc__ is not None:  # python -OO removes docstrings
        sections = [
            f"    {tier.value}:\n" + textwrap.indent("\n".join(map(_argument, options)), " " * 8)
            for tier, options in options_by_tier().items()
        ]
        cls.__doc__ = cls.__doc__.replace("    {options}", "\n\n".join(sections))
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
    return f" Older name: {names}." if option.scope is Scope.OPTIMIZER else f" Also {names}, as in torch."


def headings() -> list[str]:
    """The headings of the tiers, as ``help(Muon)`` has them."""
    return [tier.value for tier in options_by_tier()]


def markdown_table() -> str:
    """All options as one table for each tier in Markdown, with links relative to docs/."""
    lines = ["● = may differ from group to group."]
    for tier, options in options_by_tier().items():
        lines += [
            "",
            f"### {tier.value}",
            "",
            "| option | default | used by | meaning |",
            "|---|---|---|---|",
            *map(_row, options),
        ]
    return "\n".join(lines)


def _row(option: Option) -> str:
    mark = "" if option.scope is Scope.OPTIMIZER else "● "
    default = f'`"{option.default}"`' if isinstance(option.default, str) else repr(option.default)
    text = (option.help + _alias_text(option)).replace("``", "`").replace("|", r"\|")
    meaning = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)
    return f"| {mark}`{option.name}` | {default} | {option.scope.value} | {meaning} |"


if __name__ == "__main__":
    print(markdown_table())
