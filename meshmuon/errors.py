"""The errors that meshmuon raises: each says what is wrong, where, what was expected and what to write instead."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "GradientError",
    "MeshmuonError",
    "PlanError",
    "PlanMismatchError",
    "RoutingWarning",
    "StateError",
    "TransportError",
    "UnsupportedError",
    "UntestedTorchWarning",
]


class MeshmuonError(Exception):
    """Base of every error that meshmuon raises on purpose."""


class ConfigError(MeshmuonError, ValueError):
    """An option, a parameter group or a scheme is not usable as given."""


class GradientError(MeshmuonError, RuntimeError):
    """A gradient cannot be used. Raised before the step has written anything."""


class PlanError(MeshmuonError, RuntimeError):
    """A plan contradicts itself. Raised when it is made, before anything travels."""


class PlanMismatchError(MeshmuonError, RuntimeError):
    """Ranks would execute different plans. Raised on all of them, before anything is written."""


class StateError(MeshmuonError, ValueError):
    """A state_dict does not belong to this optimizer. Raised before anything is overwritten."""


class CheckpointError(StateError):
    """The files of a checkpoint are not those that were saved: lost, cut short, changed or never described."""


class TransportError(MeshmuonError, RuntimeError):
    """Ranks could not talk to each other. It names the phase of the step; unless that is the agreement, the step is half done."""


class UnsupportedError(MeshmuonError, NotImplementedError):
    """The request makes sense but this version of meshmuon does not do it."""


class RoutingWarning(UserWarning):
    """A parameter is routed in a way that is legal and most likely not what was meant."""


class UntestedTorchWarning(UserWarning):
    """This version of torch is outside of those that meshmuon is tested with."""
