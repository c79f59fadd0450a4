"""The models and machines that come with meshmuon, and those that users add: each is a small JSON file."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError
from .description import ModelDescription, load_model_file
from .machines import Machine, load_machine_file
from .suggestions import did_you_mean

_HERE = Path(__file__).parent


def model_names() -> list[str]:
    """The names of all models."""
    return _names("model_files")


def machine_names() -> list[str]:
    """The names of all machines."""
    return _names("machine_files")


def load_model(name: str) -> ModelDescription:
    """The model of this name, or of the file of this name."""
    return load_model_file(_path_of(name, "model_files", "--model"))


def load_machine(name: str) -> Machine:
    """The machine of this name, or of the file of this name."""
    return load_machine_file(_path_of(name, "machine_files", "--hardware"))


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
