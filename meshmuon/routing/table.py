"""The routing table: where each parameter goes, how large its steps will be, and warnings about likely mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..matrices import MatrixSet, find_matrices
from ..ortho import default_compute_dtype, fallback_reason, resolve_scheme
from ..params.dtensors import layout_text
from ..params.groups import matrix_options_of, rounds_stochastically
from ..params.lr import AdjustLR, lr_factor, update_rms
from ..params.option_table import ParamGroup
from ..plan import table
from .param_groups import is_table_name, name_parts

_FUSED = frozenset(("qkv", "qkv_proj", "c_attn", "in_proj_weight", "wqkv", "w_qkv", "query_key_value", "gate_up_proj", "w13"))
_ADAMW_RMS = 0.2  # typical RMS of an AdamW update at lr 1, which match_rms_adamw reproduces (arXiv:2502.16982)
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
    """

    name: str
    shape: tuple[int, ...]
    layout: str
    route: str
    matrices: int
    lr: float
    rms: float

    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        shape = "×".join(map(str, self.shape)) or "scalar"
        return (self.name, shape, self.layout, self.route, str(self.matrices or "-"), f"{self.lr:.3g}", f"{self.rms:.3g}")

    def __str__(self) -> str:
        return "  ".join(self.cells())


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """All rows, and warnings about routes that are valid but probably mistakes."""

    rows: tuple[RoutingRow, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        head = ("parameter", "shape", "layout", "route", "matrices", "lr", "update rms")
        return "\n".join([table(head, [row.cells() for row in self.rows]), *(f"warning: {w}" for w in self.warnings)])


def build_routing_table(param_groups: Sequence[ParamGroup], first: int = 0) -> RoutingTable:
    """The routing table of param groups, the first of which has the index ``first``."""
    rows: list[RoutingRow] = []
    warnings: list[str] = []
    for index, param_group in enumerate(param_groups, first):
        if param_group["use_muon"]:
            warnings += _lr_warnings(index, param_group) + _scheme_warnings(index, param_group)
        for name, param in zip(param_group["param_names"], param_group["params"], strict=True):
            matrix_sets = find_matrices(name, param.shape, matrix_options_of(param_group)) if param_group["use_muon"] else ()
            rows.append(_row(name, param, param_group, matrix_sets))
            if matrix_sets:
                warnings += _route_warnings(name, matrix_sets)
    return RoutingTable(tuple(rows), tuple(warnings + _rounding_warnings(param_groups)))


def _row(name: str, param: Tensor, param_group: ParamGroup, matrix_sets: Sequence[MatrixSet]) -> RoutingRow:
    lr, shape = float(param_group["lr"]), tuple(param.shape)
    if not param_group["use_muon"]:
        return RoutingRow(name, shape, layout_text(name, param), "adamw", 0, lr, _ADAMW_RMS * lr)
    rule: AdjustLR = param_group["adjust_lr_fn"]
    largest = max(matrix_sets, key=lambda matrix_set: lr_factor(rule, *matrix_set.lr_shape))  # parts of a fused weight may differ
    factor, rms = lr_factor(rule, *largest.lr_shape), update_rms(rule, *largest.lr_shape)
    return RoutingRow(
        name, shape, layout_text(name, param), "muon", sum(matrix_set.count for matrix_set in matrix_sets), lr * factor, lr * rms
    )


def _lr_warnings(index: int, param_group: ParamGroup) -> list[str]:
    lr, rule = float(param_group["lr"]), param_group["adjust_lr_fn"]
    if rule == "match_rms_adamw" and lr >= _TOO_LARGE_FOR_MATCH_RMS:
        return [
            f'group {index}: lr={lr:g} with adjust_lr_fn="match_rms_adamw" moves entries by {0.2 * lr:g} a step. This rule takes '
            'AdamW\'s learning rates (1e-4 to 1e-2); 0.02 belongs to adjust_lr_fn="original".'
        ]
    if rule in ("original", "spectral", "spectral_unclamped") and 0 < lr < _TOO_SMALL_FOR_ORIGINAL:
        return [
            f'group {index}: lr={lr:g} is small for adjust_lr_fn="{rule}", whose usual lr is about 0.02. AdamW\'s learning rates '
            'belong to adjust_lr_fn="match_rms_adamw".'
        ]
    return []


def _scheme_warnings(index: int, param_group: ParamGroup) -> list[str]:
    scheme, given = resolve_scheme(param_group["scheme"], param_group["ns_steps"]), param_group["compute_dtype"]
    dtypes = dict.fromkeys(given or default_compute_dtype(param.device, param.dtype) for param in param_group["params"])
    reasons = (fallback_reason(scheme, dtype) for dtype in dtypes)
    return [f"group {index}: {reason}. Pass compute_dtype=torch.float32 to use it." for reason in reasons if reason is not None]


def _rounding_warnings(param_groups: Sequence[ParamGroup]) -> list[str]:
    stochastic = [param_group for param_group in param_groups if param_group["rounding"] == "stochastic"]
    if not stochastic or any(rounds_stochastically(param, group) for group in stochastic for param in group["params"]):
        return []
    dtypes = sorted({str(param.dtype).removeprefix("torch.") for group in stochastic for param in group["params"]})
    return [f'rounding="stochastic" has no effect: it is for bfloat16 parameters, and these are {", ".join(dtypes)}.']


def _route_warnings(name: str, matrix_sets: Sequence[MatrixSet]) -> list[str]:
    if is_table_name(name):
        return [
            f"{name} looks like an embedding or an output head, which train better with AdamW: move it to a group with "
            "use_muon=False."
        ]
    split = matrix_sets[0].window is not None  # even if the user has declared a single part
    if not split and any(part.lower() in _FUSED for part in name_parts(name)):
        whole = "it as one matrix" if not matrix_sets[0].stack_dims else "each of its experts as one matrix"
        return [
            f"{name} looks like several projections fused into one weight. Muon orthogonalises {whole}, which couples "
            "them: give the sizes of its parts, split=(...), in the group."
        ]
    return []
