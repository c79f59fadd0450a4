"""A Lightning script with meshmuon, to copy and change: one process, DDP or FSDP2, on CPU or GPUs.

Start it with: python examples/lightning_fsdp2.py --strategy fsdp2 --devices 2
"""

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

from fsdp2 import LENGTH, VOCABULARY, Transformer
from meshmuon.integrations.lightning import MuonMonitor, muon


class Repeats(lightning.LightningModule):
    def __init__(self, steps: int, sharded: bool) -> None:
        super().__init__()
        self.steps, self.sharded, self.net = steps, sharded, Transformer()

    def configure_model(self) -> None:
        if self.sharded:
            for module in (*self.net.layers, self.net):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, tokens: Tensor) -> Tensor:
        logits = self.net(tokens[:, :-1])[:, -LENGTH // 2 :]  # of the second half, which repeats the first
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, LENGTH // 2 :].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = muon(self, lr=3e-3, weight_decay=0.1)
        scheduler = CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(steps: int, strategy: str, devices: int, precision: Any, folder: str, resume: str | None) -> lightning.Trainer:
    lightning.seed_everything(0)
    tokens: Any = torch.randint(VOCABULARY, (16 * steps * devices, LENGTH // 2)).repeat(1, 2)  # one row is one example
    sharding = ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        strategy=sharding if strategy == "fsdp2" else strategy,
        devices=devices,
        precision=precision,
        max_steps=steps,
        gradient_clip_val=1.0,
        log_every_n_steps=max(steps // 10, 1),
        callbacks=[MuonMonitor()],
        default_root_dir=folder,
    )
    trainer.fit(Repeats(steps, strategy == "fsdp2"), DataLoader(tokens, batch_size=16), ckpt_path=resume)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--strategy", choices=["auto", "ddp", "fsdp2"], default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", default="32-true", help='"bf16-mixed", or on GPUs "16-mixed" without fsdp2')
    parser.add_argument("--folder", default="runs/lightning", help="where logs and checkpoints go")
    parser.add_argument("--resume", help="a checkpoint to continue from")
    main(**vars(parser.parse_args()))
