"""All options of ``Muon``, each declared once.

From this table follow the checks (in the constructor, in added param groups, at every step), the optimizer's
``defaults``, the refusal of optimizer-wide options in a param group, what ranks compare, how a checkpoint is read,
``help(Muon)`` and the tables in docs/optimizer.md (``docs/site/options.py``). To add an option, add a row to its tier
here (and its type to ``ParamGroup``, if it is an option of param groups), a parameter to the signature of ``Muon``, and
the code that uses it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, get_args

import torch
from torch import Tensor

from ..matrices import (
    CONV_OPTIONS,
    ONE_MATRIX,
    Conv,
    Interleaved,
    MatrixOptions,
    Split,
    check_expert_keys,
    check_matrices,
    check_matrix_options,
)
from ..ortho import AUTO, Scheme, SchemeLike, resolve_scheme
from ..plan import REPLICA_OPTIONS, cost_model_from
from .checks import (
    FLOAT_DTYPES,
    Check,
    check_betas,
    check_eps,
    check_flag,
    check_lr,
    check_optional_lr,
    check_replica_group,
    dtype_in,
    in_range,
    of_value,
    one_of,
    whole_number,
)
from .lr import AdjustLR, check_adjust_lr
from .rules import RuleLike, chain_of, check_rule


class Scope(Enum):
    """Where an option may be given, and which param groups use it."""

    ALL_GROUPS = "all groups"
    MUON_GROUPS = "Muon groups"
    ADAMW_GROUPS = "AdamW groups"
    OPTIMIZER = "optimizer"


class Compared(Enum):
    """How ranks find out that they were given different values."""

    NEVER = "ranks may differ in it"
    IN_PLAN = "it shapes the plan, whose digest ranks compare"
    BY_VALUE = "ranks compare its value at every step"


@dataclass(frozen=True)
class Option:
    """A row of the table."""

    name: str  # keyword of the constructor, and for options of param groups also the key in a group
    default: Any
    scope: Scope
    # Refuses wrong values, at every step for options of param groups. None if another option's check, or the object
    # that is built from it, does so.
    check: Check | None
    compared: Compared = Compared.NEVER
    # an accepted value as groups keep it, to be compared and stored
    kept_as: Callable[[Any], Any] = lambda value: value
    # it decides what the matrices are or what is remembered of them: loading another value warns
    defines_matrices: bool = False
    aliases: tuple[str, ...] = ()  # torch's names of it
    help: str = ""  # what it does, for ``help(Muon)`` and docs/optimizer.md; without it, the option is not shown

    def with_help(self, text: str) -> Option:
        """The same row with this help: a method, so that a row of the table is one line of columns and then its
        text.
        """
        other = ", ".join(f"``{alias}``" for alias in self.aliases)
        return replace(self, help=text + (f" Also {other}, as in torch." if other else ""))


class _TorchKeys(TypedDict, total=False):
    """Keys that a param group may have beside ``adamw_betas`` and ``adamw_eps``; if present, they are the ones that
    count.
    """

    betas: tuple[float, float]
    eps: float


class ParamGroup(_TorchKeys):
    """A param group as the optimizer works with it. At run time it is a plain dict, which may hold further keys of
    a trainer.
    """

    params: list[Tensor]
    param_names: list[str]  # one for each of ``params``
    use_muon: bool
    lr: float | Tensor
    momentum: float
    nesterov: bool
    ns_steps: int
    weight_decay: float
    adamw_betas: tuple[float, float]
    adamw_eps: float
    none_grad: bool
    expert_keys: Sequence[str] | None
    scheme: SchemeLike
    adjust_lr_fn: AdjustLR
    maximize: bool
    conv: Conv | None
    split: Split | None
    matrices: Mapping[str, Mapping[str, Any]] | None
    compute_dtype: torch.dtype | None
    momentum_dtype: torch.dtype | None
    rule: RuleLike
    cautious_weight_decay: bool
    rounding: Rounding


def _check_scheme(options: Mapping[str, Any], name: str, where: str) -> None:
    resolve_scheme(options[name], options["ns_steps"])


def _check_split(split: Any) -> None:
    check_matrix_options(MatrixOptions(split=split_as_tuple(split)))


def _scheme_as_numbers(scheme: SchemeLike) -> SchemeLike:
    """A Scheme as plain numbers, which survive ``torch.save`` and ``weights_only=True``; anything else as it is."""
    if not isinstance(scheme, Scheme):
        return scheme
    if scheme == AUTO:
        return "auto"
    stored: list[tuple[Any, ...]] = [tuple(step) for step in scheme.steps]
    return tuple(stored)


def split_as_tuple(split: Any) -> Any:
    """A list of sizes as a tuple, and an ``Interleaved`` as the tuple (sizes, repeats); anything else as it is.

    Tuples can be compared and hashed, and survive ``torch.save`` and ``weights_only=True``.
    """
    if isinstance(split, Interleaved):
        return split.sizes, split.repeats
    return tuple(map(split_as_tuple, split)) if isinstance(split, list | tuple) else split


def matrices_as_dicts(matrices: Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]] | None:
    """Entries as plain dicts without what is the default anyway, which survive ``torch.save`` and
    ``weights_only=True``.
    """
    if matrices is None:
        return None
    default = ONE_MATRIX.fields()
    return {
        name: {key: split_as_tuple(value) for key, value in entry.fields().items() if value != default[key]}
        for name, entry in sorted(check_matrices(matrices).items())
    }


Rounding: TypeAlias = Literal["nearest", "stochastic"]
NonFinitePolicy: TypeAlias = Literal["propagate", "skip", "raise"]

_ALL, _MUON, _ADAMW, _WHOLE = Scope.ALL_GROUPS, Scope.MUON_GROUPS, Scope.ADAMW_GROUPS, Scope.OPTIMIZER
_PLAN, _VALUE = Compared.IN_PLAN, Compared.BY_VALUE
_BUFFERS = ": each wave in flight needs its own buffers"

_EVERYDAY = (
    Option("lr", 1e-3, _ALL, check_lr, _VALUE).with_help(
        "Learning rate; also of AdamW's groups, unless ``adamw_lr`` is given. A one-element tensor works too."
    ),
    Option("adamw_lr", None, _WHOLE, check_optional_lr).with_help(
        "Learning rate of AdamW's groups without an ``lr``; by default ``lr``. It is written into the groups once, as "
        "their ``lr``, which schedulers change from there."
    ),
    Option("weight_decay", 0.1, _ALL, in_range(0.0), _VALUE).with_help(
        "Decoupled weight decay, applied before the update."
    ),
    Option("momentum", 0.95, _MUON, in_range(0.0, 1.0), _VALUE).with_help("Momentum, in [0, 1): M ← momentum·M + G."),
    Option("nesterov", True, _MUON, check_flag, _VALUE).with_help(
        "Looks ahead by one momentum step: the update is G + momentum·M instead of M."
    ),
    Option("adamw_betas", (0.9, 0.95), _ADAMW, check_betas, _VALUE, aliases=("betas",)).with_help("Betas of AdamW."),
    Option("adamw_eps", 1e-8, _ADAMW, check_eps, _VALUE, aliases=("eps",)).with_help("Epsilon of AdamW."),
    Option("scheme", "auto", _MUON, _check_scheme, _PLAN, kept_as=_scheme_as_numbers).with_help(
        'How matrices are orthogonalised: ``"auto"``, ``"polar_express"``, ``"keller"``, ``"zolotarev"``, '
        '``"hybrid"``, '
        '``"halley"``, a list of (a, b, c), a ``Scheme``, or a callable on a batch; see docs/orthogonalisation.md.'
    ),
    # ``scheme`` checks it.
    Option("ns_steps", 5, _MUON, None, _PLAN).with_help("Number of Newton–Schulz steps."),
    Option("adjust_lr_fn", "match_rms_adamw", _MUON, of_value(check_adjust_lr), _VALUE).with_help(
        "Factor of the learning rate of a rows × cols matrix: "
        '``"match_rms_adamw"`` is 0.2·√max(rows, cols) (arXiv:2502.16982), ``"original"`` is √max(1, rows/cols), '
        '``"spectral"`` is √(rows/cols), which torch calls ``"spectral_unclamped"``; or a function of (rows, cols).'
    ),
    Option("maximize", False, _ALL, check_flag, _VALUE).with_help("Ascends instead of descending."),
)

_MODEL = (
    Option(
        "split", None, _MUON, of_value(_check_split), _PLAN, kept_as=split_as_tuple, defines_matrices=True
    ).with_help(
        "Cuts fused weights (QKV, gate-up) along their output dim into separate matrices: the sizes of the parts, the "
        "size of equal parts (one per head), ``Interleaved(sizes, repeats)`` for interleaved parts, or a function of "
        "(name, shape) that returns one of these or None."
    ),
    Option(
        "expert_keys", None, _MUON, of_value(check_expert_keys), _PLAN, kept_as=check_expert_keys, defines_matrices=True
    ).with_help("A 3-D parameter whose name contains one of these is a stack of independent matrices."),
    Option(
        "matrices", None, _MUON, of_value(check_matrices), _VALUE, kept_as=matrices_as_dicts, defines_matrices=True
    ).with_help(
        'What is inside single parameters: ``{name: {"experts": …, "dims": …, "split": …, "flatten": …}}``, with ``*`` '
        "for "
        "numbers in names. ``get_default_muon_param_groups`` writes it. ``expert_keys``, ``split`` and ``conv`` "
        "override it; see docs/models.md."
    ),
    # What "adamw" says has been done when there are groups, so that it is kept as None and checkpoints do not differ in
    # it.
    Option(
        "conv",
        None,
        _MUON,
        one_of(CONV_OPTIONS),
        _PLAN,
        lambda conv: None if conv == "adamw" else conv,
        defines_matrices=True,
    ).with_help(
        "Of a model, which convolution filters go to Muon as one (out, in·kernel) matrix: by default those with both "
        "sides of at "
        'least 16 that do not see the pixels, with ``"flatten"`` all but grouped ones, with ``"adamw"`` none. In a '
        "group of your "
        'own, ``"flatten"`` makes any other parameter of more than two dims one matrix; see docs/models.md.'
    ),
)

_UPDATE = (
    Option(
        "rule", "plain", _MUON, of_value(check_rule), _PLAN, lambda rule: chain_of(rule) or rule, defines_matrices=True
    ).with_help(
        'What a step does beside orthogonalising: ``"plain"`` (nothing), ``"normuon"``, ``"muon_plus"``, ``"muoneq"``, '
        "an object with the methods of ``UpdateRule``, or a list of these, applied in its order; see docs/rules.md."
    ),
    Option("cautious_weight_decay", False, _MUON, check_flag, _VALUE).with_help(
        "Decays only those elements of Muon's parameters that the update does not push away from zero; see "
        "docs/rules.md."
    ),
    Option("rounding", "nearest", _ALL, one_of(get_args(Rounding)), _VALUE).with_help(
        'How a step rounds bfloat16 parameters, which it forms in float32: ``"nearest"``, or ``"stochastic"``, which '
        "is right on "
        "average, so that small updates and decay are not lost. It has no effect on float32 and float64 parameters; "
        "float16 "
        'parameters refuse ``"stochastic"``. See docs/optimizer.md.'
    ),
    Option("momentum_dtype", None, _MUON, dtype_in(FLOAT_DTYPES, "must be a dtype of momentum"), _VALUE).with_help(
        "Dtype of new momentum buffers; by default the dtype of the parameter. Momentum that there is keeps its own."
    ),
    # QKClip checks it.
    Option("clip_config", None, _WHOLE, None).with_help(
        'QK-clip, such as ``{"head_dim": 128, "threshold": 100}``. It acts on the ``qk_logits`` of a step; see '
        "docs/qk_clip.md."
    ),
    Option("nonfinite", "propagate", _WHOLE, one_of(get_args(NonFinitePolicy)), _PLAN).with_help(
        'What to do if a gradient on any rank has an infinity or a NaN: ``"propagate"`` steps with it, ``"skip"`` '
        "leaves "
        'everything as it is and counts in ``skipped_steps``, ``"raise"`` raises on all ranks before anything is '
        "written, and "
        "waits for the device to know. Both leave out single updates that are not finite although their gradients "
        "were. What a GradScaler finds is always skipped; see docs/reliability.md."
    ),
)

_ENGINE = (
    Option(
        "compute_dtype", None, _MUON, dtype_in(FLOAT_DTYPES, "must be a floating point dtype to compute in"), _PLAN
    ).with_help(
        "Dtype of the products that orthogonalise; by default float16 on GPU, float32 on CPU, float64 for float64 "
        "parameters. On CPUs with units for bfloat16 (AVX512_BF16, no AMX), bfloat16 for matrices of at least 100 "
        "rows and columns, with inverses in float32; see docs/orthogonalisation.md."
    ),
    Option(
        "comm_dtype", None, _WHOLE, dtype_in(FLOAT_DTYPES, "must be a dtype for the wire", pairs=True), _PLAN
    ).with_help(
        "Dtype on the wire, or a pair: to the owners, and back. By default bfloat16 between GPUs, float32 elsewhere, "
        "float64 for float64 parameters; see docs/distributed.md."
    ),
    Option("replica_group", None, _WHOLE, of_value(check_replica_group), _PLAN).with_help(
        "Process group, or mesh, over which plain tensors are replicated (DDP); the work is divided over it."
    ),
    Option("replicas", "auto", _WHOLE, one_of(REPLICA_OPTIONS), _PLAN).with_help(
        'Where ranks hold the same matrix (HSDP, replicated DTensors): ``"share"`` has one replica compute it for all, '
        '``"repeat"`` has each compute it, ``"auto"`` takes what leaves the busiest rank less, and shares what a '
        "scheme or a rule of your own computes."
    ),
    # ExecutorSettings checks its range.
    Option("memory_budget", None, _WHOLE, whole_number(optional=True), _PLAN).with_help(
        "Bytes of matrices that an owner gathers per wave, and of scratch that a batch may use. By default 64 MiB of "
        "a CPU's memory, or a 128th of a GPU's (512 MiB of 80 GB; twice that for batches). The exchange buffers of a "
        "rank take at most 3 × ``memory_budget`` × (``warmup_step`` + 1), or one matrix per owner."
    ),
    # ExecutorSettings checks its range.
    Option("chunk_size", -1, _WHOLE, whole_number(), _PLAN).with_help(
        "Most matrices per batch and per wave of an exchange; -1 leaves it to ``memory_budget``."
    ),
    Option("warmup_step", 5, _WHOLE, whole_number(0, 1024, why_high=_BUFFERS), _PLAN).with_help(
        "Waves of exchanges that may be in flight beside the one that computes (``warmup_step + 1`` in all). It does "
        "not warm up the learning rate."
    ),
    Option("deterministic", False, _WHOLE, check_flag).with_help(
        "Products and rules take one matrix at a time, so that bits cannot depend on what shares a batch, for any "
        "number of threads."
    ),
    Option("cuda_graphs", False, _WHOLE, check_flag).with_help(
        "Replays the orthogonalisation of each batch as a CUDA graph; no effect on CPU."
    ),
    Option("cost_model", None, _WHOLE, of_value(cost_model_from), _PLAN).with_help(
        "How fast the machine is, for the choice of owners, waves and ``replicas``: a file of ``meshmuon doctor "
        "--save``, or a ``CostModel``; by default orders of magnitude of its kind of device. See docs/doctor.md."
    ),
    Option("metrics", None, _WHOLE, whole_number(1, optional=True), _PLAN).with_help(
        "Measures every k-th step, for ``optimizer.metrics()``; by default none. See docs/metrics.md."
    ),
    Option("none_grad", True, _MUON, check_flag).with_help("Frees each Muon gradient as soon as the step has used it."),
    Option("allow_inactive", False, _WHOLE, check_flag).with_help(
        "Allows steps in which Muon has nothing to do: of a model or a pipeline stage without matrices, or of "
        "matrices that get their first gradient late. Otherwise such an optimizer raises, because it is usually a "
        "mistake; see docs/trainers.md."
    ),
    Option("use_distributed_muon", False, _WHOLE, check_flag, _PLAN).with_help(
        "Steps by the slow reference path, for verification: all-gathers whole matrices and computes all of them on "
        "every rank. Muon is distributed without it."
    ),
    # Motif's word for logging.getLogger("meshmuon").setLevel(logging.DEBUG): accepted, and not shown.
    Option("debug", False, _WHOLE, check_flag),
)

TIERS: dict[str, tuple[Option, ...]] = {
    "Everyday": _EVERYDAY,
    "What is in the model": _MODEL,
    "Update rules and rounding": _UPDATE,
    "Engine": _ENGINE,
}
OPTIONS: tuple[Option, ...] = tuple(option for options in TIERS.values() for option in options)


def group_options(use_muon: bool | None = None) -> tuple[Option, ...]:
    """The options of param groups: all, or those that a group with this ``use_muon`` uses."""
    unused = {None: None, True: Scope.ADAMW_GROUPS, False: Scope.MUON_GROUPS}[use_muon]
    return tuple(option for option in OPTIONS if option.scope not in (Scope.OPTIMIZER, unused))


def optimizer_options() -> tuple[Option, ...]:
    """The options that hold for the whole optimizer."""
    return tuple(option for option in OPTIONS if option.scope is Scope.OPTIMIZER)


_Class = TypeVar("_Class", bound=type)


def with_options(cls: _Class) -> _Class:
    """Class decorator: replaces ``{options}`` in the docstring by a section for each tier."""
    sections = []
    for tier, options in TIERS.items():
        sections.append(f"    {tier}:")
        for option in options:
            if option.help:
                scope = "" if option.scope is Scope.OPTIMIZER else " (per group)"
                text = f"{' ' * 8}{option.name}{scope}: {option.help}"
                sections.append(textwrap.fill(text, 130, subsequent_indent=" " * 12, break_on_hyphens=False))
        sections.append("")
    if cls.__doc__ is not None:  # python -OO removes docstrings
        cls.__doc__ = cls.__doc__.replace("    {options}\n", "\n".join(sections))
    return cls
