"""bfloat16 weights without a float32 copy: small updates are lost by rounding to nearest, and kept by stochastic
rounding.

Start it with: python examples/bf16_weights.py
"""

import argparse
import os
from typing import Literal

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX10_1_512")  # some virtual machines advertise AMX but cannot run it

import torch
from torch import nn
from torch.nn import functional as F

from meshmuon import Muon, get_default_muon_param_groups

CLASSES, WIDTH = 10, 64


def train(steps: int, dtype: torch.dtype, rounding: Literal["nearest", "stochastic"]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    blocks = [module for _ in range(3) for module in (nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.GELU())]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES, bias=False)).to(device)
    model.to(dtype)

    # A small lr, as large models have: 0.2 · lr per element and step is far below the spacing of bfloat16 numbers.
    optimizer = Muon(
        get_default_muon_param_groups(model), lr=5e-4, weight_decay=0.1, rounding=rounding, momentum_dtype=torch.float32
    )
    # four clusters for each class
    centres = torch.randn(4 * CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        labels = torch.randint(4 * CLASSES, (256,), generator=generator)
        inputs = (centres[labels] + torch.randn(256, WIDTH, generator=generator)).to(device, dtype)
        loss = F.cross_entropy(model(inputs).float(), (labels % CLASSES).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % max(1, steps // 5) == 0:
            losses.append(f"{loss.item():.3f}")
    size = sum(parameter.nbytes for parameter in model.parameters())
    print(f"{str(dtype)[6:]:8s} {rounding:10s} {size:6,} bytes of weights  loss {' '.join(losses)}", flush=True)


def main(steps: int) -> None:
    train(steps, torch.float32, "nearest")
    train(steps, torch.bfloat16, "nearest")
    train(steps, torch.bfloat16, "stochastic")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    if os.environ.get("RANK", "0") == "0":  # torchrun may start several; one is enough
        main(**vars(parser.parse_args()))
