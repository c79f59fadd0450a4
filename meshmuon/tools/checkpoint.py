"""Checkpoints beyond ``state_dict``: detecting damaged files, and converting the state of torch's own optimizers.

Save and load with torch: ``state_dict`` / ``load_state_dict``, or ``torch.distributed.checkpoint``, which silently loads
corrupted data. ``write_manifest`` records size and hash of every file that was saved; ``verify`` compares them before anything is
loaded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, cast

import torch

from ..errors import CheckpointError, MeshmuonError, StateError
from ..optim import Muon
from ..params.option_table import ParamGroup
from ..state.param_state import start

MANIFEST = "meshmuon-manifest.json"
"""Name of the manifest inside a folder; beside a single file it is ``<file>.meshmuon-manifest.json``."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes read so far, bytes in total) while files are read, by one thread at a time."""

_Args = ParamSpec("_Args")
_FORMAT = 1
_CHUNK = 1 << 22
_READERS = 8
_OPTIMIZERS = {True: "torch.optim.Muon", False: "torch.optim.AdamW"}


@dataclass(frozen=True, slots=True)
class _File:
    bytes: int
    sha256: str


def write_manifest(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """Records the size and SHA-256 of a checkpoint's files, for ``verify`` to compare before loading.

    Call it on one rank after all ranks have saved. ``dcp.save`` returns on its coordinator (rank 0) after all ranks have written;
    after any other way of saving, call a barrier first. It needs no process group. The manifest is replaced atomically.

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
    records = _read_files(paths, sizes, progress)
    for name, size in sizes.items():
        if (now := paths[name].stat().st_size) != size:
            raise CheckpointError(
                f"{paths[name]} had {size} bytes and has {now} now: it is still being written. Write the manifest when all ranks "
                "have saved, after a barrier."
            )
    if _manifest_path(checkpoint).is_dir():
        raise CheckpointError(f"{_manifest_path(checkpoint)} is a folder: remove it, the manifest has this name.")
    files = {name: asdict(record) for name, record in sorted(records.items())}
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
    records = _read_files(paths, {name: size for name, size in sizes.items() if size == expected[name].bytes}, progress)
    problems = []
    for name, record in expected.items():
        if name not in paths:
            problems.append(f"{name} is missing ({record.bytes} bytes)")
        elif sizes[name] != record.bytes:
            what = "truncated" if sizes[name] < record.bytes else "longer than it was"
            problems.append(f"{name} is {what}: expected {record.bytes} bytes, found {sizes[name]}")
        elif records[name] != record:
            problems.append(f"{name} has changed: expected SHA-256 {record.sha256[:16]}…, found {records[name].sha256[:16]}…")
    problems += [f"{name} is extra: it was not there when the manifest was written" for name in paths if name not in expected]
    if problems:
        raise CheckpointError(
            f"{checkpoint} is not the checkpoint that was saved:\n  " + "\n  ".join(problems) + "\nLoad another checkpoint. "
            "If the files were changed on purpose, call write_manifest on them again."
        )


def _manifest_path(checkpoint: Path) -> Path:
    return checkpoint / MANIFEST if checkpoint.is_dir() else checkpoint.with_name(f"{checkpoint.name}.{MANIFEST}")


def _file_paths(checkpoint: Path) -> dict[str, Path]:
    """The checkpoint's files, sorted, by their name in the manifest."""
    if checkpoint.is_dir():
        manifests = (MANIFEST, f"{MANIFEST}.tmp")
        walked = sorted(Path(folder, name) for folder, _, names in os.walk(checkpoint, onerror=_raise) for name in names)
        paths = {path.relative_to(checkpoint).as_posix(): path for path in walked}
        paths = {name: path for name, path in paths.items() if name not in manifests}
    elif checkpoint.exists():
        paths = {checkpoint.name: checkpoint}
    else:
        raise CheckpointError(f"{checkpoint} does not exist: give the folder or file that the checkpoint was saved to.")
    for path in paths.values():
        if not path.exists():
            raise CheckpointError(f"{path} is a broken link: remove it, or restore its target.")
        if not stat.S_ISREG(path.stat().st_mode):  # reading a pipe would wait forever
            raise CheckpointError(f"{path} is not a regular file: a checkpoint's folder must hold nothing else.")
    return paths


def _raise(error: OSError) -> None:
    raise error


def _read_files(files: Mapping[str, Path], sizes: Mapping[str, int], progress: Progress | None) -> dict[str, _File]:
    """Reads and hashes the files that ``sizes`` names, each up to that size: a file that is still written may never end."""
    lock, done, total = threading.Lock(), 0, sum(sizes.values())

    def report(count: int) -> None:
        nonlocal done
        if progress is not None:
            with lock:
                done += count
                progress(done, total)

    def read(name: str) -> _File:
        hasher, size = hashlib.sha256(), 0
        with files[name].open("rb") as file:
            while size < sizes[name] and (chunk := file.read(_CHUNK)):
                hasher.update(chunk)  # releases the interpreter's lock, so several files are hashed in parallel
                size += len(chunk)
                report(len(chunk))
        return _File(size, hasher.hexdigest())

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


def _read_manifest(checkpoint: Path) -> dict[str, _File]:
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
        return {name: _File(int(record["bytes"]), str(record["sha256"])) for name, record in files.items()}
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): the checkpoint cannot be verified. Load another one.") from None


