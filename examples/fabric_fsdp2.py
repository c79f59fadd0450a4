"""A Fabric script with meshmuon, to copy and change: one process, DDP or FSDP2, on CPU or GPUs.

Start it with: python examples/fabric_fsdp2.py --strategy fsdp2 --devices 2
"""

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from fsdp2 import LENGTH, VOCABULARY, Transformer
from meshmuon.integrations.lightning import muon

ACCUMULATED = 2


def shard(model: Transformer, mesh: DeviceMesh) -> Transformer:
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["data_parallel"])
    return model


def main(steps: int, strategy: str, devices: int, precision: Any, checkpoint: str | None) -> list[float]:
    sharding = ModelParallelStrategy(shard, data_parallel_size=devices, tensor_parallel_size=1)
    fabric = lightning.Fabric(
        strategy=sharding if strategy == "fsdp2" else strategy, devices=devices, precision=precision
    )
    fabric.launch()
    fabric.seed_everything(0)  # the same weights on every rank
    model = fabric.setup_module(Transformer())
    optimizer = fabric.setup_optimizers(muon(model, fabric, lr=3e-3, weight_decay=0.1))  # after sharding
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if checkpoint is not None and Path(checkpoint).exists():
        fabric.load(checkpoint, state)
    torch.manual_seed(1 + fabric.global_rank + 1000 * state["step"])  # other data on every rank
    losses = []
    for step in range(state["step"] + 1, steps + 1):
        for part in range(ACCUMULATED):
            tokens = torch.randint(VOCABULARY, (8, LENGTH // 2), device=fabric.device).repeat(1, 2)
            with fabric.no_backward_sync(model, enabled=part < ACCUMULATED - 1):
                logits = model(tokens[:, :-1])[:, -LENGTH // 2 :]  # of the second half, which repeats the first
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, LENGTH // 2 :].flatten())
                fabric.backward(loss / ACCUMULATED)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1 or step % 10 == 0:
            fabric.print(f"step {step:4d}  loss {losses[-1]:.4f}")
    if checkpoint is not None:
        fabric.save(checkpoint, {**state, "step": steps})
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--strategy", choices=["auto", "ddp", "fsdp2"], default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--checkpoint", help="where to continue from, if it exists, and to save to at the end")
    main(**vars(parser.parse_args()))
