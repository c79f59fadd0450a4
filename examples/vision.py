"""A vision model with convolutions: Muon sees each filter bank (out, in, height, width) as one out × (in·height·width)
matrix.

Start it with: python examples/vision.py
"""

import argparse
import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshmuon import Muon

ANGLES, SIZE = 8, 16


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Noisy stripes, to be told apart by their angle."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(ANGLES, (64,), generator=generator)
    angles, phases = labels * torch.pi / ANGLES, 2 * torch.pi * torch.rand(64, generator=generator)
    across = torch.arange(SIZE) * angles.cos()[:, None]
    along = torch.arange(SIZE) * angles.sin()[:, None]
    stripes = torch.sin(across[:, None, :] + along[:, :, None] + phases[:, None, None])
    return (stripes + torch.randn(64, SIZE, SIZE, generator=generator))[:, None], labels


def main(steps: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    stem, pool = nn.Conv2d(1, 16, 5, padding=2), nn.AdaptiveAvgPool2d(1)
    blocks = (Residual(16), nn.Conv2d(16, 32, 3, stride=2, padding=1), Residual(32))
    model = nn.Sequential(stem, *blocks, pool, nn.Flatten(), nn.Linear(32, ANGLES)).to(device)

    optimizer = Muon(model, lr=1e-2, weight_decay=0.1)
    print(optimizer.routing_table())
    for step in range(1, steps + 1):
        images, labels = (tensor.to(device) for tensor in batch(step))
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0 or step == steps:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    if os.environ.get("RANK", "0") == "0":  # torchrun may start several; one is enough
        main(**vars(parser.parse_args()))
