"""Fused weights of packages that the tests do not install, in stand-ins that cut outputs as the packages do; one of diffusers.

mamba_ssm needs CUDA to be built, and timm's GC ViT an environment of its own (``make test-models``). The classes have the names
and attributes of theirs. The recurrences are written out step by step.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshmuon import get_default_muon_param_groups
from tests.support.architectures import library

from .test_parts import places, randomised, same, scale, sets_of


def recurrence(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:  # noqa: N803  # the letters of the paper
    """The state-space model of each channel: x and dt are (batch, length, channels), B and C (batch, length, channels, state)."""
    state, outputs = torch.zeros_like(B[:, 0]), []
    for t in range(x.size(1)):
        state = state * torch.exp(dt[:, t, :, None] * A) + (dt * x)[:, t, :, None] * B[:, t]
        outputs.append((state * C[:, t]).sum(-1))
    return torch.stack(outputs, 1)


class Mamba(nn.Module):
    """mamba_ssm.modules.mamba_simple.Mamba: ``in_proj`` is x, z; ``x_proj`` is dt, B, C."""

    def __init__(self, d_model: int, d_state: int, expand: int, dt_rank: int) -> None:
        super().__init__()
        self.d_model, self.d_state, self.expand, self.dt_rank = d_model, d_state, expand, dt_rank
        self.d_inner = expand * d_model
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=False)
        self.conv1d = nn.Conv1d(self.d_inner, self.d_inner, 3, groups=self.d_inner, padding=2)
        self.x_proj = nn.Linear(self.d_inner, dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(dt_rank, self.d_inner)
        self.A_log = nn.Parameter(torch.zeros(self.d_inner, d_state))
        self.D = nn.Parameter(torch.zeros(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        x, z = self.in_proj(hidden).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.mT)[..., : hidden.size(1)].mT)
        dt, b, c = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        b, c = (part[:, :, None].expand(-1, -1, self.d_inner, -1) for part in (b, c))
        y = recurrence(x, F.softplus(self.dt_proj(dt)), -self.A_log.exp(), b, c) + self.D * x
        out: Tensor = self.out_proj(y * F.silu(z))
        return out


class Mamba2(nn.Module):
    """mamba_ssm.modules.mamba2.Mamba2: ``in_proj`` is z and x of an MLP if ``d_ssm`` leaves room for one, then z, x, B, C, dt."""

    def __init__(self, d_model: int, d_state: int, headdim: int, ngroups: int, d_ssm: int | None = None) -> None:
        super().__init__()
        self.d_model, self.d_state, self.headdim, self.ngroups = d_model, d_state, headdim, ngroups
        self.d_inner = 2 * d_model
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm
        self.nheads = self.d_ssm // headdim
        mixed = self.d_ssm + 2 * ngroups * d_state
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner + 2 * ngroups * d_state + self.nheads, bias=False)
        self.conv1d = nn.Conv1d(mixed, mixed, 3, groups=mixed, padding=2)
        self.dt_bias = nn.Parameter(torch.zeros(self.nheads))
        self.A_log = nn.Parameter(torch.zeros(self.nheads))
        self.D = nn.Parameter(torch.zeros(self.nheads))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        states, mlp = self.ngroups * self.d_state, self.d_inner - self.d_ssm
        cuts = [mlp, mlp, self.d_ssm, self.d_ssm + 2 * states, self.nheads]
        mlp_z, mlp_x, z, mixed, dt = self.in_proj(hidden).split(cuts, dim=-1)
        mixed = F.silu(self.conv1d(mixed.mT)[..., : hidden.size(1)].mT)
        x, b, c = mixed.split([self.d_ssm, states, states], dim=-1)
        b, c = (
            part.unflatten(-1, (self.ngroups, self.d_state)).repeat_interleave(self.d_ssm // self.ngroups, 2) for part in (b, c)
        )
        dt = F.softplus(dt + self.dt_bias).repeat_interleave(self.headdim, -1)
        y = recurrence(x, dt, -self.A_log.exp().repeat_interleave(self.headdim)[:, None], b, c)
        y = (y + self.D.repeat_interleave(self.headdim) * x) * F.silu(z)
        out: Tensor = self.out_proj(torch.cat([F.silu(mlp_z) * mlp_x, y], dim=-1))
        return out


class WindowAttentionGlobal(nn.Module):
    """timm's GC ViT: where the queries come from elsewhere, ``qkv`` is k, v."""

    def __init__(self, dim: int, num_heads: int, use_global: bool) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.use_global = num_heads, dim // num_heads, use_global
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * (2 if use_global else 3))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (2 if self.use_global else 3, self.num_heads, self.head_dim)).transpose(1, 3).unbind(2)
        q, k, v = (q_global, *parts) if self.use_global else parts
        out: Tensor = self.proj(((q * self.scale) @ k.mT).softmax(-1).matmul(v).transpose(1, 2).flatten(2))
        return out