def raises_state_errors(convert: Callable[_Args, dict[str, Any]]) -> Callable[_Args, dict[str, Any]]:
    """``convert``, with a StateError for whatever a state that is not whole makes it raise."""

    @functools.wraps(convert)
    def converted(*args: _Args.args, **options: _Args.kwargs) -> dict[str, Any]:
        try:
            return convert(*args, **options)
        except MeshmuonError:
            raise
        except Exception as error:  # a missing option, or a value of another kind
            raise StateError(
                f"{convert.__name__}: this is not what the other optimizer saves ({type(error).__name__}: {error}). Give what "
                "its state_dict() returned, and names as strings."
            ) from error

    return converted


@dataclass(frozen=True, slots=True)
class SavedParam:
    """A parameter of another optimizer, whose state and options have the names that they have here."""

    use_muon: bool
    state: Mapping[str, Any]  # empty before its first gradient
    options: Mapping[str, Any]  # those that are missing stay the optimizer's own
    is_mean: bool = False  # its momentum is a mean, ``buf ← μ·buf + (1 − μ)·G``; here it is a sum


@raises_state_errors
def convert_torch_state(
    optimizer: Muon,
    muon_state: Mapping[str, Any] | None,
    adamw_state: Mapping[str, Any] | None,
    *,
    muon_names: Sequence[str] | None = None,
    adamw_names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """A state_dict for ``optimizer`` from those of ``torch.optim.Muon`` and ``torch.optim.AdamW`` over the same parameters.

    Parameters are matched by name. torch keeps momentum as a mean, ``buf ← μ·buf + (1 − μ)·G``; meshmuon keeps it as a sum,
    ``M ← μ·M + G``. The momentum therefore becomes ``buf / (1 − μ)``. Every later update differs by that one factor, which
    orthogonalisation removes, so training continues as it would have with torch. lr, weight decay, momentum, Nesterov, betas,
    eps, coefficients and the learning-rate rule are converted as well. torch orthogonalises in bfloat16: pass
    ``compute_dtype=torch.bfloat16`` to do the same.

    Args:
        optimizer: the optimizer that will load the result. Its param groups decide which parameters are Muon's; nothing changes.
        muon_state: ``state_dict()`` of ``torch.optim.Muon``; None if there was none.
        adamw_state: ``state_dict()`` of ``torch.optim.AdamW``; None if there was none.
        muon_names: names of Muon's parameters in its order, for an optimizer that was not built from named parameters.
        adamw_names: the same for AdamW.

    Returns:
        What ``optimizer.load_state_dict`` takes.
    """
    routes = {name: group["use_muon"] for group in optimizer.param_groups for name in group["param_names"]}
    saved: dict[str, SavedParam] = {}
    of_muon = _torch_params(True, "muon_names", muon_state, muon_names)
    of_adamw = _torch_params(False, "adamw_names", adamw_state, adamw_names)
    for name, use_muon, state, options in chain(of_muon, of_adamw):
        if name in saved:
            raise StateError(f"{name} is in the states of both torch.optim.Muon and torch.optim.AdamW: it must be in one.")
        _check_route(name, use_muon, routes.get(name, use_muon))
        saved[name] = _from_torch(name, use_muon, state, options)
    return state_dict_from(optimizer, saved)


def state_dict_from(optimizer: Muon, saved: Mapping[str, SavedParam]) -> dict[str, Any]:
    """What ``optimizer.load_state_dict`` takes, from the parameters of another optimizer by name."""
    param_groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    state: dict[int, dict[str, Any]] = {}
    rest = dict(saved)
    for param_group, live in zip(param_groups, optimizer.param_groups, strict=True):
        options: dict[str, dict[str, Any]] = {}
        for name, param, key in zip(live["param_names"], live["params"], param_group["params"], strict=True):
            if name in rest:
                member = rest.pop(name)
                _check_route(name, member.use_muon, live["use_muon"])
                # A param group may have torch's own keys for AdamW's options instead of meshmuon's.
                renamed = {} if live["use_muon"] else {k: f"adamw_{k}" for k in ("betas", "eps") if k not in live}
                options[name] = {renamed.get(k, k): value for k, value in member.options.items()}
                state[key] = _state_here(name, member, live["momentum_dtype"] if live["use_muon"] else None)
                if state[key]:
                    start(state[key], name, param, cast(ParamGroup, live))
            elif param.requires_grad:
                raise StateError(f"{name} is in neither state: give states of the same model, with the optimizer's names.")
        _set_options(param_group, options)
    if rest:
        raise StateError(f"{next(iter(rest))} has state but is not one of the optimizer's parameters ({len(rest)} such names).")
    return {"state": state, "param_groups": param_groups}


def _check_route(name: str, saved_as_muon: bool, is_muon: bool) -> None:
    if saved_as_muon != is_muon:
        raise StateError(
            f"{name} needs the state of {_OPTIMIZERS[is_muon]}, but its state is from {_OPTIMIZERS[saved_as_muon]}: route it the "
            "same way."
        )


def _state_here(name: str, saved: SavedParam, momentum_dtype: torch.dtype | None) -> dict[str, Any]:
    if not saved.use_muon or not saved.state:
        return dict(saved.state)
    momentum = float(saved.options["momentum"])
    if not 0 <= momentum < 1:
        raise StateError(f"{name}: momentum={momentum} in its saved state; only momentum in [0, 1) can be converted.")
    buffer = saved.state["momentum_buffer"].detach()
    buffer = buffer.to(momentum_dtype or buffer.dtype, copy=True)
    return {"momentum_buffer": buffer / (1 - momentum) if saved.is_mean else buffer}


def _torch_params(
    use_muon: bool, argument: str, state_dict: Mapping[str, Any] | None, names: Sequence[str] | None
) -> Iterator[tuple[str, bool, Mapping[str, Any], Mapping[str, Any]]]:
    """Name, kind, state and param group of every parameter; ``argument`` is where a user can give the names."""
    if state_dict is None:
        return
    kind = _OPTIMIZERS[use_muon]
    if not is_state_dict(state_dict):
        raise StateError(f"the state of {kind} is not what its state_dict() returns: a dict with 'state' and 'param_groups'.")
    param_groups = state_dict["param_groups"]
    keys = [(param_group, key) for param_group in param_groups for key in param_group["params"]]
    if names is None and all("param_names" in param_group for param_group in param_groups):
        names = [name for param_group in param_groups for name in param_group["param_names"]]
    if names is None:
        raise StateError(
            f"the state of {kind} has no names, since it was built from bare parameters: pass {argument}=[...], the names of its "
            "parameters in its order."
        )
    if len(names) != len(keys) or len(set(names)) != len(names):
        raise StateError(f"{argument} has {len(set(names))} different names for {len(keys)} parameters of {kind}.")
    for name, (param_group, key) in zip(names, keys, strict=True):
        yield name, use_muon, state_dict["state"].get(key, {}), param_group


def _from_torch(name: str, use_muon: bool, state: Mapping[str, Any], options: Mapping[str, Any]) -> SavedParam:
    expected = ("momentum_buffer",) if use_muon else ("step", "exp_avg", "exp_avg_sq")
    if options.get("amsgrad") or "max_exp_avg_sq" in state:
        raise StateError(f"{name}: its state is from AdamW with amsgrad=True, which meshmuon's AdamW does not do.")
    if not options.get("decoupled_weight_decay", True) and options["weight_decay"]:
        raise StateError(f"{name}: its state is from Adam, whose weight decay goes through the gradient; AdamW's does not.")
    if state and not all(key in state for key in expected):
        raise StateError(f"{name}: the state of {_OPTIMIZERS[use_muon]} has {sorted(state)}, expected {list(expected)}.")
    try:
        converted = {key: torch.as_tensor(state[key]).detach().clone() for key in expected if state}
        same = ("lr", "weight_decay", "initial_lr", "maximize", "cautious_weight_decay")
        kept = {key: options[key] for key in same if key in options}
        if not use_muon:
            return SavedParam(False, converted, {**kept, "betas": options["betas"], "eps": options["eps"]})
        kept |= {key: options[key] for key in ("momentum", "nesterov", "ns_steps")}
        kept["scheme"] = (tuple(options["ns_coefficients"]),) * options["ns_steps"]
        kept["adjust_lr_fn"] = options["adjust_lr_fn"] or "original"
        return SavedParam(True, converted, kept, is_mean=True)
    except Exception as error:  # a missing option, or a value of another kind
        raise StateError(
            f"{name}: the state of {_OPTIMIZERS[use_muon]} is not one that it saves ({type(error).__name__}: {error}). Give what "
            "its state_dict() returned."
        ) from error


def _set_options(param_group: dict[str, Any], options: Mapping[str, Mapping[str, Any]]) -> None:
    """Sets the options that all parameters of a param group were stepped with; raises if they differ."""
    if not options:
        return
    first = next(iter(options))
    for name, param_options in options.items():
        for key, value in param_options.items():
            if value != options[first].get(key):
                raise StateError(
                    f"{first} was stepped with {key}={options[first].get(key)}, {name} with {value}, but here they are in one "
                    "group: build a group for each."
                )
    param_group.update(options[first])


def is_state_dict(state: Any) -> bool:
    """Whether this has the form of a state_dict of torch: a dict ``state`` of dicts, a list ``param_groups`` of dicts."""
    if not (isinstance(state, Mapping) and isinstance(state.get("state"), Mapping)):
        return False
    groups = state.get("param_groups")
    if not (isinstance(groups, list | tuple) and all(isinstance(group, Mapping) for group in groups)):
        return False
    params = [group.get("params") for group in groups]
    return all(isinstance(keys, list | tuple) for keys in params) and all(isinstance(e, Mapping) for e in state["state"].values())
