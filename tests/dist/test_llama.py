"""A small Llama-like model trains under FSDP2 and under tensor parallelism × FSDP2 as it does in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from meshmuon import Muon, get_default_muon_param_groups
from tests.support.bounds import led_astray, nudge
from tests.support.processes import results_of, run_ranks

WIDTH, HEADS, VOCABULARY, LENGTH, BATCH, STEPS = 32, 4, 64, 12, 8, 20


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        found = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
        return self.wo(found.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.w1 = nn.Linear(WIDTH, 88, bias=False)
        self.w3 = nn.Linear(WIDTH, 88, bias=False)
        self.w2 = nn.Linear(88, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def build() -> Llama:
    torch.manual_seed(0)
    return Llama()


def losses_of(model: nn.Module, share: int, shares: int) -> list[float]:
    """Training losses on one of ``shares`` equal parts of every batch."""
    optimizer = Muon(get_default_muon_param_groups(model), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    losses = []
    for _ in range(STEPS):
        rows = text[share * BATCH // shares : (share + 1) * BATCH // shares]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sharded_losses(rank: int, folder: Path, world: int, tensor_parallel: int) -> Tensor:
    """Training losses, averaged over the ranks."""
    data_parallel = world // tensor_parallel
    mesh = init_device_mesh("cpu", (data_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))
    model = build()
    if tensor_parallel > 1:
        column, row = ColwiseParallel, RowwiseParallel
        plan = {f"attention.{name}": column() for name in ("wq", "wk", "wv")} | {"attention.wo": row()}
        plan |= {"w1": column(), "w3": column(), "w2": row()}
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    losses = torch.tensor(losses_of(model, mesh.get_local_rank("dp"), data_parallel))
    dist.all_reduce(losses)
    return losses / world


@pytest.mark.parametrize(("world", "tensor_parallel"), [(2, 1), (4, 2)], ids=["fsdp2", "tp2-fsdp2"])
def test_loss_curve_equals_one_process(world: int, tensor_parallel: int, tmp_path: Path) -> None:
    losses, *_ = results_of(run_ranks(world, sharded_losses, tmp_path, world, tensor_parallel))
    expected = torch.tensor(losses_of(build(), 0, 1))
    assert expected[-1] < 0.5 * expected[0]
    nudged = []
    for seed in range(3):
        model = build()
        nudge(model.parameters(), STEPS, seed=seed)
        nudged.append(losses_of(model, 0, 1))
    bounds = torch.tensor(led_astray(expected.tolist(), nudged))
    assert bounds.max() < 0.01 < expected.min()
    assert bool(((losses - expected).abs() <= bounds).all())
