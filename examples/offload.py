"""Offload: momentum and Adam's moments live in host memory between steps; the losses keep their bits.

Start it with: python examples/offload.py
"""

import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F

from meshmuon import Muon, get_default_muon_param_groups

WORDS, LENGTH, COUNTS = 10, 16, 6


def train(steps: int, offload: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(WORDS, 64), *layers, nn.Linear(64, COUNTS, bias=False)).to(device)
    optimizer = Muon(get_default_muon_param_groups(model), lr=1e-2, weight_decay=0.1)
    if offload:
        optimizer.turn_on_cpu_offload()  # turn_off_cpu_offload() at any time brings the state back
    for step in range(1, steps + 1):
        tokens = torch.randint(WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(step)).to(device)
        counts = (tokens[:, :, None] == tokens[:, None, :]).sum(-1).clamp(max=COUNTS) - 1  # how often a token occurs
        loss = F.cross_entropy(model(tokens).flatten(0, 1), counts.flatten())
        loss.backward()
        optimizer.step()  # fetches the state in one copy per dtype, and sends it back while the next forward pass runs
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0 or step == steps:
            print(f"step {step:4d}  loss {loss.item():.10f}", flush=True)
    optimizer.state_dict()  # works while the state is away
    tensors = [tensor for state in optimizer.state.values() for key, tensor in state.items() if key != "step"]
    places = sorted({tensor.device.type for tensor in tensors})
    print(f"offload {offload}: {sum(tensor.nbytes for tensor in tensors):,} bytes of state on {', '.join(places)}")


def main(steps: int) -> None:
    train(steps, offload=False)
    train(steps, offload=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    if os.environ.get("RANK", "0") == "0":  # torchrun may start several; one is enough
        main(**vars(parser.parse_args()))
