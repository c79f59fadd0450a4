"""Which matrices a parameter holds: itself, one per expert, a flattened convolution filter, or the parts of a fused weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from .errors import ConfigError

CONV_OPTIONS = (None, "flatten")
EXPERT_DIMS = ("out_in", "in_out")

Window: TypeAlias = tuple[tuple[int, int], tuple[int, int]]
"""Half-open ranges of rows and of columns: ((12, 24), (0, 64)) is the second third of a fused (36, 64) weight."""

Split: TypeAlias = "int | Sequence[int] | Callable[[str, tuple[int, ...]], int | Sequence[int] | None]"
"""Sizes of the parts of the output dim, the size of equal parts, or a function of name and shape that gives one of these."""


@dataclass(frozen=True, slots=True)
class MatrixSet:
    """``count`` matrices of rows × cols inside one parameter.

    A (96, 64) weight is one matrix. Experts (8, 96, 64) are ``MatrixSet(8, 96, 64, stack_dims=1)``. A (32, 3, 5, 5) filter with
    ``conv="flatten"`` is ``MatrixSet(1, 32, 75)``. Each part of a fused weight is a set of its own, with a ``window``.
    """

    count: int
    rows: int
    cols: int
    stack_dims: int = 0  # leading dims of the parameter that count matrices; the next dim is the rows, all others are the columns
    window: Window | None = None  # which rows and columns of the parameter they are; None for all of them
    flipped: bool = False  # rows are inputs and columns are outputs; learning-rate rules and update rules need to know

    @property
    def lr_shape(self) -> tuple[int, int]:
        """Outputs and inputs: what learning-rate rules call rows and columns."""
        return (self.cols, self.rows) if self.flipped else (self.rows, self.cols)

    def rule_state_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of a rule's state, one number per output of each matrix, for a parameter of ``shape``: all other dims are 1.

        (96, 64) gives (96, 1); experts (8, 96, 64) give (8, 96, 1), or (8, 1, 64) if they are ``flipped``.
        """
        outputs = self.stack_dims + (1 if self.flipped else 0)
        return tuple(size if dim < self.stack_dims or dim == outputs else 1 for dim, size in enumerate(shape))

    @property
    def rule_state_window(self) -> Window | None:
        """Which part of the rule's state belongs to these matrices."""
        if self.window is None:
            return None
        rows, cols = self.window
        return ((0, 1), cols) if self.flipped else (rows, (0, 1))


@dataclass(frozen=True, slots=True)
class MatrixOptions:
    """The options that say which matrices a parameter holds."""

    expert_keys: tuple[str, ...] = ()  # what marks a 3-D parameter as a stack of independent expert matrices
    conv: str | None = None  # ``"flatten"`` makes any other parameter of more than two dims one (out, in·kernel) matrix
    split: Split | None = None  # how fused weights are cut along their output dim
    expert_dims: str = "out_in"  # ``"out_in"`` for experts of shape (experts, out, in), ``"in_out"`` for (experts, in, out)


def check_expert_keys(keys: Sequence[str] | None) -> tuple[str, ...]:
    """``expert_keys`` as a tuple; a single string would be read letter by letter and is refused."""
    is_list = isinstance(keys, (Sequence, Set)) and not isinstance(keys, (str, bytes))
    checked = () if keys is None else tuple(keys) if is_list else None
    if checked is None or not all(isinstance(key, str) and key for key in checked):
        example = [keys] if isinstance(keys, str) else ["experts"]
        raise ConfigError(f"expert_keys={keys!r} must be a list of parts of names, such as {example!r}.")
    return checked


def check_matrix_options(options: MatrixOptions) -> None:
    """Refuses unknown values, and splits that no parameter can have."""
    if not isinstance(options.conv, str | None) or options.conv not in CONV_OPTIONS:
        raise ConfigError(f"conv={options.conv!r} is unknown; write one of {CONV_OPTIONS}.")
    if not isinstance(options.expert_dims, str) or options.expert_dims not in EXPERT_DIMS:
        raise ConfigError(f"expert_dims={options.expert_dims!r} is unknown; write one of {EXPERT_DIMS}.")
    if options.split is not None and not callable(options.split):
        _sizes("split", options.split, None)


