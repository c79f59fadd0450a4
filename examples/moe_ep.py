"""Mixture of experts, expert parallel: each rank holds whole experts; FSDP2 shards everything else over the same ranks.

One device:  python examples/moe_ep.py
Several:     torchrun --standalone --nproc-per-node 4 examples/moe_ep.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from meshmuon import Muon, get_default_muon_param_groups

CLASSES, WIDTH, INNER, EXPERTS = 10, 64, 128, 8


class Experts(nn.Module):
    """All experts as stacks (experts, out, in). A rank sees all tokens and computes the experts that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / INNER**0.5)
        self.mesh: DeviceMesh | None = None

    def shard(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        for name, stack in list(self.named_parameters()):
            weight = nn.Parameter(distribute_tensor(stack.detach(), mesh, [Shard(0)]))
            weight.register_hook(lambda grad: grad / mesh.size())  # a mean over ranks, as FSDP2 does for the rest
            setattr(self, name, weight)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        if self.mesh is None:
            return _weighted(x, gates, self.up, self.down)
        parts = (DTensor.from_local(part, self.mesh, [Shard(0)]) for part in (x, gates))
        whole = [part.redistribute(placements=[Replicate()]) for part in parts]
        x, gates = (tensor.to_local(grad_placements=[Partial()]) for tensor in whole)
        gates = gates.chunk(self.mesh.size(), dim=1)[self.mesh.get_local_rank()]  # of this rank's experts
        y = _weighted(x, gates, self.up.to_local(), self.down.to_local())
        return DTensor.from_local(y, self.mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()


def _weighted(x: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
    # Dense, to be short: a real model computes the chosen experts only.
    return torch.einsum("teh,edh,te->td", torch.einsum("td,ehd->teh", x, up).relu().square(), down, gates)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(self.norm(x)).softmax(-1)
        gates = gates * (gates >= gates.topk(2).values[:, -1:])  # zero for all but two experts
        return x + self.experts(self.norm(x), gates)


def main(steps: int) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(), MoE(), nn.Linear(WIDTH, CLASSES, bias=False)).to(device)
    if world > 1:
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("ep",))
        for block in model[1:3]:
            block.experts.shard(mesh)
        fully_shard(model, mesh=mesh, ignored_params={w for block in model[1:3] for w in block.experts.parameters()})
    # Each expert is a matrix of its own. Whole experts stay on their rank: Muon sends nothing for them.
    optimizer = Muon(get_default_muon_param_groups(model, expert_keys=["experts"]), lr=3e-3, weight_decay=0.1)
    centres = torch.randn(
        4 * CLASSES, WIDTH, generator=torch.Generator().manual_seed(1)
    )  # four clusters for each class
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        cluster = torch.randint(4 * CLASSES, (256,), generator=generator)
        inputs = centres[cluster] + torch.randn(256, WIDTH, generator=generator)
        loss = F.cross_entropy(model(inputs[rank::world].to(device)), (cluster % CLASSES)[rank::world].to(device))
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
    parser.add_argument("--steps", type=int, default=40)
    main(**vars(parser.parse_args()))
