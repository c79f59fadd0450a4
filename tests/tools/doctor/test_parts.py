"""The parts of the doctor by themselves: pairing, texts, bounds, reports, environment, devices."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from meshmuon import ConfigError
from meshmuon.ortho import Scheme, orthogonalize, polar_express
from meshmuon.ortho.remez import Quintic
from meshmuon.tools.doctor import CHECKS, DoctorOptions, chosen_checks, context, environment, measurements
from meshmuon.tools.doctor.comparison import Comparison
from meshmuon.tools.doctor.context import Context, Outcome, by_text, check_backend, own_device
from meshmuon.tools.doctor.exchanges import partner, turns
from meshmuon.tools.doctor.layouts import check_checkpoint
from meshmuon.tools.doctor.measurements import calibration_of, summarise_links
from meshmuon.tools.doctor.numerics import check_products, exact_result, rounding_bound, seeded
from meshmuon.tools.doctor.report import Report

CPU = torch.device("cpu")


def context_of(world: int = 1, **options: Any) -> Context:
    return Context(DoctorOptions(**options), 0, world, dist.HashStore(), CPU, "a")


# Pairs.


@given(st.integers(1, 40))
def test_every_pair_meets_once_and_nobody_waits_for_another(world: int) -> None:
    met = []
    for turn in range(turns(world)):
        for rank in range(world):
            other = partner(rank, turn, world)
            assert other != rank
            if other is not None:
                assert partner(other, turn, world) == rank
                met.append((min(rank, other), max(rank, other)))
    assert sorted(met) == sorted(2 * [(a, b) for b in range(world) for a in range(b)])


# Checkpoints.


def test_without_numpy_the_checkpoint_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's collectives of objects need it; torch is installed without it."""
    monkeypatch.setattr("meshmuon.tools.doctor.layouts.find_spec", lambda name: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        finding = check_checkpoint(context_of())
    finally:
        dist.destroy_process_group()
    assert finding.skipped
    assert "pip install numpy" in finding.detail


# Texts.


def test_equal_sentences_are_said_once() -> None:
    assert by_text({2: ["a"], 0: ["b", "a"], 1: ["a"]}) == "rank 0: b; ranks 0-2: a"
    assert by_text({key: ["a"] for key in (5, 0, 1)} | {2: ["b"]}) == "ranks 0-1 and 5: a; rank 2: b"
    assert by_text({key: ["a"] for key in (1, 3, 5)}) == "ranks 1, 3 and 5: a"


# Bounds.


@pytest.mark.parametrize("shape", [(24, 24), (16, 50)])
def test_the_bound_covers_rounding_and_detects_a_wrong_coefficient(shape: tuple[int, int]) -> None:
    x, scheme = seeded(shape, 3), polar_express()
    first, *others = scheme.steps
    wrong = Scheme("wrong", (Quintic(1.01 * first[0], *first[1:]), *others), "")
    bound = rounding_bound(x, scheme, torch.float32)
    exact = exact_result(x, scheme)
    assert float((orthogonalize(x, scheme).double() - exact).norm()) <= bound
    assert float((orthogonalize(x, wrong).double() - exact).norm()) > bound


def test_the_bound_of_the_wire_is_that_of_its_dtype() -> None:
    x, scheme = seeded((24, 40), 4), polar_express()
    exact = exact_result(x, scheme)

    def sent(bits: int) -> torch.Tensor:
        """Rounded to so many significant bits before and after."""
        result = orthogonalize(rounded(x, bits), scheme)
        return rounded(result, bits)

    def rounded(value: torch.Tensor, bits: int) -> torch.Tensor:
        mantissa, exponent = torch.frexp(value)
        return torch.ldexp(torch.round(mantissa * 2.0**bits) / 2.0**bits, exponent)

    bound = rounding_bound(x, scheme, torch.float32, sent=2.0**-8)
    assert float((sent(8).double() - exact).norm()) <= bound
    assert float((sent(3).double() - exact).norm()) > bound


@pytest.mark.parametrize(
    ("name", "called"), [("symmetric", {"symmetric", "quadratic"}), ("general", {"general"}), ("inverses", {"inverse"})]
)
def test_each_product_is_checked(name: str, called: set[str]) -> None:
    from meshmuon.ortho.kernels.products import BlockedProducts

    original = getattr(BlockedProducts, name)

    def broken(self: BlockedProducts, *args: Any, **options: Any) -> torch.Tensor:
        return original(self, *args, **options).mul_(1 + 1e-3)

    with patch.object(BlockedProducts, name, broken):
        problems = check_products(context_of()).problems
    assert {problem.split()[1] for problem in problems} == called


@pytest.mark.parametrize(("error", "seen"), [(0.0, False), (0.05, True)])
def test_where_bits_may_differ_the_derived_bound_decides(error: float, seen: bool) -> None:
    """As on a GPU: the comparison adds up what the rounding of each step allows. A twentieth of the way is more
    than that.
    """
    context = context_of()
    shapes = {"a": (24, 24), "experts": (2, 12, 20), "bias": (7,)}
    whole, other = ({name: nn.Parameter(seeded(shape, 1)) for name, shape in shapes.items()} for _ in range(2))
    with patch.object(Context, "exact", False):
        comparison = Comparison(context, other, whole)
    comparison.run(range(3))
    with torch.no_grad():
        other["a"].add_(error * (other["a"] - seeded((24, 24), 1)))
    finding = comparison.finding("a layout")
    assert [problem.split()[0] for problem in finding.problems] == (["a"] if seen else [])
    assert "within rounding" in finding.detail


# Reports.

BY_NAME = {check.name: check for check in CHECKS}
OUTCOMES = [
    Outcome(BY_NAME["pairs"], "passed", 0.5, "6 pairs have exchanged"),
    Outcome(BY_NAME["ragged"], "failed", 61.0, "rank 1: wrong [data]", "Run --only ragged."),
    Outcome(BY_NAME["ddp"], "not run", 0.0, "in doubt"),
    Outcome(BY_NAME["links"], "skipped", 0.0, "needs 2 ranks"),
]


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("encoding", "marks", "kind"),
    [("utf-8", "✔✘", io.TextIOWrapper), ("ascii", ("ok  ", "FAIL"), io.TextIOWrapper), ("utf-8", "✔✘", Terminal)],
)
@pytest.mark.parametrize("has_rich", [True, False])
def test_reports(
    encoding: str, marks: Any, kind: type[io.TextIOWrapper], has_rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text everywhere, with colours on a terminal if rich is installed."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    if has_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setattr("meshmuon.tools.doctor.report.find_spec", lambda name: None)
    raw = io.BytesIO()
    stream = kind(raw, encoding=encoding, write_through=True)
    report = Report(stream)
    report.title(4, {"triton": "missing: pip install 'meshmuon[kernels]'"})
    for outcome in OUTCOMES:
        report.begin(outcome.check)
        report.end(outcome)
    report.close(OUTCOMES, 61.5)
    coloured = raw.getvalue().decode(encoding)
    assert ("\x1b[" in coloured) is (has_rich and kind is Terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", coloured)
    assert "'meshmuon[kernels]'" in text
    assert f"  {marks[0]} pairs               0.5 s  6 pairs have exchanged\n" in text
    assert f"  {marks[1]} ragged             61.0 s  rank 1: wrong [data]\n" in text
    assert "What to do: Run --only ragged." in text
    assert text.index("\nchecks\n") < text.index("pairs") < text.index("\nmeasurements\n") < text.index("links")
    assert text.endswith("\n1 passed, 1 failed, 1 skipped, 1 not run in 62 s\n")


def test_advice_names_the_check_and_nothing_else() -> None:
    for check in CHECKS:
        for text in (check.advice_for(stuck=False), check.advice_for(stuck=True)):
            assert "{" not in text
            assert ("--only " in text) is (f"--only {check.name}" in text)
    assert "NCCL_SOCKET_IFNAME" in CHECKS[0].advice_for(stuck=False)


# Environment and devices.


@pytest.mark.parametrize(("code", "works"), [(0, True), (-4, False)])
def test_a_cpu_that_kills_bfloat16_products_is_known(code: int, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked in a process of its own, and only if the CPU advertises AMX and nobody has limited oneDNN."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(environment, "cpu_info", lambda: {"flags": "avx2 amx_tile", "model name": "a CPU"})
    monkeypatch.setattr(environment.subprocess, "run", lambda *args, **options: SimpleNamespace(returncode=code))
    environment.bfloat16_works.cache_clear()
    try:
        assert environment.bfloat16_works() is works
        assert ("bfloat16" in environment.environment_of(CPU)) is not works
    finally:
        environment.bfloat16_works.cache_clear()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = environment.version_of
    monkeypatch.setattr(environment, "version_of", lambda name: None if name in ("triton", "rich") else known(name))
    found = environment.environment_of(CPU)
    assert "triton (symmetric products on a GPU)" in found["missing"]
    assert "rich (colours, tables and progress)" in found["missing"]
    assert found["triton"].startswith("missing: pip install")


def test_devices_by_local_rank() -> None:
    assert own_device("cpu", 5) == own_device(None, 5) == CPU
    with patch.object(context, "hardware_of", lambda device: SimpleNamespace(count=lambda: 4)):
        assert own_device("cuda", 5) == torch.device("cuda", 1)
    with (
        patch.object(context, "hardware_of", lambda device: SimpleNamespace(count=lambda: 0)),
        pytest.raises(ConfigError, match="--device cuda: torch sees no such device here"),
    ):
        own_device("cuda", 0)
    for kind in ("abacus", "", "meta", "cuda:3", "cpu:1", "xla", "mps"):
        with pytest.raises(ConfigError, match=f"--device {kind}: torch sees no such device here. Write a type alone"):
            own_device(kind, 0)


# What is chosen, and what follows from measurements.


def test_join_is_always_among_the_checks() -> None:
    assert [check.name for check in chosen_checks(DoctorOptions(only=("ddp",)))] == ["join", "ddp"]
    assert len(chosen_checks(DoctorOptions(skip=("ddp",)))) == len(CHECKS) - 1


@pytest.mark.parametrize("backend", ["gloo", "GLOO", "cpu:gloo", "cpu:gloo,cuda:gloo"])
def test_backends_that_are_there(backend: str) -> None:
    check_backend(backend, "cpu")


def test_axes_of_any_number_of_ranks() -> None:
    axes = {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 2), 6: (2, 3), 9: (3, 3), 512: (2, 256)}
    assert {world: context_of(world).two_axes() for world in axes} == axes


def test_the_slower_end_of_a_pair_counts() -> None:
    context = context_of(3)
    context.nodes = ["a", "a", "b"]

    def of_rank(pairs: dict[int, float]) -> dict[str, Any]:
        link = {"bytes_per_second": 1e9, "seconds": 1e-3}
        return {"pairs": {peer: (t / 10, t) for peer, t in pairs.items()}, "exchange": link, "exchange_cpu_share": 0.5}

    summary = summarise_links(
        context, [of_rank({1: 1.0, 2: 2.0}), of_rank({0: 3.0, 2: 20.0}), of_rank({0: 2.0, 1: 2.0})]
    )
    assert summary.figures["inside"] == {"bytes_per_second": 4 * 2**20 / 3.0, "seconds": 0.3}
    assert summary.figures["between"]["bytes_per_second"] == pytest.approx(4 * 2**20 / 11.0)
    assert summary.figures["slowest_pair"]["ranks"] == [1, 2]
    assert summary.figures["exchange"] == {"bytes_per_second": 1e9, "seconds": 1e-3}


def test_no_calibration_without_all_measurements() -> None:
    context = context_of()
    rates = {kind: {("float32", 128): 1e9} for kind in KINDS} | {"elementwise": dict.fromkeys(ELEMENTWISE, 1e-9)}
    host = dict.fromkeys(("seconds_per_matrix", "seconds_per_step", "seconds_per_launch"), 7e-6)
    measurements.summarise_rates(context, [rates])
    assert calibration_of(context) is None
    measurements.summarise_host(context, [{**host, "copies": {"bytes_per_second": 2.5e10, "seconds": 1e-5}}])
    calibration = calibration_of(context)
    assert calibration is not None
    assert calibration.exchange is None
    assert calibration.host_seconds_per_launch == 7e-6


KINDS, ELEMENTWISE = ("products", "orthogonalisation", "alone"), ("momentum", "update", "copy", "adamw")


def test_a_file_that_cannot_be_written_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from meshmuon.tools.doctor.doctor import _written

    assert _written(tmp_path / "a.json", {})
    assert not _written(tmp_path / "none" / "a.json", {})
    assert "was not written: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "float32", "bfloat16", "words"),
    [
        ("cpu", 70e9, 0.6e9, ["bfloat16 reaches 0.0086 of float32's rate: this CPU has no units for it"]),
        ("cpu", 70e9, 60e9, []),
        ("cuda", 60e12, 60e12, ["bfloat16 reaches 1 of float32's rate: its matrix units are not in use"]),
        ("cuda", 60e12, 700e12, []),
    ],
)
def test_a_remark_on_slow_bfloat16(device: str, float32: float, bfloat16: float, words: list[str]) -> None:
    rates = {"float32": float32, "bfloat16": bfloat16}
    products = {(dtype, size): rate * size for dtype, rate in rates.items() for size in (128, 256)}
    assert [text.partition(",")[0] for text in measurements.remark_on_bfloat16(device, products)] == words
    assert measurements.remark_on_bfloat16(device, {("float32", 128): 1.0}) == []


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(0.45, "the rates above were measured while"), (1.0, ""), (2.4, "something else slowed the step")],
)
def test_a_remark_on_a_step_that_is_not_as_predicted(ratio: float, words: str) -> None:
    text = measurements.remark_on_prediction(ratio)
    assert words in text
    assert bool(text) is (ratio != 1.0)


