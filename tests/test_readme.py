"""What README.md and the docs show is run, not believed."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.optional import need
from tests.support.wandb import StandIn

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
OPTIONAL = re.compile(r"^(?:from|import) (accelerate|lightning|torchtitan|transformers|trl)\b", re.MULTILINE)


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


EXAMPLES = [(page, k, block) for page in PAGES for k, block in enumerate(python_blocks(page))]


@pytest.mark.parametrize(
    ("page", "block"), [pytest.param(page, block, id=f"{page.name}-{k}") for page, k, block in EXAMPLES]
)
def test_example_runs(page: Path, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    needed = set(OPTIONAL.findall(block)) | (
        {"accelerate", "transformers"} if "meshmuon.integrations.hf" in block else set()
    )
    for package in sorted(needed):
        need(package)
    wandb = StandIn()
    if "import wandb" in block:  # elsewhere transformers would take it for the package
        monkeypatch.setitem(sys.modules, "wandb", wandb)
    exec(compile(block, f"{page.name}", "exec"), {"__name__": "__main__"})
    if "import wandb" in block:
        (run,) = wandb.runs
        assert not run.open
        assert list(run.rows) == [10, 20, 30, 40]
        assert all({"loss", "muon/group/0/update_to_weight"} <= set(row) for row in run.rows.values())


def test_readme_has_an_example_and_both_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert python_blocks(ROOT / "README.md")
    assert "make train" in text
    assert "make test" in text


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "quickstart.md"], ids=lambda page: page.name)
def test_the_routing_table_that_a_page_shows_is_printed(page: Path) -> None:
    """… stands for rows that are left out."""
    table = re.search(r"^```\n(parameter .*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert table
    values: dict[str, Any] = {}
    exec(python_blocks(page)[0].split("\nfor ")[0], values)  # without the training
    shown = [row for row in table[1].splitlines() if row != "…"]
    assert [row for row in str(values["optimizer"].routing_table()).splitlines() if row in shown] == shown


def test_people_find_the_words_that_they_type() -> None:
    """The site's search ranks headings first."""
    headings = " ".join(re.findall(r"^## (.+)$", (ROOT / "docs" / "faq.md").read_text(), flags=re.MULTILINE))
    assert not [
        word
        for word in ("Install", "(lr)", "Learning rate", "OOM", "Out of memory", "NaN", "hangs")
        if word not in headings
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
