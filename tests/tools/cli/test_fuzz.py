"""Random command lines of ``meshmuon plan``: each ends with an exit code and, unless it is 0, a sentence; none in a
traceback.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshmuon.tools import simulate
from meshmuon.tools.cli.main import main
from meshmuon.tools.predict.machines import MACHINE_FILES
from tests.support.optional import need
from tests.tools.predict.test_calibration import MEASURED

_COMMANDS, _PARTS = 400, 8
_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
_MOE = {**_LLAMA, "model_type": "mixtral", "architectures": None, "num_local_experts": 4, "num_experts_per_tok": 2}
_LAYOUT = {
    "meshes": {"main": {"shape": [2, 4], "ranks": list(range(8))}},
    "params": {
        "*norm*": {"mesh": "main", "placements": ["R", "R"]},
        "*": {"mesh": "main", "placements": ["R", "S(0)"]},
    },
}
_NUMBERS = (-1, 0, 1, 0.5, 1e-320, 1e17, 1e308, 10**30, 2**40, float("nan"))
_WRONG = (None, "", "x", "4", *_NUMBERS, True, [], {}, [1], ["x"], {"a": 1}, [[]])
_TEXTS = (
    "",
    "x",
    "-",
    "0",
    "-1",
    "1",
    "7",
    "512k",
    "1.5G",
    "64MiB",
    "1e9",
    "nan",
    "inf",
    "9" * 400,
    "é",
    "float32",
    "bfloat16",
)
_MESHES = (
    "dp_shard=8",
    "dp_replicate=2,dp_shard=4",
    "dp_shard=4,tp=2",
    "pp=2,dp_shard=2",
    "dp_shard=8,ep=4",
    "dp_shard=-1",
)
_OF_TESTS = tuple(f"tests.tools.cli.test_plan:{name}" for name in ("build", "build_table", "plan"))
_FOUND = ("torch.nn:Identity", "sys:exit", "sys:argv", "builtins:dict", "builtins:input")
_MODULES = (*_OF_TESTS, *_FOUND, "os:_does_not_exist", "nowhere:x", "x", ":", "..:x", "this.is:a.test")


class Files:
    """Files for command lines: each as it should be, or with something wrong in it."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self._rng, self._count = folder, rng, 0
        # whether the files of this line are as they should be: one that is wrong hides what comes after it
        self.sound = False
        shipped = Path(simulate.__file__).parent
        self._contents: dict[str, Any] = {
            "--hf-config": _LLAMA,
            "--layout": _LAYOUT,
            "--calibration": MEASURED.to_json(),
            "--hardware": json.loads((MACHINE_FILES / "h100.json").read_text(encoding="utf-8")),
            "--model": _small(json.loads((shipped / "model_files" / "gpt2.json").read_text(encoding="utf-8"))),
        }

    def path(self, option: str) -> str:
        rng, self._count = self._rng, self._count + 1
        path = self.folder / f"{self._count}.json"
        content = self._contents[option] if option != "--hf-config" or rng.random() < 0.6 else _MOE
        kind, self.sound = 1.0 if self.sound else rng.random(), True
        if kind < 0.05:
            return str(rng.choice((self.folder, self.folder / "none.json", "/dev/null", "", "n" * 300)))
        if kind < 0.10:
            path.write_bytes(rng.choice((b"", b"{", b"\xff\xfe", b"null", b"[]", b'"x"', b"1", b"NaN", b"[" * 10_000)))
        elif kind < 0.75:
            path.write_text(json.dumps(self._spoiled(content)))
        else:
            path.write_text(json.dumps(content))
        return str(path)

    def _spoiled(self, content: Any) -> Any:
        """A copy in which one value, at any depth, is another, or missing."""
        content = copy.deepcopy(content)
        place, key = self._rng.choice(list(_places(content)))
        if self._rng.random() < 0.25:
            del place[key]
        else:
            place[key] = self._rng.choice(_WRONG)
        return content


def _small(model: dict[str, Any]) -> dict[str, Any]:
    """With two layers."""
    for row in model["params"]:
        if "layers" in row:
            row["layers"]["last"] = 1
    return model


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(entries):
        yield content, key
        yield from _places(value)


def plan_line(rng: random.Random, files: Files) -> list[str]:
    source = rng.choice(("--model", "--model", "--hf-config", "--hf-config", "--module"))
    words = ["plan"]
    if rng.random() < 0.25:
        words += [
            "--hardware",
            rng.choice(("h100", "b200", "cpu", "abacus")) if rng.random() < 0.3 else files.path("--hardware"),
        ]
    if rng.random() < 0.2:
        words += ["--calibration", files.path("--calibration")]
    if rng.random() < 0.97:
        named = rng.choice(_MODULES) if source == "--module" else "gpt2" if rng.random() < 0.1 else files.path(source)
        words += [source, named]
    if rng.random() < 0.2:
        words += ["--layout", files.path("--layout")]
    for _ in range(rng.choice((0, 1, 1, 1, 2)) if "--layout" in words else rng.choice((1, 1, 1, 2))):
        axes = f"{rng.choice(('dp_shard', 'tp', 'shard', 'ep'))}={rng.choice(_TEXTS)}"
        words += ["--mesh", rng.choice(_MESHES) if rng.random() < 0.85 else axes]
    for option in (
        "--nodes",
        "--replicas",
        "--comm-dtype",
        "--param-dtype",
        "--momentum-dtype",
        "--scheme",
        "--memory-budget",
    ):
        if rng.random() < 0.04:
            words += [option, rng.choice((*_TEXTS, "auto", "repeat", "keller", "2"))]
    for option in ("--warmup-step", "--tokens-per-step", "--mfu"):
        if rng.random() < 0.04:
            words += [option, rng.choice(_TEXTS)]
    for option in ("--json", "--save-model"):
        if rng.random() < 0.1:
            words += [
                option,
                rng.choice(("-", str(files.folder / "out"), str(files.folder), "/nowhere/x", "/dev/full", "n" * 300)),
            ]
    return words + [flag for flag in ("--compare", "--list", "--help", "--nonsense") if rng.random() < 0.03]


def bare(line: Sequence[str], capfd: pytest.CaptureFixture[str]) -> str:
    """What is wrong with how a command line ends; empty if nothing is."""
    code: Any
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = main(line)
    except SystemExit as ending:
        code = ending.code
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    errors = capfd.readouterr().err
    if code not in (0, 1, 2) or "Traceback" in errors:
        return f"code {code}, {errors[-200:]}"
    sentence = errors.strip().splitlines()[-1:] or [""]
    return (
        ""
        if code == 0 or "error: " in sentence[0] or sentence[0].startswith("meshmuon")
        else f"code {code} and {errors!r}"
    )


@pytest.mark.parametrize("part", range(_PARTS))
def test_random_command_lines(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    need("transformers")
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.chdir(tmp_path)
    rng = random.Random(part)
    files, wrong = Files(tmp_path, rng), []
    for _ in range(_COMMANDS // _PARTS):
        files.sound = rng.random() < 0.2
        line = plan_line(rng, files)
        if problem := bare(line, capfd):
            wrong.append(f"{' '.join(map(repr, line))}\n    {problem}")
    assert not wrong, f"{len(wrong)} of {_COMMANDS // _PARTS}:\n" + "\n".join(wrong)
