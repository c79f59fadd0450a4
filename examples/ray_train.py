"""FSDP2 with meshmuon under Ray Train, to copy and change. Ray starts the processes; the rest is plain torch.

Start it with: python examples/ray_train.py --workers 2 (needs ray[train]). Started again with the same --name and more
--steps, it continues from its checkpoint.
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from fsdp2 import LENGTH, VOCABULARY, Transformer
from meshmuon import Muon, clip_grad_norm_, get_default_muon_param_groups


def train(
    steps: int, start: str | None, folder: str, report: Callable[[dict[str, float], str | None], None]
) -> list[float]:
    """Trains in an existing process group, from the checkpoint ``start`` if there is one; leaves a checkpoint in
    ``folder``.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # Ray shows each worker its own GPU
    torch.manual_seed(0)  # the same weights on every rank
    model = Transformer().to(device)
    for module in (*model.layers, model):
        fully_shard(module)  # not ray.train.torch.prepare_model, which wraps with DDP or FSDP1
    optimizer = Muon(get_default_muon_param_groups(model), lr=3e-3, weight_decay=0.1)  # after sharding
    first, losses = 0 if start is None else load_checkpoint(model, optimizer, start), []
    for step in range(first, steps):
        torch.manual_seed(1 + step * dist.get_world_size() + dist.get_rank())  # other data on every rank
        tokens = torch.randint(VOCABULARY, (16, LENGTH // 2), device=device).repeat(1, 2)
        logits = model(tokens[:, :-1])[:, -LENGTH // 2 :]  # of the second half, which repeats the first
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, LENGTH // 2 :].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(mean.item())
        if step + 1 < steps:
            report({"loss": losses[-1]}, None)
    weights, state = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": state, "step": steps}, checkpoint_id=folder)  # each worker its shards
    report({"loss": losses[-1]} if losses else {}, folder)
    return losses


def load_checkpoint(model: Transformer, optimizer: Muon, folder: str) -> int:
    """Returns how many steps were made. Any number of workers can load it."""
    weights, state = get_state_dict(model, optimizer)
    stored: dict[str, Any] = {"model": weights, "optimizer": state, "step": 0}
    load(stored, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return int(stored["step"])


def worker(config: dict[str, Any]) -> None:
    """What Ray runs in every process. Ray collects the shards of all workers, and gives them back when it starts
    again.
    """
    from ray.train import Checkpoint, get_checkpoint, report

    def tell(metrics: dict[str, float], folder: str | None) -> None:
        report(metrics, checkpoint=None if folder is None else Checkpoint.from_directory(folder))

    found = get_checkpoint()
    with tempfile.TemporaryDirectory() as folder, nullcontext() if found is None else found.as_directory() as start:
        train(config["steps"], start, folder, tell)


def main(workers: int, steps: int, name: str, storage: str) -> Any:
    import ray.train
    from ray.train.torch import TorchTrainer

    trainer = TorchTrainer(
        worker,
        train_loop_config={"steps": steps},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(name=name, storage_path=storage),
    )
    return trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--name", default="meshmuon", help="of the run: its folder in the storage")
    parser.add_argument("--storage", default=str(Path.home() / "ray_results"), help="folder that all workers share")
    print(main(**vars(parser.parse_args())).metrics)
