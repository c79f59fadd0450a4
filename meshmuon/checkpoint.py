"""Checkpoints beyond ``state_dict``: files that prove they are what was saved, and state of torch's own optimizers.

Saving and loading themselves are torch's: ``state_dict`` / ``load_state_dict``, or ``torch.distributed.checkpoint``, which takes
damaged data without a word. ``write_manifest`` describes what was saved; ``verify`` compares before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from .errors import CheckpointError, StateError
from .optim import Muon

__all__ = ["MANIFEST", "Progress", "convert_torch_state", "verify", "write_manifest"]

MANIFEST = "meshmuon-manifest.json"
"""Name of the manifest inside a folder; beside a single file it is ``<file>.meshmuon-manifest.json``."""

Progress: TypeAlias = Callable[[int, int], None]
"""Told (bytes read so far, bytes in all) while files are read, from one thread at a time."""

_FORMAT = 1
_CHUNK = 1 << 22
_READERS = 8


@dataclass(frozen=True, slots=True)
class _File:
    bytes: int
    sha256: str


def write_manifest(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """Writes the size and SHA-256 of a checkpoint's files, to be compared by ``verify`` before loading.

    Call it on one rank, when all ranks have saved: ``dcp.save`` returns on its coordinator (rank 0) after all have written; after
    anything else, a barrier first. It needs no process group. The manifest is replaced as a whole or not at all.

    Args:
        path: a folder, all of whose files are described, or a single file.
        progress: told how many bytes have been read.

    Returns:
        Where the manifest is.
    """
    place = Path(path)
    found = _found(place)
    if not found:
        raise CheckpointError(f"{place} holds no files: save the checkpoint first, then write its manifest.")
    sizes = {name: found[name].stat().st_size for name in found}
    hashes = _hashes(found, sizes, progress)
    for name, size in sizes.items():
        if (now := found[name].stat().st_size) != size:
            raise CheckpointError(
                f"{found[name]} had {size} bytes and has {now} now: it is still being written. Write the manifest when all ranks "
                "have saved, after a barrier."
            )
    files = {name: asdict(one) for name, one in sorted(hashes.items())}
    manifest = {"format": _FORMAT, "digest": _digest(files), "files": files}
    _replace(_manifest_of(place), json.dumps(manifest, indent=1))
    return _manifest_of(place)


def verify(path: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
    """Raises CheckpointError unless the files of a checkpoint are exactly those that ``write_manifest`` described.

    It needs no process group, and every rank that calls it gets the same error.

    Args:
        path: the folder or file that was given to ``write_manifest``.
        progress: told how many bytes have been read.
    """
    place = Path(path)
    expected, found = _read(place), _found(place)
    sizes = {name: found[name].stat().st_size for name in expected if name in found}
    hashes = _hashes(found, {name: size for name, size in sizes.items() if size == expected[name].bytes}, progress)
    wrong = []
    for name, one in expected.items():
        if name not in found:
            wrong.append(f"{name} is missing ({one.bytes} bytes)")
        elif sizes[name] != one.bytes:
            what = "truncated" if sizes[name] < one.bytes else "longer than it was"
            wrong.append(f"{name} is {what}: expected {one.bytes} bytes, found {sizes[name]}")
        elif hashes[name] != one:
            wrong.append(f"{name} has changed: expected SHA-256 {one.sha256[:16]}…, found {hashes[name].sha256[:16]}…")
    wrong += [f"{name} is extra: it was not there when the manifest was written" for name in found if name not in expected]
    if wrong:
        raise CheckpointError(
            f"{place} is not the checkpoint that was saved:\n  " + "\n  ".join(wrong) + "\nLoad another checkpoint. "
            "If the files were changed on purpose, call write_manifest on them again."
        )


def _manifest_of(place: Path) -> Path:
    return place / MANIFEST if place.is_dir() else place.with_name(f"{place.name}.{MANIFEST}")


def _found(place: Path) -> dict[str, Path]:
    """The checkpoint's files by their name in the manifest, in order."""
    if place.is_dir():
        own = (MANIFEST, f"{MANIFEST}.tmp")
        paths = sorted(Path(folder, name) for folder, _, names in os.walk(place, onerror=_raise) for name in names)
        found = {path.relative_to(place).as_posix(): path for path in paths}
        found = {name: path for name, path in found.items() if name not in own}
    elif place.exists():
        found = {place.name: place}
    else:
        raise CheckpointError(f"{place} does not exist: give the folder or file that the checkpoint was saved to.")
    for path in found.values():
        if not path.exists():
            raise CheckpointError(f"{path} is a link to nothing: remove it, or restore its target.")
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would wait for ever
            raise CheckpointError(f"{path} is not a regular file: a checkpoint's folder must hold nothing else.")
    return found