def inputs(width: int) -> Tensor:
    return torch.randn(2, 5, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def silenced(module: nn.Module, weight: str, part: int, *args: Any) -> Tensor:
    """The output while a part of a weight is zero."""
    param = module.get_parameter(weight)
    kept = param.detach().clone()
    scale(param, sets_of(module, weight)[part], 0.0)
    with torch.no_grad():
        output: Tensor = module(*args)
        param.copy_(kept)
    return output


def test_mamba_ssms_first() -> None:
    module, x = randomised(Mamba(8, d_state=5, expand=2, dt_rank=3)), inputs(8)
    assert [part.lr_shape for part in sets_of(module, "in_proj.weight")] == [(16, 8)] * 2
    assert [part.lr_shape for part in sets_of(module, "x_proj.weight")] == [(3, 16), (5, 16), (5, 16)]
    assert module(x).abs().min() > 0
    for weight, parts in (("in_proj.weight", (0, 1)), ("x_proj.weight", (1, 2))):
        assert not any(silenced(module, weight, part, x).any() for part in parts)
    with torch.no_grad():  # without the first part of x_proj, all steps have the same size
        module.get_parameter("dt_proj.weight").zero_()
        plain = module(x)
    assert same(silenced(module, "x_proj.weight", 0, x), plain)


@pytest.mark.parametrize("d_ssm", [None, 12])
def test_mamba_ssms_second(d_ssm: int | None) -> None:
    """In float64. Part by part: z, x, B and C silence the state-space model, the two before them the MLP."""
    module, x = randomised(Mamba2(8, d_state=5, headdim=4, ngroups=1 if d_ssm else 2, d_ssm=d_ssm)), inputs(8)
    parts = sets_of(module, "in_proj.weight")
    states, heads = (5, 3) if d_ssm else (10, 4)
    expected = [4, 4, 12, 12, states, states, heads] if d_ssm else [16, 16, states, states, heads]
    assert [part.lr_shape for part in parts] == [(size, 8) for size in expected]
    out_proj = module.get_parameter("out_proj.weight")
    kept, mlp = out_proj.detach().clone(), 16 - (d_ssm or 16)
    first = len(parts) - 5
    for of_mlp, silencing in ((True, range(first)), (False, range(first, first + 4))):
        with torch.no_grad():  # what is left if the module passes nothing of the one kind on
            out_proj[:, slice(0, mlp) if of_mlp else slice(mlp, None)] = 0.0
            silent = module(x)
            out_proj.copy_(kept)
        for part in silencing:
            assert same(silenced(module, "in_proj.weight", part, x), silent), part
    steps = silenced(module, "in_proj.weight", first + 4, x)
    assert not same(steps, module(x))


def test_gc_vits_keys_and_values() -> None:
    module, x = randomised(WindowAttentionGlobal(12, 3, use_global=True)), inputs(12)
    queries = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    parts, weight = sets_of(module, "qkv.weight"), module.get_parameter("qkv.weight")
    assert [part.lr_shape for part in parts] == [(12, 12)] * 2
    plain = module(x, queries)
    assert plain.any()
    assert not silenced(module, "qkv.weight", 1, x, queries).any()
    scale(weight, parts[0], 3.0)
    assert not same(module(x, queries), plain)
    assert same(module(x, queries / 3), plain)


def test_gc_vits_own_queries() -> None:
    module, x = randomised(WindowAttentionGlobal(12, 3, use_global=False)), inputs(12)
    parts, weight = sets_of(module, "qkv.weight"), module.get_parameter("qkv.weight")
    assert [part.lr_shape for part in parts] == [(12, 12)] * 3
    plain = module(x)
    assert not silenced(module, "qkv.weight", 2, x).any()
    scale(weight, parts[0], 3.0)
    scale(weight, parts[1], 1 / 3.0)
    assert same(module(x), plain)


@pytest.mark.parametrize("differential", [True, False])
def test_the_attention_of_diffusers_autoencoder_same(differential: bool) -> None:
    """Its own forward: values silence it, and so does a second pair of queries and keys that equals the first."""
    library("diffusers")
    source = importlib.import_module("diffusers.models.autoencoders.autoencoder_same")
    module, x = randomised(source.SAMEAttention(16, dim_heads=8, use_differential=differential)), inputs(16)
    parts, weight = sets_of(module, "to_qkv.weight"), module.get_parameter("to_qkv.weight")
    assert [part.lr_shape for part in parts] == [(16, 16)] * (5 if differential else 3)
    assert module(x).any()
    assert not silenced(module, "to_qkv.weight", len(parts) - 1, x).any()
    if differential:
        with torch.no_grad():
            for first, second in ((0, 1), (2, 3)):
                weight[places(weight, parts[second])] = weight[places(weight, parts[first])]
        assert module(x).abs().max() < 1e-12
    (group,) = [group for group in get_default_muon_param_groups(module) if "to_qkv.weight" in group["names"]]
    assert group["use_muon"]
