"""meshmuon: the Muon optimizer for any device mesh.

A public name is imported when it is first asked for, so that ``meshmuon --help`` need not wait for torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .dropped import refuse_name

if TYPE_CHECKING:
    from .clipping.grad_norm import clip_grad_norm_, total_grad_norm
    from .errors import (
        ConfigError,
        GradientError,
        InactiveWarning,
        KernelError,
        KernelWarning,
        MeshmuonError,
        OptionNameWarning,
        OrthogonalizeError,
        PlanError,
        PlanMismatchError,
        RoutingWarning,
        StateError,
        TransportError,
        UnknownOptionError,
        UnsupportedError,
        UntestedTorchWarning,
    )
    from .matrices import Interleaved
    from .optim import DistMuon, Muon
    from .ortho import Scheme, Workspace, halley, hybrid, keller, orthogonalize, polar_express, zolotarev
    from .params.rules import MuonEq, MuonPlus, NorMuon, UpdateRule
    from .plan import CostModel, Plan
    from .qk_clip.max_logits import MaxLogits
    from .routing.param_groups import get_default_muon_param_groups
    from .routing.table import RoutingRow, RoutingTable

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "CostModel",
    "DistMuon",
    "GradientError",
    "InactiveWarning",
    "Interleaved",
    "KernelError",
    "KernelWarning",
    "MaxLogits",
    "MeshmuonError",
    "Muon",
    "MuonEq",
    "MuonPlus",
    "NorMuon",
    "OptionNameWarning",
    "OrthogonalizeError",
    "Plan",
    "PlanError",
    "PlanMismatchError",
    "RoutingRow",
    "RoutingTable",
    "RoutingWarning",
    "Scheme",
    "StateError",
    "TransportError",
    "UnknownOptionError",
    "UnsupportedError",
    "UntestedTorchWarning",
    "UpdateRule",
    "Workspace",
    "clip_grad_norm_",
    "get_default_muon_param_groups",
    "halley",
    "hybrid",
    "keller",
    "orthogonalize",
    "polar_express",
    "total_grad_norm",
    "zolotarev",
]

_MODULES = (  # that the public names come from
    "errors",
    "matrices",
    "optim",
    "ortho",
    "params.rules",
    "plan",
    "qk_clip.max_logits",
    "routing.param_groups",
    "routing.table",
    "clipping.grad_norm",
)

if not TYPE_CHECKING:  # which would take any name for a public one

    def __getattr__(name: str) -> Any:
        if name in __all__:
            for module in _MODULES:
                content = vars(import_module(f".{module}", __name__))
                if name in content:
                    return globals().setdefault(name, content[name])
        refuse_name(name)
        # A module: it alone is imported, since one of those above may be on its way to ask for it.
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
