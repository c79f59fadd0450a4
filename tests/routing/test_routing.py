"""Which parameters go to Muon: by module type and identity first, then by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon import ConfigError, Muon, get_default_muon_param_groups
from meshmuon.models import is_table_name


def routes(model: nn.Module, **options: Any) -> dict[str, bool]:
    """Name to use_muon, as the groups have it; also checks that groups are well formed."""
    found: dict[str, bool] = {}
    by_name = dict(model.named_parameters())
    for written in get_default_muon_param_groups(model, **options):
        assert len(written["names"]) == len(written["params"]) > 0
        for name, param in zip(written["names"], written["params"], strict=True):
            assert name not in found
            assert by_name[name] is param
            found[name] = written["use_muon"]
    return found


def muon_names(model: nn.Module, **options: Any) -> set[str]:
    return {name for name, use_muon in routes(model, **options).items() if use_muon}


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attn = nn.Linear(width, width)
        self.mlp = nn.Linear(width, 2 * width, bias=False)
        self.norm = nn.LayerNorm(width)


class Model(nn.Module):
    """Names say nothing here, and the head is neither the last layer nor as tall as a table: only module types do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(10, 8)
        self.bags = nn.EmbeddingBag(10, 8)
        self.last = nn.Linear(8, 12, bias=False)
        self.layers = nn.ModuleList([Block(), Block()])


HIDDEN = {f"layers.{k}.{name}.weight" for k in range(2) for name in ("attn", "mlp")}


def test_matrices_go_to_muon_and_the_rest_to_adamw() -> None:
    model = Model()
    found = routes(model)
    assert {name for name, use_muon in found.items() if use_muon} == HIDDEN | {"last.weight"}
    assert set(found) == {name for name, _ in model.named_parameters()}


def test_order_and_form_of_groups() -> None:
    groups = get_default_muon_param_groups(Model())
    assert [written["use_muon"] for written in groups] == [True, False, False]
    assert [set(written) - {"weight_decay"} for written in groups] == [{"params", "names", "use_muon", "reasons"}] * 3
    assert groups[0]["names"][0] == "last.weight"
    Muon(groups)


def test_norms_and_biases_have_no_weight_decay() -> None:
    """Also those of stacks, which have two dims. Tables and heads have that of the optimizer."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up_proj, self.up_proj_bias = nn.Parameter(torch.ones(4, 8, 8)), nn.Parameter(torch.ones(4, 8))
            self.scale, self.layer_scale = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(8))

    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(16, 8),
            "linear": nn.Linear(8, 8),
            "norm": nn.LayerNorm(8),
            "experts": Experts(),
            "lm_head": nn.Linear(8, 16),
        }
    )
    optimizer = Muon(get_default_muon_param_groups(model), weight_decay=0.25)
    decay = {name: written["weight_decay"] for written in optimizer.param_groups for name in written["param_names"]}
    assert {name for name in decay if decay[name]} == {
        "embed.weight",
        "linear.weight",
        "experts.up_proj",
        "lm_head.weight",
    }
    assert set(decay.values()) == {0.25, 0.0}
    groups = get_default_muon_param_groups(model, is_muon_func=lambda name, param: name == "linear.weight")
    names = [set(written["names"]) for written in groups]
    assert names[1:] == [
        {"embed.weight", "experts.up_proj", "lm_head.weight"},
        {name for name in decay if not decay[name]},
    ]


@pytest.mark.parametrize(
    "tie", [lambda table: table, lambda table: nn.Parameter(table.data), lambda table: nn.Parameter(table.data[8:])]
)
def test_a_tied_head_goes_with_its_embedding(tie: Any) -> None:
    """Tied by object, by storage, or to a part of the table."""
    model = Model()
    model.last.weight = tie(model.first.weight)
    assert muon_names(model) == HIDDEN
    assert ("last.weight" in routes(model)) == (model.last.weight is not model.first.weight)


def test_views_of_one_flat_buffer_are_not_tied() -> None:
    """Flattened models keep all parameters in one storage, side by side: that ties none to another."""
    model = Model()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    offset = 0
    for param in model.parameters():
        param.data = flat[offset : offset + param.numel()].view(param.shape)
        offset += param.numel()
    assert muon_names(model) == HIDDEN | {"last.weight"}


class HubModel(Model):
    """Says itself which module is its head, as Hugging Face's models do."""

    def get_output_embeddings(self) -> nn.Module | None:
        return self.last


def test_get_output_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Base classes define it without implementing it, or return nothing."""
    assert muon_names(HubModel()) == HIDDEN
    for body in (lambda self: None, lambda self: 1 / 0):
        monkeypatch.setattr(HubModel, "get_output_embeddings", body)
        assert muon_names(HubModel()) == HIDDEN | {"last.weight"}


def test_wrappers_are_looked_through() -> None:
    inner = HubModel()
    inner.layers[0] = nn.ModuleDict({"_checkpoint_wrapped_module": inner.layers[0]})
    names = {f"module.{name.replace('layers.0', 'layers.0._checkpoint_wrapped_module')}" for name in HIDDEN}
    assert muon_names(nn.ModuleDict({"module": inner})) == names
    compiled = torch.compile(HubModel(), backend="eager")
    assert isinstance(compiled, nn.Module)
    assert muon_names(compiled) == {f"_orig_mod.{name}" for name in HIDDEN}


class Leaf(nn.Module):
    """A matrix under any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        *modules, last = name.split(".")
        module: nn.Module = self
        for part in modules:
            module.add_module(part, nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, nn.Parameter(torch.zeros(8, 6)))


