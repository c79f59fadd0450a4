"""Each benchmark runs at tiny sizes and leaves its table, its figures and its goals; a few figures must be as known."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import run_script

from .conftest import BENCHMARKS

SCRIPTS: dict[str, tuple[str, ...]] = {
    "choices": (),
    "launches": (),
    "losses": (),
    "predictions": ("--worlds", "1"),
    "scaling": ("--matrices", "10", "40", "--ranks", "2"),
    "schemes": (),
    "sharded": ("--ranks", "4", "--layouts", "FSDP2", "EP×FSDP, whole"),
    "single_device": (),
    "as_shipped": ("--sets", "8 × 256²", "GPT-2 layer"),
}


def run(script: str, out: Path, *arguments: str) -> dict[str, Any]:
    environment = {**os.environ, "COLUMNS": "200"}
    done = run_script(BENCHMARKS / f"{script}.py", "--quick", "--out", str(out), *arguments, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / f"{script}.txt").stat().st_size > 100
    facts: dict[str, Any] = json.loads((out / f"{script}.json").read_text())
    lines = [line for line in done.stdout.splitlines() if line.startswith("goal ")]
    assert len(lines) == len(facts["goals"]) > 0
    return facts


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_leaves_what_it_promises(script: str, tmp_path: Path) -> None:
    facts = run(script, tmp_path, *SCRIPTS[script])
    results: Any = facts["results"]
    assert results
    assert {"cpu", "cores", "torch", "threads"} <= set(facts["machine"])
    if script == "choices":
        assert all(row["ratio"] == row["seconds"] / row["best"] < 1.1 for row in results)
    elif script == "launches":
        assert all(goal["verdict"] == "reached" for goal in facts["goals"])
        assert results[0]["launches"] == results[0]["products"] + results[0]["beside"]
    elif script == "predictions":
        assert results[0]["bytes"] == results[0]["buffers"] == {"predicted": [0], "measured": [0]}
    elif script == "schemes":
        errors = {name: scheme["worst_error"] for name, scheme in results[0]["schemes"].items()}
        assert errors["halley"] < errors["zolotarev"] < errors["polar_express"] < errors["keller"]
    elif script == "sharded":
        for result in results:
            assert result["bytes_sent"] == result["bytes_planned"] == pytest.approx(result["bytes_bound"], rel=1e-3)
            assert result["difference"]["naive"] < 1e-3
    elif script == "single_device":
        for result in results:
            assert result["memory"]["meshmuon"]["count"] == 0
            assert result["worst_error"]["meshmuon"] == pytest.approx(0.53, abs=0.01)
            assert "meshmuon, polar_express" not in result["difference"], "another update is never called the same"


@pytest.mark.parametrize(
    ("arguments", "message"), [(("--models", "BERT"), "no model is called ['BERT']; there are ['GPT', 'MoE', 'ViT']")]
)
def test_what_is_not_there_is_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = run_script(BENCHMARKS / "single_device.py", "--quick", "--out", str(tmp_path), *arguments)
    assert done.returncode == 2
    assert message in done.stderr