def _raise(error: OSError) -> None:
    raise error


def _hashes(files: Mapping[str, Path], sizes: Mapping[str, int], progress: Progress | None) -> dict[str, _File]:
    """Reads the files that ``sizes`` names, each to its size at that time and not on: one that grows has no end."""
    lock, done, total = threading.Lock(), 0, sum(sizes.values())

    def tell(count: int) -> None:
        nonlocal done
        if progress is not None:
            with lock:
                done += count
                progress(done, total)

    def read(name: str) -> _File:
        hasher, size = hashlib.sha256(), 0
        with files[name].open("rb") as file:
            while size < sizes[name] and (chunk := file.read(_CHUNK)):
                hasher.update(chunk)  # without the interpreter's lock, so that files are read side by side
                size += len(chunk)
                tell(len(chunk))
        return _File(size, hasher.hexdigest())

    readers = ThreadPoolExecutor(_READERS)
    try:
        return dict(zip(sizes, readers.map(read, sizes), strict=True))
    finally:
        readers.shutdown(cancel_futures=True)


def _digest(files: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _replace(path: Path, text: str) -> None:
    """Whoever reads ``path`` sees the old file or the new one, also after a crash."""
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


def _read(place: Path) -> dict[str, _File]:
    path = _manifest_of(place)
    if not place.exists():
        raise CheckpointError(f"{place} does not exist: give the folder or file that the checkpoint was saved to.")
    if not path.exists():
        raise CheckpointError(
            f"{place} has no manifest ({path.name}), so that damage cannot be seen: call "
            "meshmuon.checkpoint.write_manifest on it after saving, on one rank."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        number, files, digest = manifest["format"], manifest["files"], manifest["digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): the checkpoint cannot be verified. Load another one.") from None
    if number != _FORMAT:
        raise CheckpointError(f"{path} has format {number}, this version of meshmuon reads {_FORMAT}: verify with a newer one.")
    if digest != _digest(files):
        raise CheckpointError(f"{path} is damaged (its own digest differs): the checkpoint cannot be verified. Load another one.")
    return {name: _File(**one) for name, one in files.items()}


@dataclass(frozen=True, slots=True)
class _Saved:
    """One parameter in a state_dict of torch: its entry, its group, and which optimizer it belongs to."""

    kind: str
    entry: Mapping[str, Any]
    group: Mapping[str, Any]


def convert_torch_state(
    optimizer: Muon,
    muon_state: Mapping[str, Any] | None,
    adamw_state: Mapping[str, Any] | None,
    *,
    muon_names: Sequence[str] | None = None,
    adamw_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """A state_dict for ``optimizer`` from those of ``torch.optim.Muon`` and ``torch.optim.AdamW`` over the same parameters.

    Parameters are matched by name. torch keeps momentum as a mean, ``buf ← μ·buf + (1 − μ)·G``, meshmuon as a sum,
    ``M ← μ·M + G``: the momentum becomes ``buf / (1 − μ)``, and as every later update differs by that one factor, which
    orthogonalisation removes, the run goes on as it would have. lr, weight decay, momentum, Nesterov, betas, eps, coefficients
    and the rule for the learning rate come along. torch orthogonalises in bfloat16: give ``compute_dtype=torch.bfloat16`` to do
    likewise.

    Args:
        optimizer: the one that is to load the result. Its groups decide which parameter is Muon's; nothing in it is changed.
        muon_state: ``state_dict()`` of ``torch.optim.Muon``; None if there was none.
        adamw_state: ``state_dict()`` of ``torch.optim.AdamW``; None if there was none.
        muon_names: names of Muon's parameters in its order, for an optimizer that was not built from named parameters.
        adamw_names: the same for AdamW.

    Returns:
        What ``optimizer.load_state_dict`` takes.
    """
    saved = dict(_saved("torch.optim.Muon", "muon_names", muon_state, muon_names))
    for name, one in _saved("torch.optim.AdamW", "adamw_names", adamw_state, adamw_names):
        if name in saved:
            raise StateError(f"{name} is in the states of both torch.optim.Muon and torch.optim.AdamW: it must be in one.")
        saved[name] = one
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    state: dict[int, dict[str, Any]] = {}
    for group, live in zip(groups, optimizer.param_groups, strict=True):
        mine = {name: saved.pop(name) for name in live["param_names"] if name in saved}
        for name, param, key in zip(live["param_names"], live["params"], group["params"], strict=True):
            if name in mine:
                state[key] = _entry(name, mine[name], live)
            elif param.requires_grad:
                raise StateError(f"{name} is in neither state: give states of the same model, with the optimizer's names.")
        _take_options(group, {name: _options(one, live) for name, one in mine.items()})
    if saved:
        raise StateError(f"{next(iter(saved))} has state but is not among the optimizer's parameters ({len(saved)} such).")
    return {"state": state, "param_groups": groups}


def _saved(
    kind: str, argument: str, state_dict: Mapping[str, Any] | None, names: Sequence[str] | None
) -> Iterator[tuple[str, _Saved]]:
    if state_dict is None:
        return
    groups = state_dict["param_groups"]
    keys = [(group, key) for group in groups for key in group["params"]]
    if names is None and all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    if names is None:
        raise StateError(
            f"the state of {kind} has no names, since it was built from bare parameters: pass {argument}=[...], the names of its "
            "parameters in its order."
        )
    if len(names) != len(keys) or len(set(names)) != len(names):
        raise StateError(f"{argument} has {len(set(names))} different names for {len(keys)} parameters of {kind}.")
    for name, (group, key) in zip(names, keys, strict=True):
        yield name, _Saved(kind, state_dict["state"].get(key, {}), group)


def _entry(name: str, one: _Saved, live: Mapping[str, Any]) -> dict[str, Any]:
    wanted = "torch.optim.Muon" if live["use_muon"] else "torch.optim.AdamW"
    if one.kind != wanted:
        raise StateError(f"{name} is stepped here as by {wanted}, its state is from {one.kind}: route it the same way.")
    expected = ("momentum_buffer",) if live["use_muon"] else ("step", "exp_avg", "exp_avg_sq")
    if one.group.get("amsgrad") or "max_exp_avg_sq" in one.entry:
        raise StateError(f"{name}: its state is from AdamW with amsgrad=True, which meshmuon's AdamW does not do.")
    if not one.group.get("decoupled_weight_decay", True) and one.group["weight_decay"]:
        raise StateError(f"{name}: its state is from Adam, whose weight decay goes through the gradient; AdamW's does not.")
    if not one.entry:  # no gradient so far: it starts from zero
        return {}
    if not all(key in one.entry for key in expected):
        raise StateError(f"{name}: the state of {one.kind} has {sorted(one.entry)}, expected {list(expected)}.")
    found = {key: torch.as_tensor(one.entry[key]).detach().clone() for key in expected}
    if live["use_muon"]:
        buffer = found["momentum_buffer"]
        found["momentum_buffer"] = buffer.to(live["momentum_dtype"] or buffer.dtype) / (1 - _momentum(name, one))
    return found


def _momentum(name: str, one: _Saved) -> float:
    momentum = float(one.group["momentum"])
    if not 0 <= momentum < 1:
        raise StateError(f"{name}: momentum={momentum} in the state of {one.kind}; only momentum in [0, 1) can be converted.")
    return momentum


def _options(one: _Saved, live: Mapping[str, Any]) -> dict[str, Any]:
    """What the saved group says, in the words of meshmuon."""
    group = one.group
    options = {key: group[key] for key in ("lr", "weight_decay", "initial_lr") if key in group}
    if live["use_muon"]:
        steps = (tuple(group["ns_coefficients"]),) * group["ns_steps"]
        rule = group["adjust_lr_fn"] or "original"
        own = {"scheme": steps, "adjust_lr_fn": rule, **{key: group[key] for key in ("momentum", "nesterov", "ns_steps")}}
    else:
        own = {"maximize": group["maximize"]}
        own |= {key if key in live else f"adamw_{key}": group[key] for key in ("betas", "eps")}  # torch's own keys serve as well
    return options | own


def _take_options(group: dict[str, Any], options: Mapping[str, Mapping[str, Any]]) -> None:
    """All parameters of one group must have been stepped alike."""
    if not options:
        return
    first = next(iter(options))
    for name, found in options.items():
        for key, value in found.items():
            if value != options[first].get(key):
                raise StateError(
                    f"{first} was stepped with {key}={options[first].get(key)}, {name} with {value}, but here they are in one "
                    "group: build a group for each."
                )
    group.update(options[first])
