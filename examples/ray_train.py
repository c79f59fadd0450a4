"""FSDP2 with meshmuon under Ray Train, to copy and change. Ray starts the processes; the rest is plain torch.

Start it with: python examples/ray_train.py --workers 2 (needs ray[train])
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from fsdp2 import LENGTH, VOCABULARY, Transformer
from meshmuon import Muon, clip_grad_norm_, get_default_muon_param_groups


def train_loop(config: dict[str, Any]) -> list[float]:
    """What every worker runs, inside the process group that Ray has created."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # Ray shows each worker its own GPU
    torch.manual_seed(0)  # the same weights on every rank
    model = Transformer().to(device)
    for module in (*model.layers, model):
        fully_shard(module)  # not ray.train.torch.prepare_model, which wraps with DDP or FSDP1
    optimizer = Muon(get_default_muon_param_groups(model), lr=config["lr"], weight_decay=0.1)  # after sharding
    torch.manual_seed(1 + dist.get_rank())  # other data on every rank
    losses = []
    for _ in range(config["steps"]):
        tokens = torch.randint(VOCABULARY, (16, LENGTH // 2), device=device).repeat(1, 2)
        logits = model(tokens[:, :-1])[:, -LENGTH // 2 :]  # of the second half, which repeats the first
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, LENGTH // 2 :].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(mean.item())
        config["report"]({"loss": losses[-1]})
    if config["checkpoint"] is not None:
        save_checkpoint(model, optimizer, config["checkpoint"])
    return losses


def save_checkpoint(model: nn.Module, optimizer: Muon, folder: str) -> None:
    """On storage that all workers share; any number of workers can load it."""
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def main(workers: int, steps: int, checkpoint: str | None) -> None:
    import ray.train
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"lr": 3e-3, "steps": steps, "checkpoint": checkpoint, "report": ray.train.report},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", help="folder, shared by the workers, to save model and optimizer to at the end")
    main(**vars(parser.parse_args()))
