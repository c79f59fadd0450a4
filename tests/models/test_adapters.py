"""LoRA and other adapters of PEFT: factors are matrices, everything else is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshmuon import Muon, get_default_muon_param_groups
from tests.support.architectures import library

from .part_cases import LLAMA

peft, transformers = library("peft"), library("transformers")


def adapted(config: Any, model_type: str = "phi3", **options: Any) -> nn.Module:
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[model_type](**LLAMA, **options))
    wrapped: nn.Module = peft.get_peft_model(model, config)
    return wrapped


def rows(model: nn.Module) -> dict[str, tuple[str, int, str]]:
    """The ends of the names of what trains, and where they go."""
    table = Muon(get_default_muon_param_groups(model, frozen=False)).routing_table()
    return {
        row.name.split("layers.0.")[-1].replace(".default", ""): (row.route, row.matrices, row.why)
        for row in table.rows
    }


def test_lora() -> None:
    """B of a fused layer has its parts: 2 heads of queries, 1 of keys and values."""
    found = rows(adapted(peft.LoraConfig(r=6, target_modules=["qkv_proj", "o_proj", "gate_up_proj"])))
    assert found == {
        "self_attn.o_proj.lora_A.weight": ("muon", 1, "LoRA A, rank 6"),
        "self_attn.o_proj.lora_B.weight": ("muon", 1, "LoRA B, rank 6"),
        "self_attn.qkv_proj.lora_A.weight": ("muon", 1, "LoRA A, rank 6"),
        "self_attn.qkv_proj.lora_B.weight": ("muon", 3, "LoRA B, rank 6, of a fused q, k, v"),
        "mlp.gate_up_proj.lora_A.weight": ("muon", 1, "LoRA A, rank 6"),
        "mlp.gate_up_proj.lora_B.weight": ("muon", 2, "LoRA B, rank 6, of a fused gate, up"),
    }


def test_the_frozen_base_is_routed_as_alone() -> None:
    model = adapted(peft.LoraConfig(r=6, target_modules=["qkv_proj", "o_proj", "gate_up_proj"]))
    frozen = {row.name: row for row in Muon(model).routing_table().rows if row.frozen}
    alone = Muon(model.get_base_model().__class__(model.get_base_model().config)).routing_table().rows
    assert len(frozen) == len(alone)
    for row in alone:
        name = "base_model.model." + row.name
        found = frozen.get(name) or frozen[name.replace("_proj.weight", "_proj.base_layer.weight")]
        assert (found.route, found.matrices, found.why) == (row.route, row.matrices, row.why), name


@pytest.mark.parametrize("rank", [2, 4])
def test_small_ranks_are_matrices(rank: int) -> None:
    """The rule about few rows is for gates and boxes, not for a basis of r rows."""
    assert {route for route, _, _ in rows(adapted(peft.LoraConfig(r=rank, target_modules=["o_proj"]))).values()} == {
        "muon"
    }


def test_rank_1_is_a_vector() -> None:
    groups = get_default_muon_param_groups(adapted(peft.LoraConfig(r=1, target_modules=["o_proj"])), frozen=False)
    assert [group["use_muon"] for group in groups] == [False]


def test_embeddings_heads_and_magnitudes() -> None:
    config = peft.LoraConfig(r=6, use_dora=True, target_modules=["o_proj", "embed_tokens"], modules_to_save=["lm_head"])
    found = rows(adapted(config))
    in_muon = {name for name, (route, _, _) in found.items() if route == "muon"}
    assert in_muon == {"self_attn.o_proj.lora_A.weight", "self_attn.o_proj.lora_B.weight"}
    assert any("modules_to_save" in name and "head" in why for name, (_, _, why) in found.items())


def test_lora_of_expert_stacks() -> None:
    """(r·E, in) and (out, r·E): the experts are interleaved in the inputs of B."""
    config = peft.LoraConfig(r=6, target_modules=["o_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    model = adapted(config, "mixtral", num_local_experts=3, num_experts_per_tok=2)
    found = {why for name, (route, _, why) in rows(model).items() if "experts" in name}
    assert found == {"LoRA factor of an expert stack"}


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules=["o_proj"], feedforward_modules=[]),
        peft.LoHaConfig(r=6, target_modules=["o_proj"]),
        peft.LoKrConfig(r=6, target_modules=["o_proj"]),
        peft.OFTConfig(oft_block_size=8, r=0, target_modules=["o_proj"]),
        peft.VeraConfig(r=6, target_modules=["o_proj"]),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_adapters_go_to_adamw(config: Any) -> None:
    groups = get_default_muon_param_groups(adapted(config), frozen=False)
    assert [group["use_muon"] for group in groups] == [False]
    Muon(groups)


def test_a_step_changes_the_factors_only() -> None:
    torch.manual_seed(0)
    model = adapted(peft.LoraConfig(r=6, target_modules=["qkv_proj"]))
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = Muon(get_default_muon_param_groups(model), lr=1e-2)
    model(torch.arange(6)[None] + 1).logits.square().sum().backward()
    optimizer.step()
    changed = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert len(changed) == 2  # B is zero at first, so A has no gradient, but it decays
    assert all("lora_" in name for name in changed)