@pytest.mark.parametrize(
    ("name", "in_muon"),
    [
        ("embed_tokens.weight", False),
        ("model.embed_tokens.weight", False),
        ("tok_embeddings.weight", False),
        ("transformer.wte.weight", False),
        ("transformer.wpe.weight", False),
        ("pos_embed", False),
        ("encoder.pos_embed", False),
        ("lm_head.weight", False),
        ("lm_heads.1.weight", False),
        ("model.lm_head.weight", False),
        ("output.weight", False),
        ("model.output.weight", False),
        ("head.weight", False),
        ("classifier.weight", False),
        ("score.weight", False),
        ("module.output.weight", False),
        ("_orig_mod.module.lm_head.weight", False),
        ("module._orig_mod.model._checkpoint_wrapped_module.embed_tokens._fsdp_wrapped_module.weight", False),
        ("layers.3.attention.output.weight", True),
        ("layer_0.output.weight", True),
        ("layers.0.output.dense.weight", True),
        ("output.dense.weight", True),
        ("layers.0.head.weight", True),
        ("layers.1.attn.wq.weight", True),
        ("embedder.proj.weight", True),
        ("my_output.weight", True),
        ("weight", True),
        ("head", False),
    ],
)
def test_names(name: str, in_muon: bool) -> None:
    assert routes(Leaf(name)) == {name: in_muon}
    assert is_table_name(name) != in_muon


def test_frozen_parameters_are_routed_as_if_they_trained() -> None:
    model = Model()
    model.layers[0].requires_grad_(False)
    assert routes(model) == routes(Model())


def test_a_model_without_matrices_gives_one_group() -> None:
    groups = get_default_muon_param_groups(nn.LayerNorm(4))
    assert [written["use_muon"] for written in groups] == [False]
    groups = get_default_muon_param_groups(nn.Linear(8, 8, bias=False))
    assert [written["use_muon"] for written in groups] == [True]


@pytest.mark.parametrize("model", [nn.Identity(), nn.Linear(3, 3).requires_grad_(False)], ids=["none", "frozen"])
def test_nothing_to_train_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="no trainable parameters"):
        get_default_muon_param_groups(model)


def test_is_muon_func_decides_alone() -> None:
    """It sees every parameter of two and more dims, also frozen ones, and nothing else."""
    model = HubModel()
    model.layers[1].requires_grad_(False)
    seen: dict[str, Tensor] = {}

    def decide(name: str, param: Tensor) -> bool:
        seen[name] = param
        return "first" in name or "mlp" in name

    assert muon_names(model, is_muon_func=decide) == {"first.weight", "layers.0.mlp.weight", "layers.1.mlp.weight"}
    expected = {name: p for name, p in model.named_parameters() if p.dim() >= 2}
    assert seen.keys() == expected.keys()
    assert all(seen[name] is expected[name] for name in expected)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.w1 = nn.Parameter(torch.zeros(5, 8, 6))
        self.router = nn.Linear(6, 5, bias=False)
        self.out = nn.Linear(6, 6, bias=False)


@pytest.mark.parametrize(("keys", "why"), [(("experts",), "expert_keys"), (None, "expert stack (E, out, in)")])
def test_experts_with_and_without_keys(keys: tuple[str, ...] | None, why: str) -> None:
    groups = get_default_muon_param_groups(Experts(), expert_keys=keys)
    assert groups[0].get("expert_keys") == keys
    rows = Muon(groups).routing_table().rows
    assert [(row.matrices, row.why) for row in rows] == [(5, why), (1, "matrix"), (1, "matrix")]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Conv2d(6, 8, 3)
        self.dense1d = nn.Conv1d(8, 32, 3)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32)
        self.proj = nn.Linear(32, 32)


def test_conv_decides_about_filters() -> None:
    """Not about depthwise ones. One that is named as an expert is a stack. "adamw" leaves nothing in the groups."""
    assert muon_names(Convolutions()) == {"proj.weight", "dense1d.weight"}
    assert muon_names(Convolutions(), conv="flatten") == {"proj.weight", "small.weight", "dense1d.weight"}
    assert muon_names(Convolutions(), conv="adamw") == {"proj.weight"}
    assert "dense1d.weight" in muon_names(Convolutions(), expert_keys=["dense1d"], conv="adamw")
    groups = {conv: get_default_muon_param_groups(Convolutions(), conv=conv)[0] for conv in (None, "flatten", "adamw")}
    assert [group.get("conv") for group in groups.values()] == [None, "flatten", None]
