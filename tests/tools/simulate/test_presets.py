"""The models and machines that come with meshmuon: counts as published, names and shapes as transformers builds
them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshmuon import ConfigError
from meshmuon.tools.simulate.description import ModelDescription, load_model
from meshmuon.tools.simulate.inputs import load_machine, preset_names
from meshmuon.tools.simulate.modules import describe_hf
from tests.support.optional import need

transformers = need("transformers")

_SCALES = {"M": 10**6, "B": 10**9, "T": 10**12}
_QWEN3_MOE = {
    "vocab_size": 151936,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_LLAMA3 = {"vocab_size": 128256, "num_key_value_heads": 8}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "llama3-8b": ("llama", {**_LLAMA3, "intermediate_size": 14336}),
    "llama3-70b": (
        "llama",
        {
            **_LLAMA3,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            **_QWEN3_MOE,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "moe_intermediate_size": 768,
        },
    ),
    "mixtral-8x7b": ("mixtral", {}),
    "deepseek-v3": ("deepseek_v3", {}),
    "kimi-k2": (
        "deepseek_v3",
        {
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "n_routed_experts": 384,
            "first_k_dense_replace": 1,
            "vocab_size": 163840,
        },
    ),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": ("gpt_oss", {}),
}


@pytest.mark.parametrize("name", preset_names("model"))
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.source.startswith("https://")
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?([MBT])", model.published)
    assert match is not None
    unit = _SCALES[match[3]] / 10 ** len(match[2] or "")
    assert abs(model.size - float(f"{match[1]}.{match[2] or 0}") * _SCALES[match[3]]) <= 0.5 * unit
    assert bool(model.active) == bool(model.experts)
    assert 0 < model.active_size <= model.size


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_what_transformers_builds(name: str) -> None:
    """Names, shapes, routes, matrices, tensor parallelism and, among Muon's parameters, the order."""
    kind, values = CONFIGS[name]
    built, stored = describe_hf(transformers.CONFIG_MAPPING[kind](**values), name), load_model(name)
    assert [param for param in stored.params if param.use_muon] == [param for param in built.params if param.use_muon]
    assert sorted(stored.params, key=lambda param: param.name) == sorted(built.params, key=lambda param: param.name)
    assert (stored.has_tp_plan, stored.experts_per_token) == (built.has_tp_plan, built.experts_per_token)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "moe-397b", "vit-g"])
def test_a_model_survives_its_file(name: str, tmp_path: Path) -> None:
    model = load_model(name)
    path = tmp_path / "model.json"
    path.write_text(json.dumps(model.to_json()))
    assert load_model(str(path)) == model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "no description of a model"),
        ({"params": []}, "a row for each parameter"),
        (
            {"params": [{"name": "a.*", "shape": [2], "muon": False}]},
            r"needs one \* in its name and the list of its layers",
        ),
        ({"params": [{"name": "a", "shape": ["2"], "muon": False}]}, "a shape of whole numbers"),
        ({"params": [{"name": "a", "shape": [2], "muon": False, "tp": "col"}]}, "tp='col' is unknown"),
        ({"params": [{"name": "a", "shape": [2]}]}, "KeyError: 'muon'"),
    ],
)
def test_wrong_files_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**load_model("gpt2").to_json(), **change}))
    with pytest.raises(ConfigError, match=message):
        load_model(str(path))


def test_rows_between_layers_are_refused() -> None:
    content = load_model("gpt2").to_json()
    content["params"].insert(5, {"name": "between", "shape": [2], "muon": False})
    with pytest.raises(ConfigError, match="between is between rows of layers"):
        ModelDescription.from_json(content)


@pytest.mark.parametrize("name", preset_names("machine"))
def test_a_machine_is_plausible(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    rates = [
        machine.rates_for(dtype).orthogonalisation_rate(size)
        for dtype in machine.peak_flops
        for size in (1, 64, 700, 4096, 10**6)
    ]
    assert all(0 < rate <= max(machine.peak_flops.values()) for rate in rates)
    small, large = (machine.rates_for("float32").orthogonalisation_rate(size) for size in (100, 5000))
    assert small <= large
    assert machine.inside.bytes_per_second >= machine.between.bytes_per_second
    with pytest.raises(ConfigError, match="no rate for products in int8"):
        machine.rates_for("int8")


@pytest.mark.parametrize(("name", "dtype"), [("cpu", "float32"), ("h100", "bfloat16")])
def test_the_peak_is_that_of_the_dtype_in_which_models_are_trained(name: str, dtype: str) -> None:
    machine = load_machine(name)
    assert machine.peak() == machine.peak_flops[dtype]
