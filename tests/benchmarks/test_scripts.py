"""Each benchmark runs at tiny sizes and leaves its table, its figures, its plot and its goals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import run_script

from .conftest import BENCHMARKS


def run(script: str, out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    environment = {**os.environ, "COLUMNS": "200"}
    done = run_script(BENCHMARKS / f"{script}.py", "--quick", "--out", str(out), *arguments, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("txt", "png"):
        assert (out / f"{script}.{kind}").stat().st_size > 100
    facts: dict[str, Any] = json.loads((out / f"{script}.json").read_text())
    lines = [line for line in done.stdout.splitlines() if line.startswith("goal ")]
    assert len(lines) == len(facts["goals"]) > 0
    return facts, done.stdout


def test_orthogonalisation(tmp_path: Path) -> None:
    facts, printed = run("orthogonalisation", tmp_path, "--sizes", "16", "32", "--ratios", "1", "4")
    shapes = {(result["scheme"], result["batch"], result["n"], result["m"]) for result in facts["results"]}
    first = {("polar_express", batch, n, n * times) for batch in (1, 3) for n in (16, 32) for times in (1, 4)}
    assert shapes == first | {("keller", 1, n, n * times) for n in (16, 32) for times in (1, 4)}
    assert "agrees with the formula for 8 of 8 shapes" in printed
    for result in facts["results"]:
        assert set(result["forms"]) == {"auto", "standard", "gram"}
        assert result["forms"]["auto"]["flops"] == min(form["flops"] for form in result["forms"].values())


def test_agreement(tmp_path: Path) -> None:
    facts, _ = run("agreement", tmp_path, "--processes", "2")
    (point,) = facts["results"]
    assert (point["hops"], point["ring_hops"], point["connections"]) == (1, 2, 2)
    assert point["ring_connections"] >= 1
    assert point["vote"]["median"] > 0


def test_metrics(tmp_path: Path) -> None:
    facts, _ = run("metrics", tmp_path)
    (result,) = facts["results"]
    assert set(result["ratios"]) == {"metrics", "without the spectra of weights"}


def test_single_device(tmp_path: Path) -> None:
    facts, printed = run("single_device", tmp_path)
    assert [result["model"] for result in facts["results"]] == ["GPT", "MoE", "ViT"]
    for result in facts["results"]:
        assert {"meshmuon", "torch.optim.Muon, fp32", "naive", "torch.optim.AdamW, fused"} <= set(result["steps"])
        assert result["memory"]["meshmuon"]["count"] == 0
        assert result["memory"]["naive"]["count"] > 0
        assert "meshmuon" in result["host"]
        assert result["worst_error"]["meshmuon"] == pytest.approx(0.53, abs=0.01)
        assert result["worst_error"]["meshmuon, halley"] < 0.01
        assert result["flops"]["naive"] > result["flops"]["meshmuon"]
        assert "meshmuon, zolotarev" not in result["difference"]  # another update is never called the same
    assert "Keller Jordan's, plain: " in printed
    assert any("step with auto" in goal["text"] for goal in facts["goals"])


def test_single_device_refuses_a_peer_that_is_not_there(tmp_path: Path) -> None:
    done = run_script(BENCHMARKS / "single_device.py", "--quick", "--out", str(tmp_path), "--peer", f"dion={tmp_path}")
    assert done.returncode == 2
    assert "there is no package 'dion' in that folder" in done.stderr
    assert not any(tmp_path.iterdir())


def test_schemes(tmp_path: Path) -> None:
    facts, _ = run("schemes", tmp_path)
    assert {(result["batch"], result["n"], result["m"]) for result in facts["results"]} == {
        *((1, n, n * times) for n in (16, 32) for times in (1, 4)),
        *((64, n, 2 * n) for n in (16, 32)),
    }
    for result in facts["results"]:
        assert result["schemes"]["polar_express"]["ratio"]["median"] == 1.0
        assert result["schemes"]["auto"]["runs"].startswith("polar_express")  # inverses do not pay on tiny matrices
        if result["batch"] == 1:
            errors = {name: scheme["worst_error"] for name, scheme in result["schemes"].items()}
            assert errors["halley"] < errors["zolotarev"] < errors["polar_express"] < errors["keller"]


def test_sharded(tmp_path: Path) -> None:
    facts, _ = run("sharded", tmp_path, "--ranks", "4")
    names = [result["layout"] for result in facts["results"]]
    assert names == ["FSDP2", "DistMuon", "HSDP", "TP×FSDP", "EP×FSDP, cut", "EP×FSDP, whole"]
    for result in facts["results"]:
        assert result["bytes_sent"] == pytest.approx(result["bytes_bound"], rel=1e-3)
        if result["layout"] != "DistMuon":  # whose plan knows of the weights that travel, not of the gradients
            assert result["bytes_sent"] == result["bytes_planned"]
        assert result["difference"]["naive"] < 1e-3
    assert facts["results"][0]["difference"]["reference"] == 0.0
    assert facts["results"][-1]["exchanges"] == 0


def test_scaling(tmp_path: Path) -> None:
    facts, _ = run("scaling", tmp_path, "--matrices", "10", "40", "--ranks", "2", "64")
    points = {(point["what"], point["matrices"], point["ranks"]) for point in facts["results"]}
    assert {("plan", count, ranks) for count in (10, 40) for ranks in (2, 64)} <= points
    assert {("step", 10, 1), ("step", 40, 1), ("step", 10, 2), ("step", 40, 2), ("step", 40, 64)} <= points
    assert {("changing", 40, 1), ("changing", 40, 2)} <= points
    assert all((point["over_steady"] is not None) == (point["what"] == "changing") for point in facts["results"])


def test_demo_share(tmp_path: Path) -> None:
    facts, _ = run("demo_share", tmp_path)
    shares = facts["results"]["shares"]
    assert 0 < shares["orthogonalisation alone"] < 1
    assert 0 < shares["AdamW, fused"] < 1
    assert shares["meshmuon"] > 0


def test_degrees(tmp_path: Path) -> None:
    facts, printed = run("degrees", tmp_path)
    five = next(result for result in facts["results"]["compared"] if result["quintics"] == 5)
    assert (five["cheapest"]["degrees"], five["cheapest"]["products"], five["products"]) == ([9, 17, 17], 14, 17)
    for result in facts["results"]["runs"]:
        assert max(result["float32"]["off"].values()) < 0.1
    assert "9·17·17: products, as good as 5 quintics (at most 16): reached, 14" in printed


def test_unknown_models_are_refused(tmp_path: Path) -> None:
    done = run_script(BENCHMARKS / "single_device.py", "--quick", "--models", "BERT", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "no model is called ['BERT']; there are ['GPT', 'MoE', 'ViT']" in done.stderr


def test_loss_by_rounding(tmp_path: Path) -> None:
    facts, printed = run("loss_by_rounding", tmp_path)
    assert len({result["loss"] for result in facts["results"]}) == 6  # three variants, two seeds: every flag reaches the demo
    assert "± " in printed


def test_predictions(tmp_path: Path) -> None:
    """On one rank, where nothing is sent; ``tests/dist/test_predicted_counts.py`` compares what several ranks send."""
    facts, printed = run("predictions", tmp_path, "--worlds", "1")
    (result,) = facts["results"]
    assert result["layout"] == "FSDP2"
    assert result["bytes"] == result["buffers"] == {"predicted": [0], "measured": [0]}
    assert min(*result["predicted_s"], *result["measured_s"]) > 0
    assert "layouts whose bytes were not predicted exactly (at most 0): reached, 0" in printed


def test_published(tmp_path: Path) -> None:
    facts, _ = run("published", tmp_path)
    modelled = {(row["case"].split(",")[0], row["scheme"]): row["modelled"] for row in facts["results"]}
    assert modelled["Megatron", "one home"] < modelled["Megatron", "repeated"]
    memory = [row["modelled"] for row in facts["results"] if row["kind"] == "bytes" and "meshmuon" in row["scheme"]]
    assert memory == [pytest.approx(16.0)]


def test_tuning(tmp_path: Path) -> None:
    done = tmp_path / "done.jsonl"
    facts, printed = run("tuning", tmp_path, "--keep", str(done))
    cases = [(result["optimizer"], result["weight_decay"], result["lr"]) for result in facts["results"]]
    assert cases == [(name, decay, lr) for name in ("muon", "adamw") for decay in (0.1, 1.0) for lr in (0.002, 0.004)]
    assert len({result["loss"] for result in facts["results"]}) == 8
    assert (tmp_path / "tuning_decay.png").stat().st_size > 100
    assert "meshmuon's best lr ÷ AdamW's" in printed
    lines = done.read_text().splitlines()
    assert [json.loads(line) for line in lines] == facts["results"]
    best = {**json.loads(lines[0]), "loss": 0.125}  # is not trained again
    done.write_text("\n".join([json.dumps(best), *lines[1:]]) + "\n")
    again, _ = run("tuning", tmp_path, "--keep", str(done))
    assert again["results"] == [best, *facts["results"][1:]]
