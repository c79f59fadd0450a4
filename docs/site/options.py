"""The options of ``Muon`` as Markdown, a table per tier.

``python docs/site/options.py`` prints the block between the markers of docs/optimizer.md.
"""

from __future__ import annotations

import re

from meshmuon.params.option_table import TIERS, Option, Scope


def markdown_tables() -> str:
    """All options that are shown, with links relative to docs/."""
    lines = ["● = may differ from group to group."]
    for tier, options in TIERS.items():
        lines += ["", f"### {tier}", "", "| option | default | used by | meaning |", "|---|---|---|---|"]
        lines += [_row(option) for option in options if option.help]
    return "\n".join(lines)


def _row(option: Option) -> str:
    mark = "" if option.scope is Scope.OPTIMIZER else "● "
    default = f'`"{option.default}"`' if isinstance(option.default, str) else repr(option.default)
    meaning = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", option.help.replace("``", "`").replace("|", r"\|"))
    return f"| {mark}`{option.name}` | {default} | {option.scope.value} | {meaning} |"


if __name__ == "__main__":
    print(markdown_tables())
