"""Which matrices a parameter holds: itself, one per expert, a flattened convolution filter, or the parts of a fused
weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from .errors import ConfigError, shown

Conv: TypeAlias = Literal["flatten", "adamw"]
CONV_OPTIONS = (None, *get_args(Conv))
DIMS = ("out_in", "in_out")


@dataclass(frozen=True, slots=True, repr=False)
class StridedRange:
    """Indices of a tensor dim: ``count`` blocks of ``size`` consecutive indices, one every ``period``.

    ``StridedRange(12, 12)`` are rows 12 to 23 of a fused (36, D) weight, ``StridedRange(1, 2, 3, 5)`` rows 1, 2, 6, 7,
    11, 12. An index of the dim is counted from the dim's beginning, a position from the first index of the range.
    """

    start: int  # the first index
    size: int  # indices of a block
    count: int = 1  # number of blocks
    period: int = 0  # from the beginning of a block to that of the next; 0 if there is one block

    def __repr__(self) -> str:
        first = f"({self.start}, {self.start + self.size})"
        return first if self.count == 1 else f"{first} every {self.period}, {self.count} times"

    @property
    def length(self) -> int:
        return self.size * self.count

    @property
    def stop(self) -> int:
        """The index after the last one."""
        return self.start + (self.count - 1) * self.period + self.size

    def before(self, index: int) -> int:
        """Number of its indices below ``index``: the position of ``index``, if it is one of them."""
        if self.count == 1:
            return min(max(index - self.start, 0), self.size)
        block, within = divmod(index - self.start, self.period)
        return 0 if block < 0 else min(block * self.size + min(within, self.size), self.length)

    def between(self, start: int, stop: int) -> tuple[StridedRange, ...]:
        """Its indices in [start, stop): the end of a block, whole blocks and the beginning of a block, or fewer
        ranges.
        """
        first, last = self.before(start), self.before(stop)
        if first == last:
            return ()
        head_stop = min(last, -(-first // self.size) * self.size)
        tail_start = max(head_stop, last // self.size * self.size)
        edges = (first, head_stop, tail_start, last)
        return tuple(self._at_positions(begin, end) for begin, end in pairwise(edges) if begin < end)

    def _at_positions(self, begin: int, end: int) -> StridedRange:
        """The indices at positions [begin, end), which are whole blocks or inside one."""
        block, within = divmod(begin, self.size)
        index, length = self.start + block * self.period + within, end - begin
        return (
            StridedRange(index, length)
            if length <= self.size
            else replace(self, start=index, count=length // self.size)
        )

    def moved(self, by: int) -> StridedRange:
        return replace(self, start=self.start + by)

    def joined(self, following: StridedRange) -> StridedRange | None:
        """Both as one range; None if they do not continue each other regularly."""
        if self.count == following.count == 1 and self.stop == following.start:
            return StridedRange(self.start, self.size + following.size)
        gap = following.start - (self.stop - self.size)
        if self.size != following.size or any(part.count > 1 and part.period != gap for part in (self, following)):
            return None
        return StridedRange(self.start, self.size, self.count + following.count, gap)


Window: TypeAlias = tuple[StridedRange, StridedRange]
"""Rows and columns: (StridedRange(12, 12), StridedRange(0, 64)) is the second third of a fused (36, 64) weight."""


@dataclass(frozen=True, slots=True)
class Interleaved:
    """A ``split`` of an output dim whose parts are interleaved: ``repeats`` copies of a pattern of blocks follow each
    other.

    Part *i* is block *i* of every copy, in the order in which they occur: a matrix of ``sizes[i] * repeats`` outputs.

    ========================================================  =====================================================
    weight                                                    split
    ========================================================  =====================================================
    gate and up alternate (gpt-oss)                           ``Interleaved((1, 1), ff)``
    query, key and value of each head (gpt-neox, bloom)       ``Interleaved((head_dim, head_dim, head_dim), heads)``
    queries, key and value of each group of heads (falcon)    ``Interleaved((queries * dim, dim, dim), groups)``
    ========================================================  =====================================================

    Attributes:
        sizes: the sizes of the blocks of one copy, in order.
        repeats: how many copies follow each other, such as the number of heads.
    """

    sizes: tuple[int, ...]
    repeats: int

    def __post_init__(self) -> None:
        sizes = tuple(self.sizes) if isinstance(self.sizes, (tuple, list)) else ()
        if not sizes or not all(map(_is_count, sizes)) or not _is_count(self.repeats):
            raise ConfigError(
                f"Interleaved(sizes={shown(self.sizes)}, repeats={shown(self.repeats)}) must have positive whole "
                "numbers: the sizes of the blocks of one copy, and how many copies follow each other, such as "
                "Interleaved((64, 64, 64), 12) for query, key and value of 12 heads."
            )
        object.__setattr__(self, "sizes", sizes)

    @property
    def outputs(self) -> int:
        """The size of the output dim that it divides."""
        return sum(self.sizes) * self.repeats


Split: TypeAlias = (
    "int | Sequence[int] | Interleaved | Callable[[str, tuple[int, ...]], int | Sequence[int] | Interleaved | None]"
)
"""Sizes of the parts of the output dim, the size of equal parts, interleaved parts, or a function of name and shape."""


@dataclass(frozen=True, slots=True)
class MatrixSet:
    """``count`` matrices of rows × cols inside one parameter.

    A (96, 64) weight is one matrix. Experts (8, 96, 64) are ``MatrixSet(8, 96, 64, stack_dims=1)``. A (32, 3, 5, 5)
    filter with ``conv="flatten"`` is ``MatrixSet(1, 32, 75)``. Each part of a fused weight is a separate set, with a
    ``window``.
    """

    count: int
    rows: int
    cols: int
    # leading dims of the parameter that count matrices; the next dim is the rows, all others are the columns
    stack_dims: int = 0
    window: Window | None = None  # which rows and columns of the parameter they are; None for all of them
    flipped: bool = False  # rows are inputs and columns are outputs; learning-rate rules and update rules need to know

    @property
    def lr_shape(self) -> tuple[int, int]:
        """Outputs and inputs: what learning-rate rules call rows and columns."""
        return (self.cols, self.rows) if self.flipped else (self.rows, self.cols)

    def rule_state_shape(self, shape: Sequence[int], *, per_input: bool = False) -> tuple[int, ...]:
        """Shape of a rule's state, one number per output of each matrix, for a parameter of ``shape``: all other dims
        are 1.

        (96, 64) gives (96, 1), or (1, 64) if there is one number ``per_input``; experts (8, 96, 64) give (8, 96, 1), or
        (8, 1, 64) if they are ``flipped``.
        """
        rows, along_cols = self.stack_dims, self.flipped != per_input
        return tuple(size if dim < rows or (dim > rows) == along_cols else 1 for dim, size in enumerate(shape))

    def rule_state_window(self, shape: Sequence[int]) -> Window | None:
        """Which part of rule state of this ``shape`` belongs to these matrices."""
        if self.window is None:
            return None
        only, sizes = StridedRange(0, 1), shape[self.stack_dims : self.stack_dims + 2]
        rows, cols = (only if size == 1 else part for size, part in zip(sizes, self.window, strict=True))
        return rows, cols


@dataclass(frozen=True, slots=True)
class ParamMatrices:
    """Which matrices one parameter holds: an entry of the option ``matrices``."""

    # True: the first of three dims counts matrices; a number: the blocks of rows of a 2-D weight
    experts: bool | int = False
    dims: str = "out_in"  # ``"in_out"``: rows are inputs and columns are outputs
    split: Split | None = None  # parts of the outputs, as in the option ``split``
    flatten: bool = False  # all dims after the first are one

    def fields(self) -> dict[str, Any]:
        """The entry as a mapping, as the option has it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class MatrixOptions:
    """The options that say which matrices a parameter holds."""

    expert_keys: tuple[str, ...] = ()  # what marks a 3-D parameter as a stack of independent expert matrices
    conv: str | None = None  # ``"flatten"`` makes any other parameter of more than two dims one (out, in·kernel) matrix
    split: Split | None = None  # how fused weights are cut along their output dim
    matrices: Mapping[str, ParamMatrices] = field(default_factory=dict)  # by name; ``*`` stands for a number in a name

    def of_param(self, name: str) -> ParamMatrices:
        """The entry of a parameter, or one that says nothing."""
        return entry_of(self.matrices, name) or ONE_MATRIX


