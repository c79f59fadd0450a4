"""DDP: every rank holds the whole model, DDP averages the gradients, and Muon divides its matrices over the ranks.

One device:  python examples/ddp.py
Several:     torchrun --standalone --nproc-per-node 2 examples/ddp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from meshmuon import Muon, get_default_muon_param_groups

WORDS, LENGTH, COUNTS = 10, 16, 6


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and how often each of them occurs in its sequence: the same for any number of ranks."""
    tokens = torch.randint(WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens, (tokens[:, :, None] == tokens[:, None, :]).sum(-1).clamp(max=COUNTS) - 1


def main(steps: int) -> None:
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )
    torch.manual_seed(0)  # the same weights on every rank
    layers = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
    model: nn.Module = nn.Sequential(nn.Embedding(WORDS, 64), *layers, nn.Linear(64, COUNTS, bias=False)).to(device)
    rank, world, everyone = 0, 1, None
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        rank, world, everyone = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    # Each rank orthogonalises its share of the matrices and sends the updates to the others.
    optimizer = Muon(get_default_muon_param_groups(model), lr=1e-2, weight_decay=0.1, replica_group=everyone)
    for step in range(1, steps + 1):
        tokens, counts = (tensor[rank::world].to(device) for tensor in batch(step))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), counts.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        if rank == 0 and (step == 1 or step % 10 == 0 or step == steps):
            print(f"step {step:4d}  loss {mean.item():.4f}", flush=True)
    if world > 1:
        if rank == 0:
            print(optimizer.plan().describe())
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    main(**vars(parser.parse_args()))
