"""``meshmuon plan`` as a command: what it prints and writes, and what it refuses."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from meshmuon.tools.cli.main import main
from meshmuon.tools.predict.machines import MACHINE_FILES
from meshmuon.tools.simulate.render import print_report, sections_of
from tests.support.optional import need

MESH = "dp_replicate=2,dp_shard=8"


def build() -> nn.Module:
    """A model for ``--module``."""
    return nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 8))


def build_table() -> nn.Module:
    """A model whose only parameter is AdamW's."""
    return nn.Embedding(100, 16)


class Odd(nn.Linear):
    """A model that does not show its parameters."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def named_parameters(self, *args: Any, **options: Any) -> Any:
        raise KeyError("weight")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ending:
        main(["plan", *arguments])
    assert ending.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_the_tables_and_the_files_say_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    text = plan(capsys, "--model", "gpt2", "--mesh", MESH, "--nodes", "2", "--json", str(report), "--compare")
    facts = json.loads(report.read_text())
    assert facts["format"] == "meshmuon plan report"
    assert facts["mesh"]["ranks"] == 16
    assert facts["mesh"]["nodes"] == 2
    assert facts["model"]["parameters"] == 124_439_808
    assert facts["stages"][0]["digest"][:12] in text
    assert all(len(column) == 16 for column in facts["ranks"].values())
    for kind in ("sent", "received"):
        columns = [facts["ranks"][f"{kind}_{where}"] for where in ("inside", "between")]
        assert sum(map(sum, columns)) == sum(row["bytes_inside"] + row["bytes_between"] for row in facts["exchanges"])
    assert sum(map(sum, facts["traffic"][0]["bytes"])) == sum(row["bytes_sent"] for row in facts["params"])
    total = next(row for row in facts["memory"] if row["kind"] == "total")
    assert total["most"] == max(facts["ranks"]["memory"])
    assert {row["label"] for row in facts["choices"]} >= {"as chosen", 'replicas="repeat"', "comm_dtype=float32"}
    longest = max(span["start"] + span["seconds"] for span in facts["timeline"])
    assert longest <= facts["step"]["seconds"] * (1 + 1e-9)


def test_several_meshes_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    meshes = ("dp_shard=64,ep=8", "dp_replicate=2,dp_shard=32,ep=8", "dp_shard=448,ep=32")
    text = plan(capsys, "--model", "gpt-oss-20b", *(word for mesh in meshes for word in ("--mesh", mesh)))
    assert "* dp_shard=64,ep=8" in text
    assert "  dp_replicate=2,dp_shard=32,ep=8" in text
    table = text[text.index("side by side: meshes") :]
    assert ["cannot be planned" in line for line in table.splitlines()[4:7]] == [False, False, True]
    assert "refuses 2880 rows over 14 shards" in table


def test_models_and_machines_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--list")
    assert "kimi-k2" in text
    assert "mi300x" in text


def test_any_module(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "model.json"
    arguments = ("--mesh", "dp_shard=4", "--hardware", "cpu", "--json", "-")
    built = json.loads(
        plan(capsys, "--module", "tests.tools.cli.test_plan:build", "--save-model", str(saved), *arguments)
    )
    read = json.loads(plan(capsys, "--model", str(saved), *arguments))
    assert built["stages"] == read["stages"]
    assert built["model"]["matrices"] == 2  # the last linear layer is a head
    assert built["params"] == read["params"]


def test_the_config_of_transformers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    need("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12}))
    facts = json.loads(plan(capsys, "--hf-config", str(path), "--mesh", "dp_shard=8", "--json", "-"))
    same = json.loads(plan(capsys, "--model", "gpt2", "--mesh", "dp_shard=8", "--json", "-"))
    assert facts["stages"] == same["stages"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"n_embd": "768"},
            "cannot build a gpt2 model from it: StrictDataclassFieldValidationError: Validation error for field",
        ),
        ({"n_embd": [1]}, "Correct the value, or the key."),
        ({"n_embd": -8}, "cannot build a gpt2 model from it: "),
        ({"n_embd": 2**25, "n_head": 1, "vocab_size": 2**20}, "no parameter has more than"),
        ({"n_layer": 10**30}, "n_layer is 1000000000000000000000000000000. A model has at most 10,000"),
        ({"text": {"num_hidden_layers": 10**9}}, "num_hidden_layers is 1000000000. A model has at most 10,000"),
        ({"activation_function": "wish"}, "cannot build a gpt2 model from it: KeyError: "),
        ({"architectures": [[]], "n_layer": 0}, "has no matrix for Muon"),
        ({"model_type": []}, "model_type is '[]', which the installed transformers does not know"),
    ],
)
def test_a_config_of_transformers_with_a_wrong_value(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """One sentence, and nothing of what transformers logs."""
    need("transformers")
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32} | changes)
    )
    with pytest.raises(SystemExit) as ending:
        main(["plan", "--hf-config", str(path), "--mesh", "dp_shard=2"])
    assert ending.value.code == 2
    usage, sentence = capfd.readouterr().err.strip().splitlines()
    assert usage.startswith("usage: ")
    assert sentence.startswith("meshmuon: error: ")
    assert message in sentence


@pytest.mark.parametrize("text", ["512k", "512K", "512KiB", "512kb", "0.5M", "524288", "524288 B"])
def test_sizes_in_either_case(capsys: pytest.CaptureFixture[str], text: str) -> None:
    arguments = ("--model", "gpt2", "--mesh", "dp_shard=2", "--json", "-")
    facts = json.loads(plan(capsys, *arguments, "--memory-budget", text, "--tokens-per-step", text))
    assert facts["options"]["memory_budget"] == facts["step"]["tokens_per_step"] == 2**19


@pytest.mark.parametrize(("hardware", "says"), [("gb300", "about 33.00 s"), ("h100", "not predicted"), ("cpu", "")])
def test_a_first_step_on_a_gpu_compiles(capsys: pytest.CaptureFixture[str], hardware: str, says: str) -> None:
    text = plan(capsys, "--module", "tests.tools.cli.test_plan:build", "--mesh", "dp_shard=2", "--hardware", hardware)
    lines = [line for line in text.splitlines() if "first step" in line]
    assert len(lines) == bool(says)
    assert not lines or says in lines[0]


def test_one_of_anything_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, "--module", "tests.tools.cli.test_plan:build", "--mesh", "dp_shard=1", "--hardware", "cpu")
    assert "1 rank on 1 node\n" in text
    assert "\n1 rank\n======\n" in text
    assert not re.search(r"\b1 (?:ranks|nodes|waves|matrices)\b", text)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "--help"], ["doctor", "--help"], ["--version"], ["plan", "--mfu", "x"]]
)
def test_help_and_mistakes_need_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from meshmuon.tools.cli.main import main\n"
        "try:\n"
        f"    main({arguments})\n"
        "finally:\n"
        "    print('with torch' if 'torch' in sys.modules else 'without torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (2 if "--mfu" in arguments else 0)
    assert done.stdout.endswith("without torch\n"), done.stderr


MODULE = "tests.tools.cli.test_plan"
REFUSALS: list[tuple[str, str]] = [
    ("--mesh dp_shard=2", "one of --model, --hf-config and --module says which model to plan; none is"),
    ("--model gpt2 --module a:b --mesh dp_shard=2", "several are given"),
    ("--model gpt2", '--mesh "dp_shard=64" or --layout FILE says how'),
    ("--model gpt3 --mesh dp_shard=2", "--model gpt3 is unknown. Did you mean gpt2?"),
    ("--hf-config /nowhere/config.json --mesh dp_shard=2", "/nowhere/config.json cannot be read"),
    ("--calibration /nowhere --model gpt2 --mesh dp_shard=2", "--calibration /nowhere: it cannot be read"),
    ("--model gpt2 --mesh dp_shard=1000000000", "multiply to 1000000000 ranks. A plan has at most 1048576"),
    (f"--model gpt2 --mesh dp_shard={'9' * 5000}", "must be a whole number of at least 1 and at most 1048576"),
    *(
        (f"--model gpt2 --mesh dp_shard=2 {arguments}", message)
        for arguments, message in {
            "--hardware h300": "--hardware h300 is unknown",
            "--nodes 0": "argument --nodes: '0' is no number of at least 1",
            "--nodes 1": "--nodes gives 8: write dp_shard=8",
            "--scheme kellar": "argument --scheme: invalid choice: 'kellar'",
            "--memory-budget x": "'x' is no number of at least 1, such as 512, 512K or 64M",
            f"--memory-budget {'9' * 400}G": "is no number of at least 1",
            "--mfu 2": "'2' is not above 0 and at most 1",
            "--json /nowhere/x": "/nowhere/x cannot be written",
            "--warmup-step -1": "warmup_step=-1 must be at least 0",
            "--tokens-per-step 0.5": "'0.5' is no number of at least 1, such as",
        }.items()
    ),
    *(
        (f"--module {module} --mesh dp_shard=2", message)
        for module, message in {
            "torch.nn:Module": "the model has no trainable parameters",
            f"{MODULE}:build_table": "build_table has no matrix for Muon",
            "tests": "must name a module and a function in it",
            "tests.tools.cli.nothing:x": "tests.tools.cli.nothing cannot be imported",
            f"{MODULE}:x": "has no function x",
            f"{MODULE}:plan": "plan() failed on the meta device",
            "builtins:dict": "dict() returned dict, not a torch.nn.Module",
            "sys:exit": "exit() failed on the meta device: SystemExit. It must",
            "..:x": "--module ..:x: .. cannot be imported",
            f"{MODULE}:Odd": "the parameters of the model cannot be read",
        }.items()
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS)
def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert message in refusal(capsys, *arguments.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def (", "SyntaxError"),
        ("raise SystemExit", "SystemExit. Mend it"),
        ("raise GeneratorExit('gone')", "GeneratorExit: gone"),
        ("import sys; sys.path.remove(''); raise ValueError('x')", "ValueError: x"),
    ],
)
def test_a_module_that_cannot_be_imported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "broken_model.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = refusal(capsys, "--module", "broken_model:build", "--mesh", "dp_shard=2")
    assert f"broken_model cannot be imported: {message}" in found


def machine(**changes: Any) -> dict[str, Any]:
    return {**json.loads((MACHINE_FILES / "h100.json").read_text(encoding="utf-8")), **changes}


def model_of(**row: Any) -> dict[str, Any]:
    whole = {"name": "w.*", "shape": [8, 4], "muon": True, "layers": [0]}
    return {"format": "meshmuon model", "version": 1, "name": "m", "params": [whole | row]}


def layout(mesh: dict[str, Any], placement: str = "S(0)") -> dict[str, Any]:
    return {"meshes": {"main": mesh}, "params": {"*": {"mesh": "main", "placements": [placement]}}}


FILES: list[tuple[str, dict[str, Any], str]] = [
    ("--hardware", machine(device="abacus"), "its device"),
    ("--hardware", machine(ranks_per_node=0), "its ranks_per_node"),
    ("--hardware", machine(format="x"), "its format"),
    ("--hardware", machine(memory_bytes="x"), "its memory_bytes"),
    ("--hardware", machine(connection_bytes=10**30), "its connection_bytes"),
    ("--hardware", machine(peak_flops={}), "its efficiency and peak_flops"),
    ("--hardware", machine(inside={"bytes_per_second": 0, "seconds": 1e-5}), "its inside"),
    *(("--model", model_of(shape=[10**30, cols]), "w.0: no parameter has more than") for cols in (4, 0)),
    ("--model", model_of(layers={"first": 0, "last": 10**30}), "w.*: layers are numbered from 0"),
    ("--model", model_of(layers=[10**30]), "w.*: layers are numbered from 0"),
    *(
        ("--layout", layout({"shape": shape}), f"a mesh cannot have the shape {shape}")
        for shape in ([0], [], [-1], [10**30])
    ),
    ("--layout", layout({"shape": [2], "ranks": [0, 10**30]}), "the ranks of the mesh [2] are not all from 0"),
    ("--layout", layout({"shape": [2]}, f"S({10**30})"), "shards a dim that"),
    *(("--layout", layout({"shape": [2]}, f"S(0, stride {n})"), "has no possible stride") for n in (0, 10**30)),
]


@pytest.mark.parametrize(("option", "content", "message"), FILES)
def test_a_file_of_impossible_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, content: dict[str, Any], message: str
) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    model = () if option == "--model" else ("--model", "gpt2")
    mesh = () if option == "--layout" else ("--mesh", "dp_shard=2")
    assert message in refusal(capsys, *model, *mesh, option, str(path))


def test_stages_without_matrices_have_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(plan(capsys, "--model", "gpt2", "--mesh", "pp=12,dp_shard=2", "--json", "-"))
    assert len(facts["ranks"]["parameters"]) == 24
    assert facts["ranks"]["parameters"][0] > 50_000 * 768 * 4 / 2  # half of the embeddings
    assert facts["options"]["comm_dtype"] == "bfloat16"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_same_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reports: list[Any] = []
    monkeypatch.setattr("meshmuon.tools.cli.plan.print_report", reports.append)
    plan(capsys, "--model", "gpt2", "--mesh", "dp_shard=8")
    (report,) = reports
    rich, plain = Terminal(), io.StringIO()
    print_report(report, rich)
    print_report(report, plain)
    memory = next(section for section in sections_of(report) if section.title == "memory per rank")
    for row in memory.rows:
        assert row[1] in rich.getvalue()
        assert row[1] in plain.getvalue()