ONE_MATRIX = ParamMatrices()
"""The entry of a parameter that is one (out, in) matrix: nothing differs from the options of its group."""


WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"})
"""What wrappers insert into the names of parameters: torch.compile, activation checkpointing, FSDP, DDP."""

_T = TypeVar("_T")


def without_wrappers(name: str) -> str:
    """The name without what wrappers insert: the same for a compiled and an uncompiled model, so that checkpoints
    fit both.
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def with_stars(name: str) -> str:
    """The name with ``*`` for each component that is a number: ``layers.3.up.weight`` is ``layers.*.up.weight``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def keys_of(name: str) -> tuple[str, ...]:
    """The keys under which something may be said about a parameter; the first one that is there counts."""
    plain = without_wrappers(name)
    return name, plain, with_stars(plain)


def entry_of(entries: Mapping[str, _T], name: str) -> _T | None:
    """The entry for a parameter: of its name, of its name without wrappers, or of the latter with ``*`` for numbers."""
    return next((entries[key] for key in keys_of(name) if key in entries), None)


def check_matrices(matrices: Any) -> dict[str, ParamMatrices]:
    """The option ``matrices``, checked: a mapping from names to mappings with the fields of ``ParamMatrices``."""
    example = '{"layers.*.mlp.experts.gate_up_proj": {"experts": True, "dims": "in_out", "split": (512, 512)}}'
    if matrices is None:
        return {}
    if not isinstance(matrices, Mapping) or not all(isinstance(name, str) for name in matrices):
        raise ConfigError(f"matrices={shown(matrices)} must be a mapping from names of parameters, such as {example}.")
    checked = {}
    for name, entry in matrices.items():
        if not isinstance(entry, Mapping) or not set(entry) <= set(ParamMatrices.__slots__):
            fields = ", ".join(ParamMatrices.__slots__)
            raise ConfigError(
                f"matrices[{name!r}]={shown(entry)} must be a mapping with some of {fields}, such as {example}."
            )
        checked[name] = found = ParamMatrices(**entry)
        is_experts = isinstance(found.experts, bool) or _is_count(found.experts)
        for field_name, valid, expected in (
            ("experts", is_experts, "must be True, False or a number of blocks of rows"),
            ("flatten", isinstance(found.flatten, bool), "must be True or False"),
            ("dims", isinstance(found.dims, str) and found.dims in DIMS, f"is unknown; write one of {DIMS}"),
        ):
            if not valid:
                raise ConfigError(f"matrices[{name!r}]: {field_name}={shown(getattr(found, field_name))} {expected}.")
        if callable(found.split):
            raise ConfigError(
                f"matrices[{name!r}]: split must be plain sizes; a function of names belongs into the option split."
            )
        check_matrix_options(MatrixOptions(split=found.split))
    return checked


