"""Schedules that recipes use: weight decay that shrinks with the width and falls to zero, and a warm-up of the
momentum.

Start it with: python examples/schedules.py
"""

import argparse
import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX10_1_512")  # some virtual machines advertise AMX but cannot run it

import torch
from torch import nn
from torch.nn import functional as F

from meshmuon import Muon, get_default_muon_param_groups

CLASSES, TUNED_WIDTH, TUNED_DECAY = 10, 64, 0.2  # the decay was tuned at this width


def momentum_at(step: int, warm_up: int) -> float:
    """From 0.85 to 0.95 in ``warm_up`` steps."""
    return 0.85 + 0.10 * min(1.0, step / warm_up)


def train(steps: int, width: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    blocks = [module for _ in range(3) for module in (nn.Linear(width, width), nn.RMSNorm(width), nn.GELU())]
    model = nn.Sequential(nn.Linear(TUNED_WIDTH, width), *blocks, nn.Linear(width, CLASSES, bias=False)).to(device)

    # One group for Muon's matrices, one or two for AdamW's parameters, with decay for Muon alone. What a group holds is
    # read at every step, so a schedule is an assignment. Groups of your own work the same: one per width, or per kind
    # of layer.
    groups = get_default_muon_param_groups(model)
    decay = TUNED_DECAY * (TUNED_WIDTH / width) ** 2
    optimizer = Muon(groups, lr=5e-3, weight_decay=0.0)
    muon = [group for group in optimizer.param_groups if group["use_muon"]]

    # four clusters per class
    centres = torch.randn(4 * CLASSES, TUNED_WIDTH, generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        for group in muon:
            group["weight_decay"] = decay * (1 - step / steps)  # linear to zero
            group["momentum"] = momentum_at(step, warm_up=max(1, steps // 4))
        generator = torch.Generator().manual_seed(step)
        labels = torch.randint(4 * CLASSES, (256,), generator=generator)
        inputs = (centres[labels] + torch.randn(256, TUNED_WIDTH, generator=generator)).to(device)
        loss = F.cross_entropy(model(inputs), (labels % CLASSES).to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 or (step + 1) % max(1, steps // 4) == 0:
            set_to = f"weight decay {muon[0]['weight_decay']:.4f}  momentum {muon[0]['momentum']:.3f}"
            print(f"width {width:3d}  step {step + 1:3d}  {set_to}  loss {loss.item():.4f}", flush=True)


def main(steps: int) -> None:
    for width in (TUNED_WIDTH, 2 * TUNED_WIDTH):
        train(steps, width)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    if os.environ.get("RANK", "0") == "0":  # torchrun may start several; one is enough
        main(**vars(parser.parse_args()))