def find_matrices(name: str, shape: Sequence[int], options: MatrixOptions) -> tuple[MatrixSet, ...]:
    """Finds the matrices of a parameter that goes to Muon: one set, or one per part of a fused weight.

    Args:
        name: the parameter's name; an expert parameter contains one of ``options.expert_keys``.
        shape: the parameter's global shape: (rows, cols), (experts, rows, cols) or (out, in, *kernel).
        options: the options of its param group.
    """
    whole = _before_split(name, shape, options)
    split = _call_split(options.split, name, shape) if callable(options.split) else options.split
    if split is None:
        return (whole,)
    outputs = whole.lr_shape[0]
    edges = list(accumulate(_sizes(name, split, outputs), initial=0))
    parts = []
    for start, stop in pairwise(edges):
        size = stop - start
        if whole.flipped:
            parts.append(MatrixSet(whole.count, whole.rows, size, whole.stack_dims, ((0, whole.rows), (start, stop)), True))
        else:
            parts.append(MatrixSet(whole.count, size, whole.cols, whole.stack_dims, ((start, stop), (0, whole.cols))))
    return tuple(parts)


def _call_split(split: Callable[[str, tuple[int, ...]], int | Sequence[int] | None], name: str, shape: Sequence[int]) -> Any:
    try:
        return split(name, tuple(shape))
    except Exception as error:
        raise ConfigError(f"split({name!r}, {tuple(shape)}) failed with {type(error).__name__}: {error}") from error


def _before_split(name: str, shape: Sequence[int], options: MatrixOptions) -> MatrixSet:
    """The matrices of a parameter as if there were no ``split``."""
    if len(shape) == 2:
        return MatrixSet(1, shape[0], shape[1])
    if len(shape) < 2:
        raise ConfigError(
            f"{name}: shape {tuple(shape)} has no rows and columns, so Muon cannot orthogonalise it. If it is a bias, a norm or "
            "the like, put it into a group with use_muon=False; get_default_muon_param_groups(model) does so. If it holds "
            "matrices that a wrapper has flattened (FSDP1, DeepSpeed ZeRO, fairscale), shard the model with FSDP2 instead "
            "(torch.distributed.fsdp.fully_shard), which keeps every matrix as it is."
        )
    if len(shape) == 3 and any(key in name for key in options.expert_keys):
        return MatrixSet(shape[0], shape[1], shape[2], stack_dims=1, flipped=options.expert_dims == "in_out")
    if options.conv == "flatten":
        return MatrixSet(1, shape[0], math.prod(shape[1:]))
    raise ConfigError(
        f"{name}: shape {tuple(shape)} has more than two dims. If it is a stack of expert matrices (experts, out, in), "
        f"pass expert_keys=[...] with a part of its name (now {list(options.expert_keys)}). If it is a convolution filter, pass "
        'conv="flatten" to treat it as one (out, in·kernel) matrix, or put it into a group with use_muon=False.'
    )


def _sizes(name: str, split: int | Sequence[int], outputs: int | None) -> tuple[int, ...]:
    """The sizes of the parts, checked; ``outputs`` is what they must add up to, where it is known."""
    if isinstance(split, int) and not isinstance(split, bool) and split > 0:
        if outputs is None:
            return (split,)
        if outputs % split:
            raise ConfigError(
                f"{name}: split={split}, but {outputs} outputs do not divide into such parts: give the sizes of the parts."
            )
        return (split,) * (outputs // split)
    sizes = tuple(split) if isinstance(split, (tuple, list)) else ()
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise ConfigError(
            f"{name}: split={split!r} must be sizes of parts such as (1024, 256, 256), the size of equal parts such as 128, or a "
            "function of name and shape that returns one of these or None."
        )
    if outputs is not None and sum(sizes) != outputs:
        raise ConfigError(f"{name}: split={sizes} adds up to {sum(sizes)}, but it has {outputs} outputs.")
    return sizes
