"""The routing table: where each parameter goes, how large its steps will be, and what looks wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..matrices import MatrixSet, find_matrices
from ..params.dtensors import layout_text
from ..params.groups import matrix_options_of
from ..params.lr import AdjustLR, lr_factor, update_rms
from ..params.option_table import ParamGroup
from ..plan import table
from .param_groups import is_table_name, name_parts

__all__ = ["RoutingRow", "RoutingTable", "build_routing_table"]

_FUSED = frozenset(("qkv", "qkv_proj", "c_attn", "in_proj_weight", "wqkv", "w_qkv", "query_key_value", "gate_up_proj", "w13"))
_ADAMW_RMS = 0.2  # typical entry of an AdamW update of lr 1, on which match_rms_adamw rests (arXiv:2502.16982)
_TOO_LARGE_FOR_MATCH_RMS = 0.02
_TOO_SMALL_FOR_ORIGINAL = 2e-3


@dataclass(frozen=True, slots=True)
class RoutingRow:
    """One parameter's route.

    Attributes:
        name: the parameter's name.
        shape: its global shape.
        layout: where it lives.
        route: ``"muon"`` or ``"adamw"``.
        matrices: how many matrices Muon finds in it.
        lr: learning rate after the shape's factor.
        rms: predicted root mean square of a step's entries; for AdamW the usual 0.2·lr.
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
    """All rows, and warnings about routes that are legal but probably not meant."""

    rows: tuple[RoutingRow, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        head = ("parameter", "shape", "layout", "route", "matrices", "lr", "update rms")
        return "\n".join([table(head, [row.cells() for row in self.rows]), *(f"warning: {w}" for w in self.warnings)])


def build_routing_table(groups: Sequence[ParamGroup], first: int = 0) -> RoutingTable:
    """Describes an optimizer's groups, of which the first has the number ``first``."""
    rows: list[RoutingRow] = []
    warnings: list[str] = []
    for index, group in enumerate(groups, first):
        if group["use_muon"]:
            warnings += _lr_warnings(index, group)
        for name, param in zip(group["param_names"], group["params"], strict=True):
            found = find_matrices(name, param.shape, matrix_options_of(group)) if group["use_muon"] else ()
            rows.append(_row(name, param, group, found))
            if found:
                warnings += _route_warnings(name, found)
    return RoutingTable(tuple(rows), tuple(warnings))


def _row(name: str, param: Tensor, group: ParamGroup, found: Sequence[MatrixSet]) -> RoutingRow:
    lr, shape = float(group["lr"]), tuple(param.shape)
    if not group["use_muon"]:
        return RoutingRow(name, shape, layout_text(name, param), "adamw", 0, lr, _ADAMW_RMS * lr)
    rule: AdjustLR = group["adjust_lr_fn"]
    largest = max(found, key=lambda one: lr_factor(rule, *one.lr_shape))  # the parts of a fused weight may differ
    factor, rms = lr_factor(rule, *largest.lr_shape), update_rms(rule, *largest.lr_shape)
    return RoutingRow(name, shape, layout_text(name, param), "muon", sum(one.count for one in found), lr * factor, lr * rms)


def _lr_warnings(index: int, group: ParamGroup) -> list[str]:
    lr, rule = float(group["lr"]), group["adjust_lr_fn"]
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


def _route_warnings(name: str, found: Sequence[MatrixSet]) -> list[str]:
    if is_table_name(name):
        return [
            f"{name} looks like an embedding or an output head, which train better with AdamW: move it to a group with "
            "use_muon=False."
        ]
    split = found[0].window is not None  # also where a user says that it is one part
    if not split and any(part.lower() in _FUSED for part in name_parts(name)):
        whole = "it as one matrix" if not found[0].stack_dims else "each of its experts as one matrix"
        return [
            f"{name} looks like several projections fused into one weight. Muon orthogonalises {whole}, which couples "
            "them: give the sizes of its parts, split=(...), in the group."
        ]
    return []
