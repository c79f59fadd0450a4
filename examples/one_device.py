"""One GPU or CPU: Muon for the matrices, AdamW for everything else, with warm-up, decay and gradient clipping.

Start it with: python examples/one_device.py
"""

import argparse
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshmuon import Muon, get_default_muon_param_groups

WORDS, LENGTH, COUNTS = 10, 16, 6


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and how often each of them occurs in its sequence."""
    tokens = torch.randint(WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens, (tokens[:, :, None] == tokens[:, None, :]).sum(-1).clamp(max=COUNTS) - 1


def main(steps: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(WORDS, 64), *layers, nn.Linear(64, COUNTS, bias=False)).to(device)

    optimizer = Muon(get_default_muon_param_groups(model), lr=1e-2, weight_decay=0.1)
    print(optimizer.routing_table())
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )

    for step in range(1, steps + 1):
        tokens, counts = (tensor.to(device) for tensor in batch(step))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), counts.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == 1 or step % 10 == 0 or step == steps:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    if os.environ.get("RANK", "0") == "0":  # torchrun may start several; one is enough
        main(**vars(parser.parse_args()))
