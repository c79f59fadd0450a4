"""Optimizers that pip does not find, run from a checkout: ``--peer NAME=DIR``.

Each takes part as it is shipped, but for what a machine without a GPU cannot run. Those whose coefficients are their
own make another update than Keller Jordan's, and are listed with the error that they leave.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contenders import BF16, DECAY, LR, MOMENTUM, STEPS, Contender, PlainMuon, patched
from torch import Tensor, nn

__all__ = ["PEERS", "find_peer"]


def _dion(params: list[nn.Parameter]) -> Callable[[], object]:
    package: Any = importlib.import_module("dion")
    options = {"nesterov": True, "adjust_lr": "rms_norm", "use_polar_express": True}
    return patched(package.Muon(params, lr=LR, mu=MOMENTUM, weight_decay=DECAY, **options).step, eager=True)


def _emerging(params: list[nn.Parameter]) -> Callable[[], object]:
    package: Any = importlib.import_module("emerging_optimizers.orthogonalized_optimizers")
    options = {"nesterov": True, "fp32_matmul_prec": "highest", "extra_scale_factor": 0.2}
    return patched(package.Muon(params, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, **options).step, eager=True)


def _dmuon(params: list[nn.Parameter]) -> Callable[[], object]:
    package: Any = importlib.import_module("dmuon.optim.newton_schulz")
    iteration = package.NewtonSchulz(backend="gram")

    def orthogonalise(grad: Tensor) -> Tensor:
        result: Tensor = iteration.local(grad, STEPS)
        return result.to(grad.dtype)

    return patched(PlainMuon(params, orthogonalise).step, eager=True)


@dataclass(frozen=True, slots=True)
class Peer:
    """A package in a checkout, the module of it that is used, and how it takes part."""

    package: str
    module: str
    contender: Contender


PEERS = {
    "dion": Peer(
        "dion",
        "dion",
        Contender("dion", _dion, BF16, "its polar_express", differs="products in bfloat16, not compiled, no Triton"),
    ),
    "Emerging-Optimizers": Peer(
        "emerging_optimizers",
        "emerging_optimizers.orthogonalized_optimizers",
        Contender("Emerging-Optimizers, fp32", _emerging, differs="float32 products, not compiled"),
    ),
    "DMuon": Peer(
        "dmuon",
        "dmuon.optim.newton_schulz",
        Contender(
            "DMuon's iteration",
            _dmuon,
            BF16,
            "its Gram form",
            original=True,
            differs="its Newton–Schulz in a plain loop: its optimizer needs a process group",
        ),
    ),
}


def find_peer(given: str) -> str:
    """The name in ``NAME=DIR``, with the checkout put where Python finds it; ValueError where that cannot be."""
    name, _, folder = given.partition("=")
    if name not in PEERS or not folder:
        raise ValueError(f"--peer {given}: write NAME=DIR with one of the names {', '.join(PEERS)}")
    peer = PEERS[name]
    path = Path(folder).expanduser().resolve()
    if not (path / peer.package / "__init__.py").is_file():
        raise ValueError(
            f"--peer {given}: there is no package {peer.package!r} in that folder; give the root of a checkout"
        )
    sys.path.insert(0, str(path))
    try:
        importlib.import_module(peer.module)
    except (ImportError, SyntaxError) as error:  # a dependency of its own, or a newer Python
        raise ValueError(f"--peer {given}: {peer.module} does not import here: {error}") from error
    return name
