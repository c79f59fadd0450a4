"""Tensor parallel × FSDP2: each layer is cut over the ranks of "tp", and what is left of it over the ranks of "dp".

One device:    python examples/tp_fsdp.py
2 dp × 2 tp:   torchrun --standalone --nproc-per-node 4 examples/tp_fsdp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from meshmuon import Muon, clip_grad_norm_, get_default_muon_param_groups

WORDS, LENGTH, COUNTS, WIDTH, HEAD_DIM = 10, 16, 6, 64, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)  # under tensor parallelism a rank has some of the heads
        q, k, v = (project(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for project in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and how often each of them occurs in its sequence: the same for any number of ranks."""
    tokens = torch.randint(WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens, (tokens[:, :, None] == tokens[:, None, :]).sum(-1).clamp(max=COUNTS) - 1


def main(steps: int, tp: int) -> None:
    world = int(os.environ.get("WORLD_SIZE", 1))
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )
    torch.manual_seed(0)  # the same weights on every rank
    layers = [Layer() for _ in range(2)]
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, COUNTS, bias=False)).to(device)
    part = slice(None)
    if world > 1:
        mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
        part = slice(mesh.get_local_rank("dp"), None, world // tp)  # the ranks of one "tp" group see the same data
        columns = {name: ColwiseParallel() for name in ("wq", "wk", "wv", "up")}
        for layer in layers:
            parallelize_module(layer, mesh["tp"], {**columns, "wo": RowwiseParallel(), "down": RowwiseParallel()})
        for module in (*layers, model):
            fully_shard(module, mesh=mesh["dp"])

    # The optimizer reads from each parameter over which axes it is cut; norms, embedding and head are on "dp" alone.
    optimizer = Muon(get_default_muon_param_groups(model), lr=1e-2, weight_decay=0.1)
    for step in range(1, steps + 1):
        tokens, counts = (tensor[part].to(device) for tensor in batch(step))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), counts.flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)  # torch's own refuses parameters on different meshes
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        if (step == 1 or step % 10 == 0 or step == steps) and int(os.environ.get("RANK", 0)) == 0:
            print(f"step {step:4d}  loss {mean.item():.4f}", flush=True)
    if world > 1:
        if dist.get_rank() == 0:
            print(optimizer.routing_table())
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tp", type=int, default=2, help="ranks that share a layer")
    main(**vars(parser.parse_args()))