def check_expert_keys(keys: Sequence[str] | None) -> tuple[str, ...]:
    """``expert_keys`` as a tuple; a single string would be read letter by letter and is refused."""
    is_list = isinstance(keys, (Sequence, Set)) and not isinstance(keys, (str, bytes))
    checked = () if keys is None else tuple(keys) if is_list else None
    if checked is None or not all(isinstance(key, str) and key for key in checked):
        example = [keys] if isinstance(keys, str) else ["experts"]
        raise ConfigError(f"expert_keys={shown(keys)} must be a list of parts of names, such as {example!r}.")
    return checked


def check_matrix_options(options: MatrixOptions) -> None:
    """Refuses unknown values, and splits that no parameter can have."""
    if not isinstance(options.conv, str | None) or options.conv not in CONV_OPTIONS:
        raise ConfigError(f"conv={shown(options.conv)} is unknown; write one of {CONV_OPTIONS}.")
    if options.split is not None and not callable(options.split) and _interleaved(options.split) is None:
        _sizes("split", options.split, None)


def find_matrices(name: str, shape: Sequence[int], options: MatrixOptions) -> tuple[MatrixSet, ...]:
    """Finds the matrices of a parameter that goes to Muon: one set, or one per part of a fused weight.

    Args:
        name: the parameter's name; an expert parameter contains one of ``options.expert_keys``.
        shape: the parameter's global shape: (rows, cols), (experts, rows, cols) or (out, in, *kernel).
        options: the options of its param group.
    """
    known = options.of_param(name)
    whole = _before_split(name, shape, options, known)
    split = options.split
    if callable(split):
        try:
            split = split(name, tuple(shape))
        except Exception as error:
            raise ConfigError(f"split({name!r}, {tuple(shape)}) failed with {type(error).__name__}: {error}") from error
    split = known.split if split is None else split
    rows, cols = StridedRange(0, whole.rows), StridedRange(0, whole.cols)
    windows: list[Window]
    if not isinstance(known.experts, bool) and len(shape) == 2:  # one below the other, as megablocks stores them
        count = known.experts
        if split is not None or whole.rows % count:
            wrong = "cannot be split as well" if split is not None else f"do not divide its {whole.rows} rows"
            raise ConfigError(
                f"{name}: {count} blocks of rows {wrong}: correct experts={count} of its entry in matrices."
            )
        size = whole.rows // count
        windows = [(StridedRange(k * size, size), cols) for k in range(count)]
    elif split is None:
        return (whole,)
    else:
        parts = _parts(name, split, whole.lr_shape[0])
        windows = [(rows, part) if whole.flipped else (part, cols) for part in parts]
    return tuple(replace(whole, rows=window[0].length, cols=window[1].length, window=window) for window in windows)


