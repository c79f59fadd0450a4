"""The errors that meshmuon raises: each says what is wrong, where, what was expected and what to write instead."""

from __future__ import annotations


class MeshmuonError(Exception):
    """Base class of all errors that meshmuon raises."""


class ConfigError(MeshmuonError, ValueError):
    """An option, a param group or a scheme is invalid."""


class GradientError(MeshmuonError, RuntimeError):
    """A gradient cannot be used. Raised before the step has written anything."""


class PlanError(MeshmuonError, RuntimeError):
    """A plan is inconsistent. Raised when it is made, before anything is sent."""


class PlanMismatchError(MeshmuonError, RuntimeError):
    """Ranks would execute different plans. Raised on all of them, before anything is written."""


class StateError(MeshmuonError, ValueError):
    """State does not fit this optimizer, or differs between ranks. Raised before anything is overwritten."""


class CheckpointError(StateError):
    """The files of a checkpoint are not those that were saved: missing, truncated or changed, or there is no manifest."""


class TransportError(MeshmuonError, RuntimeError):
    """Communication between ranks failed. The text names the phase; after any phase but the agreement, the step is half done."""


class UnsupportedError(MeshmuonError, NotImplementedError):
    """A valid request that this version of meshmuon does not support."""


class RoutingWarning(UserWarning):
    """A parameter is routed in a way that is valid but probably a mistake."""


class InactiveWarning(UserWarning):
    """A step had no gradient for any of Muon's matrices. The next one raises."""


class UntestedTorchWarning(UserWarning):
    """meshmuon is not tested with this version of torch."""
