"""The matrices that are found are the real ones: checked by what a library's own forward does with them.

Three properties need no knowledge of how a weight is stored. A part whose outputs are multiplied with what follows
(values, gates, ups) silences the module if it is zero. Queries times three and keys divided by three leave attention as
it is. What a norm follows may be scaled at will. None of them holds if the rows are those of another part.
"""

from __future__ import annotations

import importlib
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshmuon import Muon, get_default_muon_param_groups
from meshmuon.matrices import MatrixSet, StridedRange, find_matrices
from meshmuon.params.groups import matrix_options_of
from tests.support.architectures import library

from .part_cases import CASES, Case

transformers = library("transformers")


def build(case: Case) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.CONFIG_MAPPING[case.model_type](
            **case.config, attn_implementation="eager", use_cache=False
        )
        config._experts_implementation = "eager"  # the grouped products take no float64
        model: nn.Module = transformers.AutoModel.from_config(config)
    return randomised(model, case.zeroed)


def randomised(model: nn.Module, zeroed: tuple[str, ...] = ()) -> nn.Module:
    """In float64, with weights that are far from zero and biases that are zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "bias" in name or any(name.endswith(end) for end in zeroed):
                param.zero_()
            elif param.dim() >= 2:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
    return model.double().eval()


def run(model: nn.Module) -> Tensor:
    output = model(torch.arange(7)[None] * 5 + 1)
    result: Tensor = output[0]
    return result


def find(model: nn.Module, end: str) -> tuple[str, nn.Parameter]:
    found = [(name, param) for name, param in model.named_parameters() if re.search(f"({end})$", name)]
    assert len(found) == 1, f"{end}: {[name for name, _ in found]}"
    return found[0]


def sets_of(model: nn.Module, name: str) -> tuple[MatrixSet, ...]:
    """The matrices of a parameter, as the optimizer sees them."""
    optimizer = Muon(get_default_muon_param_groups(model))
    group: Any = next(group for group in optimizer.param_groups if name in group["param_names"])
    assert group["use_muon"], f"{name} is not in Muon"
    return find_matrices(name, dict(model.named_parameters())[name].shape, matrix_options_of(group))


def indices(window: StridedRange) -> Tensor:
    return torch.tensor(
        [window.start + block * window.period + k for block in range(window.count) for k in range(window.size)]
    )


def places(part: MatrixSet) -> tuple[Any, ...]:
    """An index that selects the part."""
    if part.window is None:
        return (...,)
    rows, cols = map(indices, part.window)
    return (..., rows[:, None], cols[None, :])


@torch.no_grad()
def scale(param: Tensor, part: MatrixSet, factor: float) -> None:
    index = places(part)
    param[index] = param[index] * factor


def same(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-5, atol=1e-5)  # some modules compute in float32 inside


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_parts(case: Case) -> None:
    model = build(case)
    name, weight = find(model, case.weight)
    parts, kept = sets_of(model, name), weight.detach().clone()
    assert tuple(part.lr_shape for part in parts) == case.shapes
    assert all(part.flipped == case.flipped for part in parts)
    times = torch.zeros_like(weight)
    for part in parts:
        times[places(part)] += 1
    assert times.eq(1).all(), "each element is in one part"
    with torch.no_grad():
        plain = run(model)
        _, partner = find(model, case.partner)
        silent_partner, partner_kept = partner.detach().clone().zero_(), partner.detach().clone()
        partner.copy_(silent_partner)
        silent = run(model)
        partner.copy_(partner_kept)
        for part in case.silencing:
            scale(weight, parts[part], 0.0)
            assert same(run(model), silent), f"part {part} is not what it should be"
            weight.copy_(kept)
        for first, second in case.reciprocal:
            scale(weight, parts[first], 3.0)
            assert not same(run(model), plain)
            scale(weight, parts[second], 1 / 3.0)
            assert same(run(model), plain), f"parts {first} and {second} do not belong together"
            weight.copy_(kept)
        for part in case.scalable:
            scale(weight, parts[part], 3.0)
            assert same(run(model), plain)
            weight.copy_(kept)
    assert not same(plain, silent)


def test_qwen3_next_b_and_a() -> None:
    """The module's own function tells which rows are which: its weight is what it makes of unit vectors."""
    model = build(CASES["qwen3_next qkvz"])
    name, weight = find(model, "in_proj_ba.weight")
    mixer = model.get_submodule(name.removesuffix(".in_proj_ba.weight"))
    _, qkvz = find(model, "in_proj_qkvz.weight")
    *_, b, a = mixer.fix_query_key_value_ordering(qkvz.T[None], weight.T[None])  # type: ignore[operator]
    parts = sets_of(model, name)
    assert [part.lr_shape for part in parts] == [(6, 16)] * 2
    for part, expected in zip(parts, (b, a), strict=True):
        assert torch.equal(weight[places(part)], expected[0].T)


