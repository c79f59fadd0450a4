"""The models and machines that come with meshmuon, and those that users add: each is a small JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ...errors import ConfigError
from .description import ModelDescription
from .machines import Machine
from .words import did_you_mean

_HERE = Path(__file__).parent
_Described = TypeVar("_Described", ModelDescription, Machine)


def model_names() -> list[str]:
    """The names of all models."""
    return _names("model_files")


def machine_names() -> list[str]:
    """The names of all machines."""
    return _names("machine_files")


def load_model(name: str) -> ModelDescription:
    """The model of this name, or of the file of this name."""
    return _read(_path_of(name, "model_files", "--model"), "a model", ModelDescription.from_json)


def load_machine(name: str) -> Machine:
    """The machine of this name, or of the file of this name."""
    return _read(_path_of(name, "machine_files", "--hardware"), "a machine", Machine.from_json)


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (_HERE / folder).glob("*.json"))


def _path_of(name: str, folder: str, flag: str) -> Path:
    known = _names(folder)
    if name.lower() in known:
        return _HERE / folder / f"{name.lower()}.json"
    if name.endswith(".json"):
        return Path(name)
    raise ConfigError(
        f"{flag} {name} is unknown.{did_you_mean(name, known)} Write one of {', '.join(known)}, or the path of a .json file."
    )


def _read(path: Path, what: str, from_json: Callable[[Any], _Described]) -> _Described:
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path} is not a description of {what} ({type(error).__name__}: {error}).") from None
