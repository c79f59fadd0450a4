"""Fused and per-head weights: tell Muon which matrices are inside a weight, and a fused weight trains like separate
ones.

Start it with: python examples/fused_weights.py
"""

import argparse
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshmuon import Interleaved, Muon, get_default_muon_param_groups

WORDS, LENGTH, COUNTS, WIDTH, HEADS = 10, 16, 6, 64, 4
HEAD_DIM = WIDTH // HEADS


class Attention(nn.Module):
    """Queries, keys and values in one weight: as three blocks, or head by head, or (fused=False) in three weights."""

    def __init__(self, fused: bool, by_head: bool) -> None:
        super().__init__()
        separate = torch.stack([nn.Linear(WIDTH, WIDTH).weight.detach().view(HEADS, HEAD_DIM, WIDTH) for _ in range(3)])
        rows = (separate.transpose(0, 1) if by_head else separate).reshape(3 * WIDTH, WIDTH)
        self.mix = nn.ParameterList([rows.clone()] if fused else [part.reshape(WIDTH, WIDTH) for part in separate])
        self.wo, self.norm, self.by_head = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), by_head

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.linear(self.norm(x), torch.cat(tuple(self.mix)))
        shape = (HEADS, 3, HEAD_DIM) if self.by_head else (3, HEADS, HEAD_DIM)
        q, k, v = mixed.unflatten(-1, shape).movedim(-2 if self.by_head else -3, 0).transpose(2, 3)
        return x + self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def train(name: str, steps: int, fused: bool = True, by_head: bool = False, **options: Any) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = [
        Attention(fused, by_head),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        Attention(fused, by_head),
        nn.RMSNorm(WIDTH),
    ]
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, COUNTS, bias=False)).to(device)
    groups = get_default_muon_param_groups(model)
    optimizer = Muon(groups, lr=1e-2, weight_decay=0.1, **options)
    matrices: Mapping[str, int] = {row.name: row.matrices for row in optimizer.routing_table().rows}
    losses = []
    for step in range(1, steps + 1):
        tokens = torch.randint(WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(step)).to(device)
        counts = (tokens[:, :, None] == tokens[:, None, :]).sum(-1).clamp(max=COUNTS) - 1  # how often a token occurs
        loss = F.cross_entropy(model(tokens).flatten(0, 1), counts.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.4f}")
    weights = sum(len(module.mix) for module in model.modules() if isinstance(module, Attention))
    count = sum(number for name, number in matrices.items() if ".mix." in name)
    shown = " ".join(losses[:: max(1, steps // 5)])
    print(f"{name:38s} {weights} weights, {count:2d} matrices  loss {shown} {losses[-1]}", flush=True)


def main(steps: int) -> None:
    def blocks(name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        return (WIDTH, WIDTH, WIDTH) if ".mix." in name else None

    def turns(name: str, shape: tuple[int, ...]) -> Interleaved | None:
        return Interleaved((HEAD_DIM, HEAD_DIM, HEAD_DIM), HEADS) if ".mix." in name else None

    def heads(name: str, shape: tuple[int, ...]) -> int | None:
        return HEAD_DIM if ".mix." in name else None

    train("separate q, k and v", steps, fused=False)
    train("fused, blocks: split=(64, 64, 64)", steps, split=blocks)
    train("fused, head by head: Interleaved", steps, by_head=True, split=turns)
    train("each head by itself: split=16", steps, split=heads)
    train("fused without a split: one matrix", steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    if os.environ.get("RANK", "0") == "0":  # torchrun may start several; one is enough
        main(**vars(parser.parse_args()))
