"""QK-clip: hold the largest attention logit near a threshold, and see it grow without.

Start it with: python examples/qk_clip.py
"""

import argparse
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshmuon import MaxLogits, Muon, get_default_muon_param_groups

WORDS, LENGTH, COUNTS, WIDTH, HEAD_DIM = 10, 16, 6, 64, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def train(steps: int, threshold: float | None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer() for _ in range(2)))
    model = nn.ModuleDict(
        {"embedding": nn.Embedding(WORDS, WIDTH), "layers": layers, "head": nn.Linear(WIDTH, COUNTS)}
    ).to(device)
    clip = None if threshold is None else {"head_dim": HEAD_DIM, "threshold": threshold}
    optimizer = Muon(get_default_muon_param_groups(model), lr=1e-2, weight_decay=0.0, clip_config=clip)
    logits = MaxLogits()
    for number, layer in enumerate(layers):
        logits.attach(layer, number)  # the number in the names of its weights: layers.0.q_proj.weight

    print(f"threshold {threshold}")
    for step in range(1, steps + 1):
        tokens = torch.randint(WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(step)).to(device)
        counts = (tokens[:, :, None] == tokens[:, None, :]).sum(-1).clamp(max=COUNTS) - 1  # how often a token occurs
        with logits.collecting():  # watches attention in the forward passes inside
            output = model["head"](layers(model["embedding"](tokens)))
        loss = F.cross_entropy(output.flatten(0, 1), counts.flatten())
        loss.backward()
        largest = logits.collect()  # {0: one logit per head, 1: ...}; on several ranks the maximum over all of them
        optimizer.step(qk_logits=None if clip is None else largest)
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0 or step == steps:
            logit = max(heads.max().item() for heads in largest.values())
            print(f"step {step:4d}  loss {loss.item():.4f}  largest logit {logit:.1f}", flush=True)


def main(steps: int, threshold: float) -> None:
    train(steps, None)
    train(steps, threshold)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threshold", type=float, default=3.0, help="100 is usual for large models")
    if os.environ.get("RANK", "0") == "0":  # torchrun may start several; one is enough
        main(**vars(parser.parse_args()))