def test_torchs_attention() -> None:
    module = randomised(nn.MultiheadAttention(16, 2, batch_first=True))
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    parts, weight = sets_of(module, "in_proj_weight"), dict(module.named_parameters())["in_proj_weight"]
    plain = module(x, x, x, need_weights=False)[0]
    scale(weight, parts[0], 3.0)
    scale(weight, parts[1], 1 / 3.0)
    assert same(module(x, x, x, need_weights=False)[0], plain)
    scale(weight, parts[2], 2.0)
    assert same(module(x, x, x, need_weights=False)[0], 2 * plain)


def test_lstm_gates() -> None:
    """Nothing is put into a cell whose third gate, the candidate, is zero; the order is torch's: input, forget,
    cell, output.
    """
    module = randomised(nn.LSTM(7, 6))
    x = torch.randn(4, 1, 7, dtype=torch.float64)
    parts, weight = sets_of(module, "weight_ih_l0"), dict(module.named_parameters())["weight_ih_l0"]
    assert [part.lr_shape for part in parts] == [(6, 7)] * 4
    scale(weight, parts[2], 0.0)
    with torch.no_grad():
        dict(module.named_parameters())["weight_hh_l0"].zero_()
    assert not module(x)[0].any()


@pytest.mark.parametrize("name", ["GroupedExperts", "GptOssGroupedExperts"])
def test_torchtitans_experts(name: str) -> None:
    """Any of w1, w2, w3 silences the experts, and so do gates that take turns with ups; (outputs, inputs) are not
    square.
    """
    library("torchtitan")
    source = "torchtitan.models.common.moe" if name == "GroupedExperts" else "torchtitan.models.gpt_oss.moe"
    experts_class = getattr(importlib.import_module(source), name)
    experts: nn.Module = experts_class(experts_class.Config(dim=16, hidden_dim=24, num_experts=3))
    with torch.no_grad():
        for param_name, param in experts.named_parameters():
            param.copy_(torch.zeros_like(param) if "bias" in param_name else torch.randn(param.shape))
    model = nn.ModuleDict({"experts": experts})
    x, counts = torch.randn(12, 16), torch.tensor([4, 4, 4])
    assert experts(x, counts).any()
    for param_name, param in experts.named_parameters():
        if param.dim() == 3:
            first, kept = sets_of(model, f"experts.{param_name}")[0], param.detach().clone()
            down = param_name.startswith(("w2", "mlp2"))
            assert (first.count, first.lr_shape) == (3, (16, 24) if down else (24, 16))
            scale(param, first, 0.0)
            assert not experts(x, counts).any()
            param.data = kept


def test_torchtitan_stores_the_same_parts() -> None:
    """6 heads in 2 groups of [q, q, q, k, v]; its checkpoints have the parts as separate weights."""
    library("torchtitan")
    from torchtitan.models.common.attention import FusedQKVLinear
    from torchtitan.models.common.linear import Linear

    wqkv = Linear.Config(in_features=16, out_features=80, bias=False)
    fused = FusedQKVLinear(FusedQKVLinear.Config(head_dim=8, n_heads=6, n_kv_heads=2, wqkv=wqkv))
    model = randomised(
        nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"qkv": fused, "wo": nn.Linear(48, 16)})])})
    )
    name = "layers.0.qkv.wqkv.weight"
    weight, saved, parts = dict(model.named_parameters())[name], model.state_dict(), sets_of(model, name)
    assert [part.lr_shape for part in parts] == [(48, 16), (16, 16), (16, 16)]
    for part, label in zip(parts, ("wq", "wk", "wv"), strict=True):
        assert torch.equal(weight[places(part)], saved[name.replace("wqkv", label)])


@pytest.mark.parametrize("differential", [True, False])
def test_the_attention_of_diffusers_autoencoder_same(differential: bool) -> None:
    """Its own forward: values silence it, and so does a second pair of queries and keys that equals the first."""
    library("diffusers")
    source = importlib.import_module("diffusers.models.autoencoders.autoencoder_same")
    module = randomised(source.SAMEAttention(16, dim_heads=8, use_differential=differential))
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts, weight = sets_of(module, "to_qkv.weight"), module.get_parameter("to_qkv.weight")
    assert [part.lr_shape for part in parts] == [(16, 16)] * (5 if differential else 3)
    assert module(x).any()
    if differential:
        kept = weight.detach().clone()
        with torch.no_grad():
            for first, second in ((0, 1), (2, 3)):
                weight[places(parts[second])] = weight[places(parts[first])]
        assert module(x).abs().max() < 1e-12
        weight.data = kept
    scale(weight, parts[-1], 0.0)
    assert not module(x).any()
    (group,) = [group for group in get_default_muon_param_groups(module) if "to_qkv.weight" in group["names"]]
    assert group["use_muon"]
