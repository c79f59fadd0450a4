"""Find Muon's learning rate for your own model: replace the training below by yours, from the first line to the last
`yield`.

Start it with: python examples/sweep_lr.py, which is short for: python -m meshmuon sweep sweep_lr:train
It trains with AdamW and with Muon at several learning rates (--help lists the options) and writes a table and a plot.
"""

import sys
from collections.abc import Callable, Generator

import torch

from demo.data import TrainBatches, default_source_root, load_corpus, valid_batches
from demo.model import ModelConfig, build_model
from meshmuon.tools.cli.main import main

STEPS, WARMUP = 100, 10


def train(make_optimizer: Callable[..., torch.optim.Optimizer], seed: int) -> Generator[float, None, float]:
    """A small GPT on Python's standard library. Yields the loss of every step, returns the validation loss."""
    text, config = (
        load_corpus(default_source_root(), 0.1),
        ModelConfig(d_model=64, n_layers=2, n_heads=2, d_ff=256, seq_len=64),
    )
    batches = TrainBatches(text.train, config.seq_len, 32, seed)
    model = build_model(config, seed, torch.device("cpu"))

    # instead of AdamW(model.parameters(), lr=..., ...)
    optimizer = make_optimizer(model, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARMUP, 1 - step / STEPS))
    for step in range(STEPS):
        loss = model.loss(*batches.batch(step))
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        yield loss.item()

    with torch.no_grad():
        losses = [model.loss(*batch) for batch in valid_batches(text.valid, config.seq_len, 64, 256)]
    return torch.stack(losses).mean().item()


if __name__ == "__main__":
    sys.exit(main(["sweep", "sweep_lr:train", *sys.argv[1:]]))
