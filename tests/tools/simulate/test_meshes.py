"""Meshes and shardings: what is accepted, and the sentence for what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshmuon import ConfigError
from meshmuon.layout import Replicated, Sharded
from meshmuon.tools.simulate.description import ModelDescription, ModelParam, load_model
from meshmuon.tools.simulate.sharding import FileSharding, MeshAxes, PlacedParam


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dpshard=8", r"the axis 'dpshard' is unknown\. Did you mean dp_shard\?"),
        ("dp_shard=8,dp_shard=2", "the axis dp_shard is there twice"),
        ("dp_shard=0", "dp_shard=0 must be a whole number of at least 1"),
        ("tp=x", "tp=x must be a whole number"),
        ("", "names no axis"),
        ("dp_shard=12,ep=8", r"ep=8 takes its ranks from dp_shard × cp × tp = 12, .* Write ep=4, 6 or 12"),
        ("dp_shard=-1", "the number of ranks is not known: add --nodes"),
    ],
)
def test_wrong_meshes_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MeshAxes.parse(text)


def test_axes_must_multiply_to_the_ranks() -> None:
    with pytest.raises(
        ConfigError, match="multiply to 64 ranks, but --nodes gives 32: write dp_shard=4, or change --nodes"
    ):
        MeshAxes.parse("dp_shard=8,tp=8", 32)
    with pytest.raises(ConfigError, match="choose axes that multiply to it"):
        MeshAxes.parse("dp_shard=8,tp=8", 12)
    assert MeshAxes.parse("dp_shard=-1,tp=8", 64).dp_shard == 8
    with pytest.raises(ConfigError, match="60 ranks do not divide by 8"):
        MeshAxes.parse("dp_shard=-1,tp=8", 60)


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("llama3-8b", "dp_shard=8,ep=8", "llama3-8b has no experts. Leave out ep"),
        (
            "mixtral-8x7b",
            "dp_shard=64,ep=16",
            "the 8 experts of mixtral-8x7b do not divide by ep=16. Write ep=2, 4 or 8",
        ),
        ("gpt2", "dp_shard=4,tp=2", "there is no tensor-parallel plan for gpt2"),
        (
            "llama3-8b",
            "tp=3",
            r"q_proj\.weight \(4096, 4096\) is cut colwise along dim 0, whose size does not divide by tp=3",
        ),
        ("gpt2", "pp=16", "gpt2 has 12 layers. Write pp=12 or less"),
        ("mixtral-8x7b", "dp_shard=56,ep=4", r"refuses 4096 rows over 14 shards, which do not divide"),
        ("mixtral-8x7b", "dp_shard=16,tp=2", "tensor parallelism cuts both halves of the fused"),
    ],
)
def test_models_that_do_not_fit_are_refused(name: str, mesh: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(MeshAxes.parse(mesh).stages(load_model(name)))


@pytest.mark.parametrize(
    ("mesh", "name", "shape", "placements"),
    [
        ("dp_shard=8,cp=2", "self_attn.q_proj.weight", (16,), "S(0)"),
        ("dp_replicate=2,dp_shard=4,tp=2", "self_attn.q_proj.weight", (2, 4, 2), "R, S(0, stride 2), S(0)"),
        ("dp_shard=4,tp=2", "self_attn.o_proj.weight", (4, 2), "S(0), S(1)"),
        ("dp_shard=4,tp=2", "input_layernorm.weight", (4, 2), "S(0), R"),
        ("dp_shard=4,tp=2", "mlp.experts.gate_up_proj", (4, 2), "S(0), S(1, stride 2)"),
        ("dp_shard=4,tp=2", "mlp.experts.down_proj", (4, 2), "S(0), S(2)"),
        ("dp_shard=4,tp=2,ep=4", "mlp.experts.down_proj", (2, 4), "S(0, stride 4), S(0)"),
        ("dp_shard=32,ep=4", "mlp.experts.down_proj", (8, 4), "S(1), S(0)"),
        ("dp_shard=16", "mlp.experts.down_proj", (16,), "S(1)"),
    ],
)
def test_placements(mesh: str, name: str, shape: tuple[int, ...], placements: str) -> None:
    (stage,) = MeshAxes.parse(mesh).stages(load_model("mixtral-8x7b"))
    item = next(item for item in stage if item.param.name == f"model.layers.0.{name}")
    assert item.mesh.shape == shape
    assert ", ".join(map(str, item.placements)) == placements
    assert sorted(item.mesh.ranks) == list(range(MeshAxes.parse(mesh).ranks))


MODEL = ModelDescription("m", "m", "", (ModelParam("a.weight", (8, 6), True), ModelParam("b", (5,), False)))
GRID = {"a.*": {"mesh": "grid", "placements": ["R", "S(1, stride 2)"]}}


def placed(path: Path, params: object) -> tuple[FileSharding, list[PlacedParam]]:
    """The parameters of ``MODEL``, as a file with these patterns places them."""
    meshes = {"grid": {"shape": [2, 2]}, "line": {"shape": [3], "ranks": [0, 2, 5]}}
    path.write_text(json.dumps({"meshes": meshes, "params": params}))
    sharding = FileSharding.load(path)
    (stage,) = sharding.stages(MODEL)
    return sharding, stage


def test_layouts_from_a_file(tmp_path: Path) -> None:
    sharding, (first, second) = placed(
        tmp_path / "layout.json", {**GRID, "*": {"mesh": "line", "placements": ["S(0)"]}}
    )
    assert (first.placements, first.mesh.ranks) == ((Replicated(), Sharded(1, 2)), (0, 1, 2, 3))
    assert (second.placements, second.mesh.ranks) == ((Sharded(0),), (0, 2, 5))
    assert sharding.ranks == 5


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"a.*": {"mesh": "grdi", "placements": ["R"]}}, r"the mesh 'grdi' is unknown\. Did you mean grid\?"),
        ({"a.*": {"mesh": "grid", "placements": ["R"]}}, "1 placements for the mesh grid of 2 axes"),
        ({"a.*": {"mesh": "grid", "placements": ["R", "P"]}}, "the placement 'P' is unknown"),
        ({"a.*": {"placements": ["R", "R"]}}, "KeyError"),
        (GRID, "no pattern matches b"),
        ({"*": {"mesh": "line", "placements": ["S(1)"]}}, r"shards a dim that b \(5,\) does not have"),
    ],
)
def test_wrong_layout_files_are_refused(params: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(tmp_path / "layout.json", params)