def test_a_slow_rank_is_remarked_on() -> None:
    def detail(*rates: float) -> str:
        by_rank = [
            {kind: {("float32", 128): rate} for kind in KINDS} | {"elementwise": {"copy": 1e-9}} for rate in rates
        ]
        return measurements.summarise_rates(context_of(len(rates)), by_rank).detail

    assert ["look at its clock" in detail(1e9, 1e9, slow) for slow in (9e8, 5e8)] == [False, True]


def test_medians_are_of_what_all_ranks_have() -> None:
    by_rank = [{"a": {1: 1.0, 2: 5.0}, "b": None}, {"a": {1: 3.0}, "b": None}, {"a": {1: 2.0, 2: 5.0}, "b": None}]
    assert measurements.medians(by_rank) == {"a": {1: 2.0}, "b": None}


def test_copies_between_host_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in both directions and shown; on a CPU, where nothing is copied, they are left out."""
    monkeypatch.setattr(measurements, "_COPY_BYTES", 2**12)
    link = measurements.copy_link(context_of())
    assert link.bytes_per_second > 0
    assert link.seconds > 0
    copies = {"bytes_per_second": 25e9, "seconds": 1e-5}
    of_rank = {"seconds_per_matrix": 1e-5, "seconds_per_step": 1e-3, "seconds_per_launch": 7e-6, "copies": copies}
    summary = measurements.summarise_host(context_of(), [of_rank, of_rank])
    assert summary.detail.endswith(", 7.0 µs per launch; 25 GB/s and 10 µs between host and device")
    on_cpu = measurements.summarise_host(context_of(), [{**of_rank, "copies": None, "seconds_per_launch": None}])
    assert on_cpu.detail == "10 µs per matrix and 1.00 ms per step"
    assert on_cpu.figures["seconds_per_launch"] is None


def test_the_time_of_a_launch() -> None:
    assert 1e-7 <= measurements.seconds_per_launch(context_of()) < 0.1


@pytest.mark.parametrize(("ranks", "cores", "seconds"), [(2, 2, 1.0), (4, 2, 10.9)])
def test_interruptions_count_where_ranks_share_cores(ranks: int, cores: int, seconds: float) -> None:
    calls = [1.0] * 99 + [991.0]
    with (
        patch.object(measurements, "_seconds", return_value=calls),
        patch("os.cpu_count", return_value=cores),
        patch("torch.get_num_threads", return_value=1),
    ):
        assert measurements._usual_seconds(context_of(ranks), int) == pytest.approx(seconds)
