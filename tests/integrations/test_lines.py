"""The lines that a user writes for each trainer, as docs/trainers.md counts them: at most five."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MOST = 5
WRITTEN = re.compile(r"\bmuon\b|\bMuon\(|import .*\bMuon\b")  # importing and building it; what only logs is not needed


def block(page: str, imported: str) -> str:
    """The first block of Python that has this import."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return next(found for found in blocks if imported in found)


def of_python(source: str) -> int:
    return sum(bool(WRITTEN.search(line)) and not line.lstrip().startswith("#") for line in source.splitlines())


def counted() -> dict[str, int]:
    return {
        "HF `Trainer`, TRL `SFTTrainer`": max(
            of_python(block("trainers_hf.md", name)) for name in ("TrainingArguments", "trl")
        ),
        "Accelerate": of_python(block("trainers_hf.md", "from accelerate import Accelerator")),
        "Lightning": of_python(block("trainers.md", "MuonMonitor, muon")),
        "Fabric": of_python(block("trainers.md", "integrations.lightning import muon")),
        "torchtitan": of_python(block("trainers.md", "config_registry")),
        "Ray Train": of_python((ROOT / "examples" / "ray_train.py").read_text()),
    }


def stated() -> dict[str, int]:
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \|", (DOCS / "trainers.md").read_text(), flags=re.MULTILINE)
    return {re.sub(r" \(.*\)", "", name): int(lines) for name, lines in rows}


def test_the_table_counts_what_the_pages_show() -> None:
    assert stated() == counted()
    assert all(1 <= lines <= MOST for lines in counted().values())
