"""What users hand in: files, and the words for names and numbers that cannot be used."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from ...errors import ConfigError
from ..predict.machines import MACHINE_FILES, Machine

_PRESETS = {"model": Path(__file__).parent / "model_files", "machine": MACHINE_FILES}
_Parsed = TypeVar("_Parsed")


def read_file(name: str, path: Path, parse: Callable[[str], _Parsed], wrong: str, advice: str = "") -> _Parsed:
    """What ``parse`` makes of a file's text. Whatever fails becomes a sentence about ``name``, such as "--layout FILE".

    ``wrong`` is the verb of that sentence where the content is of another kind, and ``advice`` follows it.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}.") from None
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{name} {wrong} ({type(error).__name__}: {error}).{advice}") from None


def preset_names(kind: str) -> list[str]:
    """The names of the models, or of the machines, that come with meshmuon; ``kind`` is "model" or "machine"."""
    return sorted(path.stem for path in _PRESETS[kind].glob("*.json"))


def read_preset(flag: str, name: str, kind: str, from_json: Callable[[Any], _Parsed]) -> _Parsed:
    """What comes with meshmuon under this name, or what a user has put into the file of this name."""
    known = preset_names(kind)
    if name.lower() not in known and not name.endswith(".json"):
        raise ConfigError(
            f"{flag} {name} is unknown.{did_you_mean(name, known)} Write one of {', '.join(known)}, or the path of a "
            ".json file."
        )
    path = _PRESETS[kind] / f"{name.lower()}.json" if name.lower() in known else Path(name)
    return read_file(str(path), path, lambda text: from_json(json.loads(text)), f"is not a description of a {kind}")


def load_machine(name: str) -> Machine:
    return read_preset("--hardware", name, "machine", Machine.from_json)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``" Did you mean x?"`` for the known name that looks most like ``name``; empty if none does."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def divisors(number: int) -> list[int]:
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def nearest(numbers: Iterable[int], wanted: int) -> str:
    """A few numbers around ``wanted``, as text: "16, 32 or 64"."""
    closest = sorted(sorted(numbers, key=lambda number: abs(number - wanted))[:3])
    words = [str(number) for number in closest]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
