"""Resume on another mesh: save on some ranks, continue on any other number of them, with the losses of a run that never
stopped.

One run on 2 ranks:   torchrun --standalone --nproc-per-node 2 examples/resume.py --folder runs/resume --stop 15
Continued on 4:       torchrun --standalone --nproc-per-node 4 examples/resume.py --folder runs/resume
Never stopped:        python examples/resume.py
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from meshmuon import Muon, get_default_muon_param_groups

WORDS, LENGTH, COUNTS = 10, 16, 6


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Random tokens, and how often each of them occurs in its sequence: a function of the step, so nothing else
    needs saving.
    """
    tokens = torch.randint(WORDS, (64, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens, (tokens[:, :, None] == tokens[:, None, :]).sum(-1).clamp(max=COUNTS) - 1


def save(folder: Path, model: nn.Module, optimizer: Muon, step: int) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": torch.tensor(step)}, checkpoint_id=folder / f"step-{step}")


def load(checkpoint: Path, model: nn.Module, optimizer: Muon) -> int:
    weights, state = get_state_dict(model, optimizer)
    saved: dict[str, Any] = {"model": weights, "optimizer": state, "step": torch.tensor(0)}
    dcp.load(saved, checkpoint_id=checkpoint)  # each rank reads what its own shards need
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return int(saved["step"])


def main(steps: int, stop: int | None, folder: Path | None) -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(WORDS, 64), *layers, nn.Linear(64, COUNTS, bias=False)).to(device)
    if world > 1:
        mesh = init_device_mesh(device.type, (world,))
        for module in (*layers, model):
            fully_shard(module, mesh=mesh)
    optimizer = Muon(get_default_muon_param_groups(model), lr=1e-2, weight_decay=0.1)

    done = 0
    checkpoints = sorted(folder.glob("step-*"), key=lambda path: int(path.name[5:])) if folder is not None else []
    if checkpoints:
        done = load(checkpoints[-1], model, optimizer)
        if rank == 0:
            print(f"resumed after step {done} on {world} rank(s)")
    last = steps if stop is None else stop
    for step in range(done + 1, last + 1):
        tokens, counts = (tensor[rank::world].to(device) for tensor in batch(step))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), counts.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        if rank == 0 and (step == 1 or step % 5 == 0 or step == last):
            print(f"step {step:4d}  loss {mean.item():.4f}", flush=True)
    if folder is not None:
        save(folder, model, optimizer, last)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--stop", type=int, help="stop after this step")
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints are: continues from the last one, saves at the end"
    )
    main(**vars(parser.parse_args()))
