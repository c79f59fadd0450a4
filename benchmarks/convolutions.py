"""Convolutions at the defaults: a small ResNet and a small ConvNeXt with ``Muon(model, lr=4e-3)`` beside AdamW's best
lr.

The images are like CIFAR's, 32 × 32 in colour: letters in the fonts that come with matplotlib, turned, scaled and
moved, on backgrounds of random colours, in noise. Validation is on fonts that training does not see.

    python benchmarks/convolutions.py
    python benchmarks/convolutions.py --tasks ResNet --seeds 0
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING

import common  # first: it sets what torch reads when it starts
import matplotlib
import torch
from common import Goal, Report
from first_experiment import KEYS, README_LR, Row, cell, curve, gain, trained
from PIL import Image, ImageDraw, ImageFont
from small_tasks import Batch, Residual, Task, generator_of
from torch import Tensor, nn
from torch.nn import functional as F
from tuning import LINES, TITLES, draw_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LRS = {"adamw": (1e-3, 2e-3, 4e-3, 8e-3), "muon": (README_LR,)}
LETTERS = "ABCDEFGHIJ"
IMAGE, GLYPH = 32, 48
FONTS = "DejaVuS*[!y].ttf STIXGeneral*.ttf cm[bstr]*10.ttf"


class Mixer(nn.Module):
    """A block of ConvNeXt: a depthwise 7 × 7 convolution and an MLP of 1 × 1 convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.GroupNorm(1, width)
        self.up, self.down = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.down(F.gelu(self.up(self.norm(self.depthwise(x)))))
        return x + mixed


class Classifier(nn.Module):
    """Three stages of blocks, each at half the resolution of the one before; called with a batch, for its loss."""

    def __init__(self, width: int, block: type[nn.Module], depth: int, kernel: int) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.stem = nn.Conv2d(3, width, kernel, stride=2, padding=(kernel - 1) // 2)
        self.stages = nn.ModuleList(nn.Sequential(*(block(size) for _ in range(depth))) for size in widths)
        down = [nn.Conv2d(*sizes, kernel, stride=2, padding=(kernel - 1) // 2) for sizes in pairwise(widths)]
        self.down = nn.ModuleList([*down, nn.Identity()])
        self.norm, self.head = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], len(LETTERS))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for stage, down in zip(self.stages, self.down, strict=True):
            x = down(stage(x))
        return F.cross_entropy(self.head(self.norm(x.mean((2, 3)))), labels)


@cache
def letters(validation: bool) -> Tensor:
    """(fonts, letters, 1, GLYPH, GLYPH): every fourth font is for validation."""
    folder, fonts = Path(matplotlib.get_data_path(), "fonts", "ttf"), []
    for place in sorted(path for pattern in FONTS.split() for path in folder.glob(pattern)):
        font, drawn = ImageFont.truetype(str(place), 36), []
        for letter in LETTERS:
            image = Image.new("L", (GLYPH, GLYPH))
            ImageDraw.Draw(image).text((GLYPH / 2, GLYPH / 2), letter, fill=255, font=font, anchor="mm")
            drawn.append(torch.tensor(list(image.tobytes())).view(1, GLYPH, GLYPH) / 255)
        fonts.append(torch.stack(drawn))
    return torch.stack([font for k, font in enumerate(fonts) if (k % 4 == 3) is validation])


def image_batch(step: int, seed: int) -> Batch:
    """Letters in random fonts, places and colours; step −1 is for validation."""
    generator, count, drawn = generator_of(step, seed), 64 if step >= 0 else 1024, letters(step < 0)
    labels, fonts = (torch.randint(size, (count,), generator=generator) for size in (drawn.shape[1], len(drawn)))
    turn, zoom, *shift = torch.empty(4, count).uniform_(-1, 1, generator=generator)
    angle, scale = 0.2 * turn, 0.85 + 0.15 * zoom
    rows = [
        scale * angle.cos(),
        -scale * angle.sin(),
        0.15 * shift[0],
        scale * angle.sin(),
        scale * angle.cos(),
        0.15 * shift[1],
    ]
    grid = F.affine_grid(torch.stack(rows, 1).view(count, 2, 3), [count, 1, IMAGE, IMAGE], align_corners=False)
    mask = F.grid_sample(drawn[fonts, labels], grid, align_corners=False)
    ink, paper = (
        F.interpolate(colours, (IMAGE, IMAGE), mode="bilinear")
        for colours in torch.rand(2, count, 3, 2, 2, generator=generator)
    )
    noise = 0.1 * torch.randn(count, 3, IMAGE, IMAGE, generator=generator)
    return 4 * (mask * (0.5 + 0.5 * ink) + (1 - mask) * 0.7 * paper + noise - 0.5), labels


TASKS = {
    "ResNet": Task("letters in colour", lambda width: Classifier(width, Residual, 1, 3), image_batch, 16, 200, True),
    "ConvNeXt": Task("letters in colour", lambda width: Classifier(width, Mixer, 1, 2), image_batch, 16, 200, True),
}


def measure(options: argparse.Namespace, report: Report) -> list[Row]:
    runs = [
        (task, name, lr, seed) for task, name, seed in product(options.tasks, LRS, options.seeds) for lr in LRS[name]
    ]
    tasks = {name: replace(task, steps=2, width=8) if options.quick else task for name, task in TASKS.items()}
    each = report.each(runs, "{0[0]}, {0[1]}, lr {0[2]}, seed {0[3]}".format)
    return [dict(zip(KEYS, run, strict=True)) | {"loss": trained(tasks[run[0]], *run[1:])["loss"]} for run in each]


def show(rows: list[Row], report: Report) -> None:
    lines = []
    for task, name in product(dict.fromkeys(row["task"] for row in rows), TITLES):
        losses = curve(rows, task, name)
        spread = max((max(seeds) - min(seeds) for seeds in losses.values()), default=0.0)
        lines.append((task, TITLES[name], *(cell(losses, lr, lr in LRS[name]) for lr in LRS["adamw"]), f"{spread:.4f}"))
    columns = ("task", "optimizer", *(f"lr {lr:g}" for lr in LRS["adamw"]), "seeds differ by ≤")
    report.table("validation loss after the last step, mean over seeds; * the best", columns, lines)


def goals(rows: list[Row], options: argparse.Namespace) -> list[Goal]:
    text = f"AdamW's loss at its best lr minus that of Muon(model, lr={README_LR:g})"
    return [Goal(f"{task}: {text}", gain(rows, task, README_LR, None), least=0.0) for task in options.tasks]


def plot(rows: list[Row], figure: Figure) -> None:
    tasks: Sequence[str] = list(dict.fromkeys(row["task"] for row in rows))
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False).flat, tasks, strict=True):
        draw_lines(axes, [(TITLES[name], LINES[name], curve(rows, task, name)) for name in TITLES])
        axes.set_title(f"{task}: {TASKS[task].about}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", choices=TASKS, nargs="+", default=list(TASKS), help="models (default: both)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (default 0 1 2)")


BENCHMARK = common.Benchmark("convolutions", __doc__, measure, show, goals, plot, (9.0, 4.0), add_options=add_options)

if __name__ == "__main__":
    BENCHMARK.main()
