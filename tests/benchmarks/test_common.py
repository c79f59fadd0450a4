"""Turns, medians, goals and files of the benchmarks."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from common import KELLER, Benchmark, Goal, Report, Step, float32_newton_schulz, make_parser, quartiles, race, ratio
from torch.optim._muon import _zeropower_via_newtonschulz

from meshmuon import keller
from tests.support.bounds import orthogonalize_error


def test_contenders_take_turns_in_an_order_that_changes() -> None:
    order: list[str] = []
    steps = {name: Step(lambda name=name: order.append(name), lambda name=name: order.append(f"before {name}")) for name in "abc"}  # type: ignore[misc]
    times = race(steps, 11, warmups=1)
    ran = [name for name in order if len(name) == 1]
    rounds = [ran[k : k + 3] for k in range(0, 36, 3)]
    assert [sorted(names) for names in rounds] == [["a", "b", "c"]] * 12
    assert len({tuple(names) for names in rounds}) > 3
    assert all(order[k - 1] == f"before {order[k]}" for k in range(1, len(order), 2))
    assert all(len(samples.wall) == len(samples.cpu) == 11 for samples in times.values())
    race(steps, 11, warmups=1)
    assert order[: len(order) // 2] == order[len(order) // 2 :]  # ranks must agree on it


def test_no_round_starts_when_the_time_is_over_but_the_first() -> None:
    samples = race({"a": Step(lambda: None)}, 50, warmups=0, seconds=-1.0)["a"]
    assert len(samples.wall) == 1


def test_ratios_are_taken_round_by_round() -> None:
    halves = ratio([1.0, 10.0, 100.0], [2.0, 20.0, 200.0])
    assert (halves.median, halves.low, halves.high, halves.count) == (0.5, 0.5, 0.5, 3)
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]).median == 3.0
    assert quartiles([7.0]).text() == "7.000"


@pytest.mark.parametrize(
    ("goal", "verdict"),
    [
        (Goal("a", 0.5, most=0.5), "reached"),
        (Goal("a", 0.51, most=0.5), "missed"),
        (Goal("a", 0.9, least=0.9), "reached"),
        (Goal("a", 0.89, least=0.9), "missed"),
        (Goal("a", None, most=1), "not measured"),
        (Goal("a", math.nan, most=1), "not measured"),
    ],
)
def test_verdicts(goal: Goal, verdict: str) -> None:
    assert goal.verdict == verdict
    assert f": {verdict}" in str(goal)


def test_a_report_leaves_text_figures_and_a_plot(tmp_path: Path) -> None:
    report = Report("name", make_parser("").parse_args(["--quick", "--out", str(tmp_path)]))
    report.table("title", ("column",), [("cell",)])
    report.note("a note")
    report.finish({"figure": 1}, [Goal("reach", 1.0, most=2)], lambda figure: figure.add_subplot(), (2, 2))
    text = (tmp_path / "name.txt").read_text()
    assert all(word in text for word in ("title", "column", "cell", "a note", "goal reach (at most 2): reached, 1", "cores"))
    facts = json.loads((tmp_path / "name.json").read_text())
    assert {"cpu", "cores", "torch", "threads"} <= set(facts["machine"])
    assert facts["goals"][0]["verdict"] == "reached"
    assert {"load_before", "load_after", "results"} <= set(facts)
    assert str(tmp_path) not in json.dumps(facts)
    assert (tmp_path / "name.png").read_bytes().startswith(b"\x89PNG")


def test_a_benchmark_calls_its_parts_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def settle(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        calls.append("settle")
        options.size = options.size or 4

    def measure(options: argparse.Namespace, report: Report) -> list[int]:
        calls.append("measure")
        return [item * options.size for item in report.each([1, 2], str)]

    def goals(results: list[int], options: argparse.Namespace) -> list[Goal]:
        calls.append("goals")
        return [Goal("largest", max(results), most=options.size)]

    benchmark = Benchmark(
        "sample",
        "about",
        measure,
        lambda results, report: calls.append("show"),
        goals,
        lambda data, figure: calls.append(f"plot {data['items']}"),
        (2, 2),
        add_options=lambda parser: parser.add_argument("--size", type=int) and calls.append("add"),
        settle_options=settle,
        to_json=lambda results: {"items": results},
    )
    monkeypatch.setattr("sys.argv", ["sample.py", "--quick", "--out", str(tmp_path)])
    benchmark.main()
    assert calls == ["add", "settle", "measure", "show", "goals", "plot [4, 8]"]
    facts = json.loads((tmp_path / "sample.json").read_text())
    assert facts["results"] == {"items": [4, 8]}
    assert facts["goals"][0]["verdict"] == "missed"
    calls.clear()
    monkeypatch.setattr("sys.argv", ["sample.py", "--redraw", "--out", str(tmp_path)])
    benchmark.main()
    assert calls == ["add", "settle", "plot [4, 8]"]


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_float32_newton_schulz_is_torchs_but_for_its_dtype(shape: tuple[int, int]) -> None:
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = float32_newton_schulz(grad, KELLER, 5, 1e-7), _zeropower_via_newtonschulz(grad, KELLER, 5, 1e-7)
    assert ours.dtype == torch.float32
    bound = sum(orthogonalize_error(grad, keller(), form="standard", dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert torch.allclose(ours, theirs.float(), rtol=0, atol=bound)
    assert not torch.equal(ours, theirs.float())