def _before_split(name: str, shape: Sequence[int], options: MatrixOptions, known: ParamMatrices) -> MatrixSet:
    """The matrices of a parameter as if there were no ``split``; ``known`` is its entry in ``options.matrices``."""
    flipped = known.dims == "in_out"
    if len(shape) == 2:
        return MatrixSet(1, shape[0], shape[1], flipped=flipped)
    if len(shape) < 2:
        raise ConfigError(
            f"{name}: shape {tuple(shape)} has no rows and columns, so Muon cannot orthogonalise it. If it is a bias, "
            "a norm or the like, put it into a group with use_muon=False; get_default_muon_param_groups(model) does "
            "so. If it holds matrices that a wrapper has flattened (FSDP1, DeepSpeed ZeRO, fairscale), shard the "
            "model with FSDP2 instead (torch.distributed.fsdp.fully_shard), which keeps every matrix as it is."
        )
    if len(shape) == 3 and (known.experts or any(key in name for key in options.expert_keys)):
        return MatrixSet(shape[0], shape[1], shape[2], stack_dims=1, flipped=flipped)
    if known.flatten or options.conv == "flatten":
        return MatrixSet(1, shape[0], math.prod(shape[1:]), flipped=flipped)
    raise ConfigError(
        f"{name}: shape {tuple(shape)} has more than two dims. If it is a stack of expert matrices (experts, out, in), "
        f"pass expert_keys=[...] with a part of its name (now {list(options.expert_keys)}). If it is a convolution "
        "filter, pass "
        'conv="flatten" to treat it as one (out, in·kernel) matrix, or put it into a group with use_muon=False.'
    )


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _parts(name: str, split: Any, outputs: int) -> list[StridedRange]:
    """Which outputs belong to each part; ``outputs`` is how many there are."""
    interleaved = _interleaved(split)
    if interleaved is None:
        edges = accumulate(_sizes(name, split, outputs), initial=0)
        return [StridedRange(start, stop - start) for start, stop in pairwise(edges)]
    sizes, repeats, period = interleaved.sizes, interleaved.repeats, sum(interleaved.sizes)
    if period * repeats != outputs:
        fix = "Give sizes that divide it into whole copies."
        if outputs % period == 0 and outputs:
            fix = f"Write Interleaved({sizes}, {outputs // period})."
        raise ConfigError(
            f"{name}: split=Interleaved({sizes}, {repeats}) is for {repeats} times {period} outputs, "
            f"{period * repeats} in all, but it has {outputs} outputs. {fix}"
        )
    if len(sizes) == 1 or repeats == 1:  # consecutive outputs
        return _parts(name, tuple(size * repeats for size in sizes), outputs)
    starts = accumulate(sizes[:-1], initial=0)
    return [StridedRange(start, size, repeats, period) for start, size in zip(starts, sizes, strict=True)]


def part_sizes(split: Any, outputs: int) -> tuple[int, ...]:
    """How many outputs each part of a weight has; empty if it is not split. ``split`` is plain sizes, no function."""
    return () if split is None else tuple(part.length for part in _parts("split", split, outputs))


def _interleaved(split: Any) -> Interleaved | None:
    """An ``Interleaved``, or the pair of its sizes and repeats as which param groups keep it; None for anything
    else.
    """
    if isinstance(split, (tuple, list)) and len(split) == 2 and isinstance(split[0], (tuple, list)):
        return Interleaved(split[0], split[1])  # type: ignore[arg-type]
    return split if isinstance(split, Interleaved) else None


def _sizes(name: str, split: Any, outputs: int | None) -> tuple[int, ...]:
    """The sizes of the parts, checked; ``outputs`` is what they must add up to, where it is known."""
    if isinstance(split, int) and _is_count(split):
        if outputs is None:
            return (split,)
        if outputs % split:
            raise ConfigError(
                f"{name}: split={split}, but {outputs} outputs do not divide into such parts: give the sizes of the "
                "parts."
            )
        return (split,) * (outputs // split)
    sizes = tuple(split) if isinstance(split, (tuple, list)) else ()
    if not sizes or not all(map(_is_count, sizes)):
        raise ConfigError(
            f"{name}: split={shown(split)} must be sizes of parts such as (1024, 256, 256), the size of equal parts "
            "such as 128, Interleaved((64, 64, 64), 12) for interleaved parts, or a function of name and shape that "
            "returns one of these or None."
        )
    if outputs is not None and sum(sizes) != outputs:
        raise ConfigError(f"{name}: split={sizes} adds up to {sum(sizes)}, but it has {outputs} outputs.")
    return sizes
