"""The routing table: where each parameter goes, how large its steps will be, and warnings about likely mistakes."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..device import work_device
from ..matrices import MatrixSet, entry_of, find_matrices, keys_of, with_stars, without_wrappers
from ..models import (
    CONV_ADAMW,
    LOOKS_FUSED,
    LORA_FACTOR,
    SMALL_FILTER,
    UNKNOWN_STACK,
    is_table_name,
    looks_fused_name,
    name_parts,
)
from ..ortho import default_compute_dtype, fallback_reason, resolve_scheme
from ..params.arguments import misspelt_keys
from ..params.checks import nearest
from ..params.dtensors import as_dtensor, layout_text
from ..params.groups import are_placeholders, matrix_options_of, rounds_stochastically
from ..params.lr import AdjustLR, lr_factor, update_rms
from ..params.option_table import ParamGroup
from ..params.rules import chain_of
from ..plan import table

_ADAMW_RMS = 0.2  # RMS of an AdamW update at lr 1 in long training, which match_rms_adamw reproduces (arXiv:2502.16982)
_TOO_LARGE_FOR_MATCH_RMS = 0.02
_TOO_SMALL_FOR_ORIGINAL = 2e-3


@dataclass(frozen=True, slots=True)
class RoutingRow:
    """One parameter's route.

    Attributes:
        name: the parameter's name.
        shape: its global shape.
        layout: its device, and its placements and mesh if it is sharded.
        route: ``"muon"`` or ``"adamw"``.
        matrices: number of matrices that Muon orthogonalises in it; 0 for AdamW.
        lr: learning rate, multiplied by the factor for the matrix's shape.
        rms: predicted root mean square of the entries of a step; for AdamW the typical 0.2·lr.
        why: why it has this route, and what is inside it; "" if the group does not say.
        frozen: whether it requires no gradient. ``lr`` and ``rms`` are then those of a step once it is unfrozen.
    """

    name: str
    shape: tuple[int, ...]
    layout: str
    route: str
    matrices: int
    lr: float
    rms: float
    why: str = ""
    frozen: bool = False

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        shape = "×".join(map(str, self.shape)) or "scalar"
        numbers = (str(self.matrices or "-"), f"{self.lr:.3g}", f"{self.rms:.3g}")
        return (self.name, shape, self.layout, self.route + ", frozen" * self.frozen, *numbers, self.why)

    def __str__(self) -> str:
        return "  ".join(self.cells()).rstrip()


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """All rows, warnings about routes that are valid but probably mistakes, and notes about those that may not be the
    best.

    As text, rows that differ only in numbers in their names are one: ``layers.*.up.weight ×32``; with ``full`` each is
    shown. The last line is ``share``: how much of what trains Muon has.
    """

    rows: tuple[RoutingRow, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    full: bool = False
    share: str = "Muon: 0 matrices"

    def __str__(self) -> str:
        head = ("parameter", "shape", "layout", "route", "matrices", "lr", "update rms", "why")
        shown = len(head) if any(row.why for row in self.rows) else len(head) - 1
        alike: dict[tuple[str, ...], list[str]] = {}  # what is shown of a row, with the pattern of its name → names
        for row in self.rows:
            name, *cells = row.cells()[:shown]
            alike.setdefault((name if self.full else with_stars(name), *cells), []).append(name)
        rows = [
            (names[0] if len(names) == 1 else f"{pattern} ×{len(names)}", *cells)
            for (pattern, *cells), names in alike.items()
        ]
        remarks = [*(f"warning: {text}" for text in self.warnings), *(f"note: {text}" for text in self.notes)]
        return "\n".join([table(head[:shown], rows), *remarks, self.share])


def build_routing_table(param_groups: Sequence[ParamGroup], first: int = 0, *, full: bool = False) -> RoutingTable:
    """The routing table of the param groups from ``first`` on, out of all groups of an optimizer."""
    rows: list[RoutingRow] = []
    warnings: list[str] = []
    notes: list[str] = []
    # a doubt and the kind of weight, and the names of all that are of this kind
    doubts: dict[tuple[str, str], list[str]] = {}
    trained: list[RoutingRow] = []
    shown_groups = param_groups[first:]
    for index, param_group in enumerate(shown_groups, first):
        if param_group["use_muon"]:
            warnings += _lr_warnings(index, param_group) + _scheme_warnings(index, param_group)
            notes += _rule_note(index, param_group)
        for name, param in zip(param_group["param_names"], param_group["params"], strict=True):
            matrix_sets = (
                find_matrices(name, param.shape, matrix_options_of(param_group)) if param_group["use_muon"] else ()
            )
            why = _reason_of(name, param_group)
            rows.append(_row(name, param, param_group, matrix_sets, why))
            trained += [rows[-1]] if param.requires_grad else []
            doubt = _doubt(name, matrix_sets, why) if param.requires_grad else ""
            if doubt:
                doubts.setdefault((doubt, _kind_of(name)), []).append(name)
    for (doubt, _), (name, *others) in doubts.items():
        warnings.append(f"{name}{f' (and {len(others)} more of its kind)' if others else ''} {doubt}")
    warnings += _unused_entries(shown_groups, param_groups) + _rounding_warnings(shown_groups)
    warnings += misspelt_keys(shown_groups, first)
    warnings += _share_warning(trained)
    return RoutingTable(tuple(rows), tuple(warnings), (*notes, *_notes(rows)), full, _share(trained))


def is_first_of_ranks(param_groups: Sequence[ParamGroup]) -> bool:
    """Whether this rank is the first of those that hold a parameter: the others would only repeat what it says.

    Plain tensors belong to rank 0. A warning that only another rank could give is in its ``routing_table()``.
    """
    if not dist.is_available() or not dist.is_initialized():
        return True
    params = (param for param_group in param_groups for param in param_group["params"])
    meshes = {None if (sharded := as_dtensor(param)) is None else sharded.device_mesh for param in params}
    return dist.get_rank() in {0 if mesh is None else int(mesh.mesh.min()) for mesh in meshes}


def _reason_of(name: str, param_group: Mapping[str, Any]) -> str:
    """What the group says about the parameter; get_default_muon_param_groups writes it."""
    reasons = param_group.get("reasons")
    if not isinstance(reasons, Mapping):
        return ""
    return str(entry_of(reasons, name) or "")


def _row(name: str, param: Tensor, param_group: ParamGroup, matrix_sets: Sequence[MatrixSet], why: str) -> RoutingRow:
    lr, shape = float(param_group["lr"]), tuple(param.shape)
    if not param_group["use_muon"]:
        return RoutingRow(
            name, shape, layout_text(name, param), "adamw", 0, lr, _ADAMW_RMS * lr, why, not param.requires_grad
        )
    rule: AdjustLR = param_group["adjust_lr_fn"]
    # parts of a fused weight may differ
    largest = max(matrix_sets, key=lambda matrix_set: lr_factor(rule, *matrix_set.lr_shape))
    factor, rms = lr_factor(rule, *largest.lr_shape), update_rms(rule, *largest.lr_shape)
    count = sum(matrix_set.count for matrix_set in matrix_sets)
    return RoutingRow(
        name, shape, layout_text(name, param), "muon", count, lr * factor, lr * rms, why, not param.requires_grad
    )


def _lr_warnings(index: int, param_group: ParamGroup) -> list[str]:
    lr, rule = float(param_group["lr"]), param_group["adjust_lr_fn"]
    if rule == "match_rms_adamw" and lr >= _TOO_LARGE_FOR_MATCH_RMS:
        return [
            f'group {index}: lr={lr:g} with adjust_lr_fn="match_rms_adamw" moves entries by {0.2 * lr:g} a step. This '
            "rule takes "
            '1 to 8 times AdamW\'s learning rates (1e-4 to 1.6e-2); 0.02 belongs to adjust_lr_fn="original".'
        ]
    if rule in ("original", "spectral", "spectral_unclamped") and 0 < lr < _TOO_SMALL_FOR_ORIGINAL:
        return [
            f'group {index}: lr={lr:g} is small for adjust_lr_fn="{rule}", whose usual lr is about 0.02. AdamW\'s '
            "learning rates "
            'belong to adjust_lr_fn="match_rms_adamw".'
        ]
    return []


def _scheme_warnings(index: int, param_group: ParamGroup) -> list[str]:
    scheme, given = resolve_scheme(param_group["scheme"], param_group["ns_steps"]), param_group["compute_dtype"]
    trained = [param for param in param_group["params"] if param.requires_grad]
    dtypes = dict.fromkeys(given or default_compute_dtype(work_device(param), param.dtype, scheme) for param in trained)
    reasons = (fallback_reason(scheme, dtype) for dtype in dtypes)
    return [
        f"group {index}: {reason}. Pass compute_dtype=torch.float32 to use it."
        for reason in reasons
        if reason is not None
    ]


def _rule_note(index: int, param_group: ParamGroup) -> list[str]:
    names = [rule if isinstance(rule, str) else type(rule).__name__ for rule in chain_of(param_group["rule"]) or ()]
    return [f"group {index} has the rules {', '.join(names)}, in this order."] if names else []


def _notes(rows: Sequence[RoutingRow]) -> tuple[str, ...]:
    factors = sum(row.route == "muon" and row.why.startswith(LORA_FACTOR) for row in rows)
    if not factors:
        return ()
    return (
        f"{factors} factors of LoRA go to Muon, and AdamW usually trains them better (docs/recipes.md). Use "
        "torch.optim.AdamW "
        'for them; if Muon has other matrices, pass is_muon_func=lambda name, param: "lora_" not in name to '
        "get_default_muon_param_groups.",
    )


def _share(trained: Sequence[RoutingRow]) -> str:
    """How much of what trains Muon has, for the last line of the table."""
    matrices, total = sum(row.matrices for row in trained), sum(map(_elements, trained))
    by_muon = sum(_elements(row) for row in trained if row.route == "muon")
    parameters = f"{total:,}" if total < 1e6 else f"{total / 1e6:.3g} M" if total < 999.5e6 else f"{total / 1e9:,.3g} B"
    many, rest = "matrix" if matrices == 1 else "matrices", "; AdamW: the rest" if by_muon < total else ""
    return f"Muon: {matrices} {many}, {_percent(by_muon, total)} of {parameters} parameters{rest}"


def _share_warning(trained: Sequence[RoutingRow]) -> list[str]:
    """Warns if AdamW has more than half of a model whose routes were left to us; it raises elsewhere if Muon has
    nothing.
    """
    weights = [row for row in trained if len(row.shape) > 1 and not _NOT_COUNTED.search(row.why)]
    total, by_muon = sum(map(_elements, weights)), sum(_elements(row) for row in weights if row.route == "muon")
    if not 0 < 2 * by_muon < total or any(row.why in ("", "is_muon_func") for row in weights):
        return []
    by_reason: Counter[str] = Counter()
    for row in weights:
        by_reason[row.why] += 0 if row.route == "muon" else _elements(row)
    reason, most = by_reason.most_common(1)[0]
    fix = 'Muon(model, conv="flatten")' if _FLATTENED.match(reason) else ""
    if reason == UNKNOWN_STACK:
        fix = "Muon(model, expert_keys=[...]) with a part of their names"
    elif all(len(row.shape) == 2 for row in weights if row.why == reason):
        by_hand = "Muon(get_default_muon_param_groups(model, is_muon_func=lambda name, param: ...))"
        fix = f"{by_hand} with a condition that decides of all weights"
    advice = f"To give these to Muon, write {fix}. If AdamW is right for them, give it" if fix else "Give AdamW"
    return [
        f"Muon trains {_percent(by_muon, total)} of the elements of this model's weights of two and more dims, "
        f"embeddings, heads and adapters apart; AdamW has the rest, {_percent(most, total)} for this reason: {reason}. "
        f"{advice} a rate of its own, adamw_lr=...: about a fourth of lr."
    ]


def _elements(row: RoutingRow) -> int:
    return math.prod(row.shape)


def _percent(part: int, total: int) -> str:
    """In whole numbers, of which 0 and 100 mean nothing and all."""
    percent = round(100 * part / total) if total else 0
    return "<1 %" if percent == 0 < part else ">99 %" if percent == 100 and part < total else f"{percent} %"


def _unused_entries(shown_groups: Sequence[ParamGroup], param_groups: Sequence[ParamGroup]) -> list[str]:
    """Warns of keys of ``matrices`` that fit no parameter of Muon: of the optimizer, since groups may share the
    option.
    """
    keys = dict.fromkeys(key for group in shown_groups if group["use_muon"] for key in group["matrices"] or ())
    names = {
        use_muon: [n for group in param_groups if group["use_muon"] is use_muon for n in group["param_names"]]
        for use_muon in (True, False)
    }
    fitting = {use_muon: {key for name in names[use_muon] for key in keys_of(name)} for use_muon in names}
    warnings = []
    for key in keys:
        if key not in fitting[True]:
            near = nearest(key, (name for some in names.values() for name in map(without_wrappers, some)))
            why = "fits AdamW's parameters only" if key in fitting[False] else "fits no parameter"
            hint = f" The nearest names are {near}." if near and key not in fitting[False] else ""
            warnings.append(
                f"matrices[{key!r}] {why}, so that it has no effect.{hint} In a key, * stands for any number."
            )
    return warnings


def _rounding_warnings(param_groups: Sequence[ParamGroup]) -> list[str]:
    stochastic = [param_group for param_group in param_groups if param_group["rounding"] == "stochastic"]
    if not stochastic or any(rounds_stochastically(param, group) for group in stochastic for param in group["params"]):
        return []
    dtypes = sorted({str(param.dtype).removeprefix("torch.") for group in stochastic for param in group["params"]})
    return [f'rounding="stochastic" has no effect: it is for bfloat16 parameters, and these are {", ".join(dtypes)}.']


def _doubt(name: str, matrix_sets: Sequence[MatrixSet], why: str) -> str:
    """What is probably wrong with a route, as the rest of a sentence about the parameter; "" if nothing is."""
    if why == UNKNOWN_STACK:
        return _UNKNOWN_STACK
    decided = why not in ("", "is_muon_func", "expert_keys", LOOKS_FUSED)  # by what is known of the model
    if not matrix_sets or decided:
        return ""
    split = matrix_sets[0].window is not None  # even if the user has declared a single part
    if are_placeholders([name]):
        return "" if split else _doubt_of_shape(matrix_sets[0])
    if is_table_name(name):
        return _TABLE
    if not split and looks_fused_name(name_parts(name)):
        return _FUSED.format("each of its experts" if matrix_sets[0].stack_dims else "it")
    return ""


def _doubt_of_shape(matrix_set: MatrixSet) -> str:
    """What the shape alone makes doubtful, where there are no names."""
    rows, cols = matrix_set.lr_shape
    if max(rows, cols) >= max(_LONG, _LONG_AND_NARROW * min(rows, cols)):
        return f"is {rows}×{cols} and {_TABLE} {_NAMES_TELL}"
    if rows == 3 * cols > 0:
        return f"is {rows}×{cols} and {_FUSED.format('it')} {_NAMES_TELL}"
    return ""


# a longer side, and its ratio to the other, that few layers have but tables and heads
_LONG, _LONG_AND_NARROW = 8192, 16
_NAMES_TELL = 'If it is something else, give the group "names", which tell more than shapes.'
# reasons of what is no weight of a layer, or is small on purpose, or was chosen
_NOT_COUNTED = re.compile(f"embedding|output head|table|adapter|{LORA_FACTOR}|{CONV_ADAMW}")
_FLATTENED = re.compile(f"{SMALL_FILTER}|filter that|1-D stem")  # reasons of filters that Muon can have
_UNKNOWN_STACK = (
    "has more than two dims and is not known to be a stack of matrices, so AdamW trains it. If it holds matrices, pass "
    "expert_keys=[...] with a part of the name to get_default_muon_param_groups."
)
_TABLE = (
    "looks like an embedding or an output head, which train better with AdamW: move it to a group with use_muon=False."
)
_FUSED = (
    "looks like several projections fused into one weight. Muon orthogonalises {} as one matrix, which couples them: "
    "give the sizes of the parts, split=(...), in the group, or split=Interleaved(...) if they are interleaved."
)


def _kind_of(name: str) -> str:
    """The name of the weight without where it is: parameters of one kind share it, and one warning is enough for
    them.
    """
    if are_placeholders([name]):
        return ""
    parts = name_parts(name)
    return parts[-2] if parts[-1] == "weight" and len(parts) > 1 else parts[-1]
