"""Draws the losses of a run of the demo over its steps: ``python examples/plot_losses.py runs/latest/log.json
loss.png``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from demo.figures import drawing
from demo.optimizers import CONTENDERS


def draw(log: Path, image: Path) -> None:
    """Validation loss of each contender in ``log`` over steps, with the training loss behind it."""
    with drawing(image, (7, 3.6), dpi=110) as figure:
        axes = figure.subplots()
        reached: list[float] = []
        for name, run in json.loads(log.read_text(encoding="utf-8"))["runs"].items():
            color = CONTENDERS[name].color
            steps, losses = [point["step"] for point in run["evals"]], [point["loss"] for point in run["evals"]]
            axes.plot(range(1, len(run["train_loss"]) + 1), run["train_loss"], color=color, alpha=0.25, linewidth=0.8)
            axes.plot(
                steps, losses, "o-", color=color, markersize=3, label=f"{CONTENDERS[name].title}: {losses[-1]:.3f}"
            )
            reached += losses[1:]  # the first is that of a uniform guess
        axes.set_ylim(min(reached) - 0.15, max(reached) + 0.15)
        axes.set(
            xlabel="step",
            ylabel="validation loss (nats per byte)",
            title="a small GPT, equal steps (faint: training loss)",
        )
        axes.legend()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path, help="log.json of a run")
    parser.add_argument("image", type=Path, help="where to write the plot")
    options = parser.parse_args()
    draw(options.log, options.image)
