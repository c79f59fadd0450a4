"""The models whose matrices the optimizers step."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["MODELS", "QUICK_MODELS", "Model", "gpt_matrices"]

Shape = tuple[int, ...]


def gpt_matrices(layers: int, width: int) -> list[tuple[int, int]]:
    per_layer = [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]
    return per_layer * layers


@dataclass(frozen=True, slots=True)
class Model:
    """Weights that Muon steps.

    Attributes:
        name: of the model.
        about: what was taken of it.
        shapes: of the parameters; three dims are a stack of experts, four a convolution filter.
        count: matrices of the whole model, for the host time.
        costly: whether a step takes seconds; then only the contenders that may be the fastest take part.
    """

    name: str
    about: str
    shapes: tuple[Shape, ...]
    count: int
    costly: bool = False

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of each matrix, for contenders that take nothing but matrices."""
        matrices: list[tuple[int, int]] = []
        for shape in self.shapes:
            experts, matrix = (shape[0], shape[1:]) if len(shape) == 3 else (1, shape)
            matrices += [(matrix[0], math.prod(matrix[1:]))] * experts
        return matrices


def _vit(width: int, stem: tuple[int, ...], blocks: int) -> tuple[Shape, ...]:
    channels = (3, *stem)
    convolutions = [(after, before, 3, 3) for before, after in zip(channels, stem, strict=False)]
    return (*convolutions, (width, stem[-1], 4, 4), *gpt_matrices(blocks, width))


MODELS = (
    Model("GPT-2 small", "1 of 12 layers, width 768", tuple(gpt_matrices(1, 768)), 72),
    Model(
        "Llama-like 1B",
        "q, k, v, o and one of three MLP matrices of one of 16 layers, width 2048",
        ((2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048)),
        112,
        costly=True,
    ),
    Model("MoE", "64 experts of 512×256 in one parameter", ((64, 512, 256),), 64),
    Model("ViT", "convolution stem, patches of 4×4, 3 of 12 blocks, width 384", _vit(384, (64, 128, 256), 3), 76),
)

QUICK_MODELS = (
    Model("GPT", "1 layer, width 64", tuple(gpt_matrices(1, 64)), 12),
    Model("MoE", "6 experts of 32×16 in one parameter", ((6, 32, 16),), 6),
    Model("ViT", "convolution stem, 1 block, width 48", _vit(48, (8, 16), 1), 9),
)
