"""A small byte-level GPT: pre-norm RMSNorm, rotary positions, QK-norm, ReLU² or SwiGLU.

Every linear map is a separate matrix (`wq`, `wk`, `wv`, `wo`, …), so that Muon sees the matrices that
the mathematics has. Shapes in comments: B sequences, T positions, H heads, D width of one head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MLP_KINDS = ("relu2", "swiglu")
WEIGHTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and variants of the model. Bad combinations raise `ValueError` when it is built."""

    vocab_size: int = 256
    d_model: int = 192
    n_layers: int = 4
    n_heads: int = 3
    d_ff: int = 768
    seq_len: int = 256
    mlp: str = "relu2"
    qk_norm: bool = True
    tied_head: bool = False
    rope_base: float = 10_000.0
    weights: str = "float32"  # dtype in which weights are kept; the model always computes in float32

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "d_ff", "seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.d_model % self.n_heads:
            raise ValueError(
                f"d_model {self.d_model} does not divide into {self.n_heads} heads: choose --heads so that it divides "
                "--d-model"
            )
        if self.head_dim % 2:
            raise ValueError(f"d_model / heads is {self.head_dim}, but rotary positions turn pairs: it must be even")
        if self.mlp not in MLP_KINDS:
            raise ValueError(f"mlp must be one of {', '.join(MLP_KINDS)}, got {self.mlp!r}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads


def rope_tables(seq_len: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles, each of shape (seq_len, head_dim / 2)."""
    inverse_wavelength = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), inverse_wavelength)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pair (x[i], x[i + D/2]) of each position by that position's angle i. x is (B, H, T, D)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Linear(nn.Linear):
    """A linear map that computes in the dtype of its input, whatever its weight is kept in."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.RMSNorm):
    """An RMSNorm that computes in the dtype of its input, whatever its gain is kept in."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and, by option, RMS-normalised queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.qk_norm = config.qk_norm
        width = config.d_model
        self.wq = Linear(width, width, bias=False)
        self.wk = Linear(width, width, bias=False)
        self.wv = Linear(width, width, bias=False)
        self.wo = Linear(width, width, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.n_heads, -1).transpose(1, 2)  # (B, T, H·D) -> (B, H, T, D)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self._heads(self.wq(x)), self._heads(self.wk(x)), self._heads(self.wv(x))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.qk_norm:
            q, k = F.rms_norm(q, (q.shape[-1],)), F.rms_norm(k, (k.shape[-1],))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.wo(mixed.transpose(1, 2).flatten(2)))


class ReluSquaredMLP(nn.Module):
    """Two matrices around relu(x)²."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = Linear(config.d_model, config.d_ff, bias=False)
        self.w2 = Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.w2(F.relu(self.w1(x)).square()))


class SwiGLU(nn.Module):
    """Three matrices: w2(silu(w1 x) · w3 x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = Linear(config.d_model, config.d_ff, bias=False)
        self.w3 = Linear(config.d_model, config.d_ff, bias=False)
        self.w2 = Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.w2(F.silu(self.w1(x)) * self.w3(x)))


class Block(nn.Module):
    """One transformer layer: x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.d_model)
        self.mlp = SwiGLU(config) if config.mlp == "swiglu" else ReluSquaredMLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return cast(Tensor, x + self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.d_model)
        self.output = Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied_head:
            self.output.weight = self.tok_embeddings.weight
        cos, sin = rope_tables(config.seq_len, config.head_dim, config.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, vocab) for tokens (B, T) of dtype int64; position t sees bytes 0…t only."""
        length = tokens.shape[1]
        if length > self.config.seq_len:
            raise ValueError(f"{length} positions given, but the model was built for {self.config.seq_len}")
        cos, sin = cast(Tensor, self.cos)[:length], cast(Tensor, self.sin)[:length]
        x = self.tok_embeddings(tokens).to(cos.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return cast(Tensor, self.output(self.norm(x)))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte."""
        logits = self(tokens)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def init_weights(model: GPT, seed: int) -> None:
    """Fill the weights from `seed` alone, so that every optimizer starts from the same point.

    Matrices that write to the residual stream start at zero (each layer begins as the identity); the
    head starts small, so the first loss is close to that of a uniform guess.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
        elif name.endswith(("wo.weight", "w2.weight")):
            parameter.zero_()
        else:
            small = name.startswith(("tok_embeddings.", "output."))
            std = 0.02 if small else 1.0 / math.sqrt(parameter.shape[1])
            # Drawn on the CPU: the numbers must not depend on the device that trains.
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def build_model(config: ModelConfig, seed: int, device: torch.device) -> GPT:
    """A model on `device` whose weights depend on `config` and `seed` only."""
    model = GPT(config)
    init_weights(model, seed)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(WEIGHTS[config.weights])
    return model.to(device)
