"""HSDP: FSDP2 inside each replica. Muon orthogonalises each matrix once for all replicas, where that costs less.

One device:            python examples/hsdp.py
2 replicas × 2 shards: torchrun --standalone --nproc-per-node 4 examples/hsdp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from meshmuon import Muon, clip_grad_norm_, get_default_muon_param_groups

WORDS, LENGTH, COUNTS = 10, 16, 6


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and how often each of them occurs in its sequence: the same for any number of ranks."""
    tokens = torch.randint(WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens, (tokens[:, :, None] == tokens[:, None, :]).sum(-1).clamp(max=COUNTS) - 1


def main(steps: int, replicas: int) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )
    torch.manual_seed(0)  # the same weights on every rank
    layers = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(WORDS, 64), *layers, nn.Linear(64, COUNTS, bias=False)).to(device)
    if world > 1:
        # Ranks of one replica are neighbours: put a replica on the GPUs of one node.
        mesh = init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
        for module in (*layers, model):
            fully_shard(module, mesh=mesh)

    # Nothing else changes: the optimizer reads the mesh from the parameters.
    optimizer = Muon(get_default_muon_param_groups(model), lr=1e-2, weight_decay=0.1, replicas="auto")
    for step in range(1, steps + 1):
        tokens, counts = (tensor[rank::world].to(device) for tensor in batch(step))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), counts.flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
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
    parser.add_argument("--replicas", type=int, default=2)
    main(**vars(parser.parse_args()))
