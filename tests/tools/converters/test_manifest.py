"""Files that prove they are what was saved. torch reads a flipped bit without a word; ``verify`` does not."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from meshmuon import MeshmuonError, StateError
from meshmuon.checkpoint import MANIFEST, verify, write_manifest
from meshmuon.errors import CheckpointError

FILES = {".metadata": b"where", "__0_0.distcp": bytes(range(256)) * 40, "model/part": b"x", "model/empty": b""}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "step5" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    write_manifest(tmp_path / "step5")
    return tmp_path / "step5"


def said(place: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        verify(place)
    return str(caught.value)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def test_writing_again_describes_the_same_files(saved: Path) -> None:
    """The manifest is no part of what it describes, nor is what a crash left of one."""
    before = (saved / MANIFEST).read_bytes()
    assert {name: file["bytes"] for name, file in json.loads(before)["files"].items()} == {
        k: len(v) for k, v in FILES.items()
    }
    (saved / f"{MANIFEST}.tmp").write_text("half a mani")
    verify(saved)
    assert write_manifest(saved) == saved / MANIFEST
    assert (saved / MANIFEST).read_bytes() == before
    assert not (saved / f"{MANIFEST}.tmp").exists()


def replace_in(place: Path, old: str, new: str) -> None:
    path = place / MANIFEST
    path.write_text(path.read_text().replace(old, new))


BITS = ((0, 0), (5000, 3), (10239, 7))
DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda place: (place / "__0_0.distcp").unlink(), "__0_0.distcp is missing (10240 bytes)"),
    *(
        (lambda place, at=at: flip(place / "__0_0.distcp", *at), "__0_0.distcp has changed: expected SHA-256")
        for at in BITS
    ),
    (lambda place: flip(place / "model/part", 0), "model/part has changed"),
    (
        lambda place: os.truncate(place / "__0_0.distcp", 4000),
        "__0_0.distcp is truncated: expected 10240 bytes, found 4000",
    ),
    (lambda place: os.truncate(place / "model/part", 0), "model/part is truncated: expected 1 bytes, found 0"),
    (
        lambda place: (place / "model/empty").write_text("ab"),
        "model/empty is longer than it was: expected 0 bytes, found 2",
    ),
    (lambda place: (place / "model/new").write_text(""), "model/new is extra: it was not there"),
    (lambda place: (place / MANIFEST).unlink(), f"has no manifest ({MANIFEST})"),
    (lambda place: os.truncate(place / MANIFEST, 100), f"{MANIFEST} is damaged"),
    (lambda place: flip(place / MANIFEST, 0), f"{MANIFEST} is damaged"),
    (lambda place: replace_in(place, '"bytes": 10240', '"bytes": 10241'), "its own digest differs"),
    (lambda place: replace_in(place, '"format": 1', '"format": 2'), "has format 2, this version of meshmuon reads 1"),
    (lambda place: (place / "link").symlink_to(place / "nowhere"), "is a broken link"),
    (lambda place: os.mkfifo(place / "pipe"), "is not a regular file"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_damage_is_told(saved: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(saved)
    text = said(saved)
    assert message in text
    assert sum(f"\n  {name} " in text for name in FILES) <= 1


def test_all_damage_is_told_at_once(saved: Path) -> None:
    (saved / ".metadata").unlink()
    os.truncate(saved / "model/part", 0)
    flip(saved / "__0_0.distcp", 5)
    (saved / "new").touch()
    text = said(saved)
    assert [word in text for word in ("missing", "truncated", "changed", "extra")] == [True] * 4
    assert len(text.splitlines()) == 6


RECORD = {"bytes": 1, "sha256": "0"}
WRONG: list[Any] = [
    [],
    3,
    "text",
    {"a": 1},
    {"a": {}},
    {"a": {**RECORD, "bytes": "x"}},
    {"a": {**RECORD, "bytes": None}},
    None,
]


def test_a_manifest_of_another_structure(saved: Path) -> None:
    texts = ["[" * 100_000, "[]", "3", "null", '"text"', "\x00", "{}"]
    for files in WRONG:
        digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        texts.append(json.dumps({"format": 1, "digest": digest, "files": files}))
    for text in texts:
        (saved / MANIFEST).write_text(text)
        assert f"{MANIFEST} is damaged" in said(saved)


def test_a_folder_in_the_place_of_the_manifest(saved: Path) -> None:
    (saved / MANIFEST).unlink()
    (saved / MANIFEST).mkdir()
    assert f"{MANIFEST} is damaged" in said(saved)
    with pytest.raises(CheckpointError, match="is a folder: remove it"):
        write_manifest(saved)


def test_a_single_file(tmp_path: Path) -> None:
    file = tmp_path / "optimizer.pt"
    torch.save({"state": torch.ones(3)}, file)
    assert write_manifest(file) == tmp_path / f"optimizer.pt.{MANIFEST}"
    (tmp_path / "neighbour").touch()
    verify(file)
    flip(file, 100)
    assert "optimizer.pt has changed" in said(file)
    file.unlink()
    assert "does not exist" in said(file)


def test_nothing_to_describe(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no files: save the checkpoint first"):
        write_manifest(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        write_manifest(tmp_path / "typo")
    assert issubclass(CheckpointError, StateError)
    assert issubclass(CheckpointError, MeshmuonError)


def test_a_file_that_is_still_being_written(saved: Path) -> None:
    before = (saved / MANIFEST).read_bytes()

    def write_on(done: int, total: int) -> None:
        with (saved / "__0_0.distcp").open("ab") as file:
            file.write(b"more")

    with pytest.raises(
        CheckpointError, match=r"__0_0\.distcp had 10240 bytes and has \d+ now: it is still being written"
    ):
        write_manifest(saved, progress=write_on)
    assert (saved / MANIFEST).read_bytes() == before


def test_progress_counts_all_bytes(saved: Path) -> None:
    total = sum(map(len, FILES.values()))
    for call in (write_manifest, verify):
        shown: list[tuple[int, int]] = []
        call(saved, progress=lambda done, of, shown=shown: shown.append((done, of)))
        assert shown[-1] == (total, total)
        assert [done for done, _ in shown] == sorted(done for done, _ in shown)


def test_an_interrupted_write_leaves_the_old_manifest(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (saved / MANIFEST).read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_manifest(saved)
    assert (saved / MANIFEST).read_bytes() == before
    assert not (saved / f"{MANIFEST}.tmp").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_a_flipped_bit_without_a_word(tmp_path: Path) -> None:
    """What the manifest is for: the same file, silently wrong for ``dcp.load``, refused by ``verify``."""
    folder = tmp_path / "step5"
    momentum = torch.arange(4096.0)
    dcp.save({"momentum": momentum}, checkpoint_id=folder)
    write_manifest(folder)
    (data,) = folder.glob("*.distcp")
    content = data.read_bytes()
    at = content.index(momentum[1000:1010].numpy().tobytes())  # in the middle of the numbers, not in a header
    flip(data, at + 3, 6)
    loaded = {"momentum": torch.zeros(4096)}
    dcp.load(loaded, checkpoint_id=folder)
    wrong = (loaded["momentum"] != momentum).nonzero().flatten().tolist()
    assert wrong == [1000], "torch noticed, or the bit was not among the numbers"
    assert f"{data.name} has changed" in said(folder)
    flip(data, at + 3, 6)
    verify(folder)
