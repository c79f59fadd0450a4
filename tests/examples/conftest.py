"""The examples are scripts, not an installed package: make them importable here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples"
DEMO = EXAMPLES / "train_gpt.py"
sys.path.insert(0, str(EXAMPLES))


def write_sources(root: Path) -> Path:
    """A little tree of source files, about 40 kB, with folders that must be left out."""
    for i in range(20):
        path = root / f"package{i % 3}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"def function_{i}_{j}(x):\n    return x + {j}\n" for j in range(50)))
    for skipped in ("site-packages", "test", "__pycache__"):
        (root / skipped).mkdir()
        (root / skipped / "left_out.py").write_text("LEFT_OUT = True\n")
    (root / "notes.txt").write_text("LEFT_OUT too")
    return root


def run_folder(out: Path) -> Path:
    """The only run below the demo's ``--out``."""
    (folder,) = (path for path in out.iterdir() if path.is_dir() and not path.is_symlink())
    return folder


def log_of(out: Path) -> dict[str, Any]:
    return dict(json.loads((run_folder(out) / "log.json").read_text()))


@pytest.fixture
def source_folder(tmp_path: Path) -> Path:
    """The tree of `write_sources`, for one test."""
    return write_sources(tmp_path / "source")
