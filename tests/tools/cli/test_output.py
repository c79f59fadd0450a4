"""Where ``meshmuon plan`` writes, and what it says if that cannot be."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from meshmuon.tools.cli.main import main
from tests.tools.cli.test_plan import plan, refusal


def test_a_reader_that_has_gone(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """``meshmuon plan … | head -1`` ends without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["plan", "--list"]) == 128 + signal.SIGPIPE
        monkeypatch.undo()
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(sys, "stdout", None)  # as Python has it if it was closed from the beginning
    with pytest.raises(SystemExit):
        main(["plan", "--list"])
    assert "standard output is closed" in capfd.readouterr().err


def test_every_file_may_be_standard_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Which then has nothing else, and is no file of that name."""
    monkeypatch.chdir(tmp_path)
    arguments = ("--model", "gpt2", "--mesh", "dp_shard=8")
    for option, key in (
        ("--json", "exchanges"),
        ("--save-model", "params"),
    ):
        assert json.loads(plan(capsys, *arguments, option, "-"))[key]
    assert list(tmp_path.iterdir()) == []
    message = refusal(capsys, *arguments, "--json", "-", "--save-model", "-")
    assert "--json and --save-model are all for standard output" in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        ("--list",),
        ("--help",),
        ("--model", "gpt2", "--mesh", "dp_shard=8"),
        ("--model", "gpt2", "--mesh", "dp_shard=8", "--json", "-"),
    ],
)
@pytest.mark.parametrize("buffering", [-1, 0])  # as a whole, or at once, as with PYTHONUNBUFFERED
def test_a_full_disk(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], buffering: int
) -> None:
    with io.TextIOWrapper(open("/dev/full", "wb", buffering=buffering), write_through=not buffering) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["plan", *arguments]) == 1
        monkeypatch.undo()
    error = capfd.readouterr().err
    assert error.startswith("meshmuon: error: standard output cannot be written: No space left on device.")
    assert error.count("\n") == 1
