"""Six small tasks, each a model and data that any Python installation has or that are generated: seconds a run on
one core.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import common  # first: it sets what torch reads when it starts
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(common.ROOT / "examples"))

import train_moe
from demo.data import Corpus, TrainBatches, default_source_root, load_corpus, valid_batches
from demo.model import ModelConfig, build_model

__all__ = ["TASKS", "Task"]

Batch = tuple[Tensor, ...]
LENGTH, ROWS = 64, 32  # bytes of a sequence, sequences of a batch
MASK = 256  # the token after the bytes
CLASSES, IMAGE, PATTERN, PATCH = 16, 24, 12, 4


def layers(width: int, decoder: bool = False) -> nn.Module:
    """Two layers of torch's own transformer, pre-norm, without dropout, with torch's initial weights."""
    kind: Any = nn.TransformerDecoderLayer if decoder else nn.TransformerEncoderLayer
    layer = kind(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    if decoder:
        return nn.TransformerDecoder(layer, 2, nn.LayerNorm(width))
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)


class MaskedLanguageModel(nn.Module):
    """As BERT: the bytes behind masks, from both sides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(MASK + 1, width), nn.Embedding(LENGTH, width)
        self.encoder, self.head = layers(width), nn.Linear(width, MASK)

    def forward(self, masked: Tensor, text: Tensor) -> Tensor:
        hidden = self.head(self.encoder(self.tokens(masked) + self.positions.weight))
        return F.cross_entropy(hidden[masked == MASK], text[masked == MASK])


class Seq2Seq(nn.Module):
    """As a translator: an encoder reads text of which a part is missing, a decoder writes it complete."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(MASK + 1, width), nn.Embedding(LENGTH, width)
        self.encoder, self.decoder, self.head = layers(width), layers(width, decoder=True), nn.Linear(width, MASK)

    def forward(self, source: Tensor, text: Tensor) -> Tensor:
        memory = self.encoder(self.tokens(source) + self.positions.weight[: source.shape[1]])
        begun = F.pad(text[:, :-1], (1, 0), value=MASK)
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        hidden = self.decoder(self.tokens(begun) + self.positions.weight, memory, tgt_mask=future)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), text.flatten())


class ViT(nn.Module):
    """Patches, layers, and the mean over the patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((IMAGE // PATCH) ** 2, width))
        self.encoder, self.head = layers(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        hidden = self.encoder(self.patches(images).flatten(2).mT + self.positions)
        return F.cross_entropy(self.head(hidden.mean(1)), labels)


class Residual(nn.Module):
    """Two 3 × 3 convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return x + added


class ConvNet(nn.Module):
    """Two residual blocks, the second one at half the resolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.stem = nn.Conv2d(1, width, 4, stride=2, padding=1)
        self.body = nn.Sequential(Residual(width), down, Residual(2 * width), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.stem(images))), labels)


class LanguageModel(nn.Module):
    """The demo's model, called as the others are: with a batch, for its loss."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(tokens, targets)  # type: ignore[no-any-return]


@cache
def corpus() -> Corpus:
    return load_corpus(default_source_root(), 0.1)


def text_batch(step: int, seed: int) -> Batch:
    """Bytes of Python's standard library and those that follow them; step −1 is for validation."""
    if step >= 0:
        return TrainBatches(corpus().train, LENGTH, ROWS, seed).batch(step)
    return next(valid_batches(corpus().valid, LENGTH, 256, 256))


def generator_of(step: int, seed: int) -> torch.Generator:
    """Random numbers of one batch; those of the validation do not depend on the seed."""
    return torch.Generator().manual_seed(1_000_000 * seed + step + 1 if step >= 0 else 10**9)


def masked_batch(step: int, seed: int) -> Batch:
    """A fifth of the bytes is masked."""
    text, _ = text_batch(step, seed)
    hidden = torch.rand(text.shape, generator=generator_of(step, seed)) < 0.2
    return text.masked_fill(hidden, MASK), text


def gapped_batch(step: int, seed: int) -> Batch:
    """A quarter of the bytes is missing; what is left moves together."""
    text, _ = text_batch(step, seed)
    kept = torch.rand(text.shape, generator=generator_of(step, seed)).topk(LENGTH * 3 // 4).indices.sort().values
    return text.gather(1, kept), text


@cache
def patterns() -> Tensor:
    """Two smooth random patterns for each class."""
    rough = torch.randn(2 * CLASSES, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    return F.interpolate(rough, (PATTERN, PATTERN), mode="bicubic").view(CLASSES, 2, PATTERN, PATTERN)


def image_batch(step: int, seed: int, strength: float = 1.0) -> Batch:
    """A pattern of a random class somewhere in noise."""
    generator, count = generator_of(step, seed), 64 if step >= 0 else 1024
    labels, which = (
        torch.randint(CLASSES, (count,), generator=generator),
        torch.randint(2, (count,), generator=generator),
    )
    corners = torch.randint(IMAGE - PATTERN + 1, (2, count, 1, 1), generator=generator)
    rows, cols = (
        corner + torch.arange(PATTERN).view(shape) for corner, shape in zip(corners, ((-1, 1), (1, -1)), strict=True)
    )
    images = torch.randn(count, IMAGE, IMAGE, generator=generator)
    images[torch.arange(count)[:, None, None], rows, cols] += strength * patterns()[labels, which]
    return images[:, None], labels


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, on what, and how.

    Attributes:
        about: one line for the table.
        build: the model of a width, which returns the loss of a batch.
        batch: the data of a step and a seed.
        width: of the model.
        steps: of a run.
        decayed: warm-up over a tenth of the steps, linear decay to zero and gradients clipped to norm 1; else a
        constant lr. betas: AdamW's. muon: further options of Muon.
    """

    about: str
    build: Callable[[int], nn.Module]
    batch: Callable[[int, int], Batch]
    width: int
    steps: int
    decayed: bool
    betas: tuple[float, float] = (0.9, 0.999)
    muon: Mapping[str, Any] = field(default_factory=dict)


def demo_config(width: int, d_ff: int) -> ModelConfig:
    return ModelConfig(d_model=width, n_layers=3, n_heads=2, d_ff=d_ff, seq_len=LENGTH)


def gpt(width: int) -> nn.Module:
    seed = int(torch.randint(10**6, ()))
    return LanguageModel(build_model(demo_config(width, 4 * width), seed, torch.device("cpu")))


def mixture(width: int) -> nn.Module:
    seed = int(torch.randint(10**6, ()))
    return LanguageModel(train_moe.build_model(demo_config(width, width), 4, seed))


TASKS = {
    "GPT": Task("the demo's model", gpt, text_batch, 96, 120, True, (0.9, 0.95)),
    "MoE": Task(
        "the same with 4 experts", mixture, text_batch, 96, 120, True, (0.9, 0.95), {"expert_keys": ("experts",)}
    ),
    "ViT": Task("strong patterns in noise", ViT, partial(image_batch, strength=2.0), 64, 300, True),
    "ConvNet": Task("patterns in noise", ConvNet, image_batch, 24, 300, False, muon={"conv": "flatten"}),
    "BERT": Task("masked bytes", MaskedLanguageModel, masked_batch, 96, 200, False),
    "seq2seq": Task("bytes with gaps", Seq2Seq, gapped_batch, 64, 160, False),
}
