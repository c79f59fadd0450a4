"""Manifests of checkpoints, which detect damaged files.

Save and load with torch: ``state_dict`` / ``load_state_dict``, or ``torch.distributed.checkpoint``, which silently
loads corrupted data. ``write_manifest`` records size and hash of every file that was saved; ``verify`` compares them
before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import CheckpointError

MANIFEST = "meshmuon-manifest.json"
"""Name of the manifest inside a folder; beside a single file it is ``<file>.meshmuon-manifest.json``."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in total) while files are read, by one thread at a time."""

_FORMAT = 1
_CHUNK = 1 << 22
_READERS = 8


def write_manifest(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """Records the size and SHA-256 of a checkpoint's files, for ``verify`` to compare before loading.

    Call it on one rank after all ranks have saved. ``dcp.save`` returns on its coordinator (rank 0) after all ranks
    have written; after any other way of saving, call a barrier first. It needs no process group. The manifest is
    replaced atomically.

    Args:
        path: a folder, all of whose files are recorded, or a single file.
        progress: called with the number of bytes that have been read.

    Returns:
        The path of the manifest.
    """
    checkpoint = Path(path)
    paths = _file_paths(checkpoint)
    if not paths:
        raise CheckpointError(f"{checkpoint} holds no files: save the checkpoint first, then write its manifest.")
    sizes = {name: file.stat().st_size for name, file in paths.items()}
    files = _read_files(paths, sizes, progress)
    for name, size in sizes.items():
        if (now := paths[name].stat().st_size) != size:
            raise CheckpointError(
                f"{paths[name]} had {size} bytes and has {now} now: it is still being written. Write the manifest "
                "when all ranks have saved, after a barrier."
            )
    if _manifest_path(checkpoint).is_dir():
        raise CheckpointError(f"{_manifest_path(checkpoint)} is a folder: remove it, the manifest has this name.")
    manifest = {"format": _FORMAT, "digest": _digest(files), "files": files}
    _replace(_manifest_path(checkpoint), json.dumps(manifest, indent=1))
    return _manifest_path(checkpoint)


def verify(path: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
    """Raises CheckpointError unless the files of a checkpoint are exactly those that ``write_manifest`` recorded.

    It needs no process group, and every rank that calls it gets the same error.

    Args:
        path: the folder or file that was given to ``write_manifest``.
        progress: called with the number of bytes that have been read.
    """
    checkpoint = Path(path)
    paths, expected = _file_paths(checkpoint), _read_manifest(checkpoint)
    sizes = {name: paths[name].stat().st_size for name in expected if name in paths}
    records = _read_files(
        paths, {name: size for name, size in sizes.items() if size == expected[name]["bytes"]}, progress
    )
    problems = []
    for name, record in expected.items():
        size, digest = record["bytes"], record["sha256"]
        if name not in paths:
            problems.append(f"{name} is missing ({size} bytes)")
        elif sizes[name] != size:
            what = "truncated" if sizes[name] < size else "longer than it was"
            problems.append(f"{name} is {what}: expected {size} bytes, found {sizes[name]}")
        elif records[name] != record:
            problems.append(
                f"{name} has changed: expected SHA-256 {digest[:16]}…, found {records[name]['sha256'][:16]}…"
            )
    problems += [
        f"{name} is extra: it was not there when the manifest was written" for name in paths if name not in expected
    ]
    if problems:
        raise CheckpointError(
            f"{checkpoint} is not the checkpoint that was saved:\n  "
            + "\n  ".join(problems)
            + "\nLoad another checkpoint. "
            "If the files were changed on purpose, call write_manifest on them again."
        )


def _manifest_path(checkpoint: Path) -> Path:
    return checkpoint / MANIFEST if checkpoint.is_dir() else checkpoint.with_name(f"{checkpoint.name}.{MANIFEST}")


def _file_paths(checkpoint: Path) -> dict[str, Path]:
    """The checkpoint's files, sorted, by their name in the manifest."""
    if checkpoint.is_dir():
        walked = sorted(
            Path(folder, name) for folder, _, names in os.walk(checkpoint, onerror=_raise) for name in names
        )
        paths = {path.relative_to(checkpoint).as_posix(): path for path in walked}
        for name in (MANIFEST, f"{MANIFEST}.tmp"):
            paths.pop(name, None)
    elif checkpoint.exists():
        paths = {checkpoint.name: checkpoint}
    else:
        raise CheckpointError(f"{checkpoint} does not exist: give the folder or file that the checkpoint was saved to.")
    for path in paths.values():
        if not path.exists():
            raise CheckpointError(f"{path} is a broken link: remove it, or restore its target.")
        if not path.is_file():  # reading a pipe would wait forever
            raise CheckpointError(f"{path} is not a regular file: a checkpoint's folder must hold nothing else.")
    return paths


def _raise(error: OSError) -> None:
    raise error


def _read_files(files: Mapping[str, Path], sizes: Mapping[str, int], progress: Progress | None) -> dict[str, Any]:
    """Reads and hashes the files that ``sizes`` names, each up to that size: a file that is still written may never
    end.
    """
    lock, done, total = threading.Lock(), 0, sum(sizes.values())

    def report(count: int) -> None:
        nonlocal done
        if progress is not None:
            with lock:
                done += count
                progress(done, total)

    def read(name: str) -> dict[str, Any]:
        hasher, size = hashlib.sha256(), 0
        with files[name].open("rb") as file:
            while size < sizes[name] and (chunk := file.read(_CHUNK)):
                hasher.update(chunk)  # releases the interpreter's lock, so several files are hashed in parallel
                size += len(chunk)
                report(len(chunk))
        return {"bytes": size, "sha256": hasher.hexdigest()}

    readers = ThreadPoolExecutor(_READERS)
    try:
        return dict(zip(sizes, readers.map(read, sizes), strict=True))
    finally:
        readers.shutdown(cancel_futures=True)


def _digest(files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _replace(path: Path, text: str) -> None:
    """Replaces a file atomically: readers see the old file or the new one, even after a crash."""
    new = path.with_name(f"{path.name}.tmp")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def _read_manifest(checkpoint: Path) -> dict[str, dict[str, Any]]:
    path = _manifest_path(checkpoint)
    if not path.exists():
        raise CheckpointError(
            f"{checkpoint} has no manifest ({path.name}), so damage cannot be detected: call "
            "meshmuon.checkpoint.write_manifest on it after saving, on one rank."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        number, files, digest = manifest["format"], manifest["files"], manifest["digest"]
        if number != _FORMAT:
            raise CheckpointError(
                f"{path} has format {number}, this version of meshmuon reads {_FORMAT}: verify with a newer one."
            )
        if digest != _digest(files):
            raise ValueError("its own digest differs")
        return {
            name: {"bytes": int(record["bytes"]), "sha256": str(record["sha256"])} for name, record in files.items()
        }
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}): the checkpoint cannot be verified. Load another one."
        ) from None
