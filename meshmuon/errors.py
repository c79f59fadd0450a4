"""The errors that meshmuon raises: each says what is wrong, where, what was expected and what to write instead."""

from __future__ import annotations

import sys
from types import FrameType, TracebackType
from typing import cast

_LONGEST = 120


class MeshmuonError(Exception):
    """Base class of all errors that meshmuon raises."""


class ConfigError(MeshmuonError, ValueError):
    """An option, a param group or a scheme is invalid."""


class UnknownOptionError(ConfigError, TypeError):
    """A keyword names no option. A ``TypeError`` too, which Python raises for unknown keywords."""


class GradientError(MeshmuonError, RuntimeError):
    """A gradient cannot be used. Raised before the step has written anything."""


class PlanError(MeshmuonError, RuntimeError):
    """A plan is inconsistent. Raised when it is made, before anything is sent."""


class PlanMismatchError(MeshmuonError, RuntimeError):
    """Ranks would execute different plans. Raised on all of them, before anything is written."""


class StateError(MeshmuonError, ValueError):
    """State does not fit this optimizer, or differs between ranks. Raised before anything is overwritten."""


class TransportError(MeshmuonError, RuntimeError):
    """Communication between ranks failed. The text names the phase; after any phase but the agreement, the step is
    half done.
    """


class UnsupportedError(MeshmuonError, NotImplementedError):
    """A valid request that this version of meshmuon does not support."""


class KernelError(MeshmuonError, RuntimeError):
    """The kernels that ``MESHMUON_KERNELS`` asks for do not run here. Raised before anything is written."""


class OrthogonalizeError(MeshmuonError, RuntimeError):
    """A scheme or a rule of the user failed. The matrices that the text names keep their weights and momentum, on
    all ranks.
    """

    known_to_all: bool = False  # whether all ranks raise it in the same step, and none has diverged
    names: tuple[str, ...] = ()  # of the parameters
    matrices: tuple[tuple[int, int], ...] = ()  # as ``MatrixKey``s of this rank
    where: str = ""  # "rank 1: " if all ranks raise what has failed there
    reason: str = ""  # what the scheme or the rule raised; the first, if it raised several times


class RoutingWarning(UserWarning):
    """A parameter is routed in a way that is valid but probably a mistake."""


class OptionNameWarning(UserWarning):
    """An option was given whose name sounds like something else."""


class InactiveWarning(UserWarning):
    """A step had no gradient for any of Muon's matrices. The next one raises."""


class UntestedTorchWarning(UserWarning):
    """meshmuon is not tested with this version of torch."""


class KernelWarning(RuntimeWarning):
    """A GPU kernel or a CUDA graph cannot be used here. The step runs without it, on all ranks."""


class KeptError:
    """A rank's first error, kept until the other ranks know of it. ``with kept_error:`` keeps what the block raises.

    A ``TransportError`` passes: no other rank can be told any longer.

    The caller that raises the error takes it out first, and no caller stores it in a variable. An error that is
    reachable from the frames of its own traceback, or from their callers, is a reference cycle, which would keep the
    optimizer and its state alive after their last user is gone.
    """

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __bool__(self) -> bool:
        return self.error is not None

    @property
    def text(self) -> tuple[str, str] | None:
        """Class and text of the error, as other ranks are told; None without one."""
        return None if self.error is None else (type(self.error).__name__, str(self.error))

    def keep(self, error: Exception | None) -> None:
        """Keeps an error, unless there is one already."""
        self.error = self.error or error

    def take(self) -> Exception | None:
        """Removes the error and returns it: ``raise … from kept_error.take()``."""
        try:
            return self.error
        finally:
            self.error = None

    def raise_it(self) -> None:
        """Raises the error, if there is one."""
        if self:
            raise cast(Exception, self.take())

    def __enter__(self) -> KeptError:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, TransportError):
            return False
        self.keep(error)
        return True


def level_of_user() -> int:
    """``stacklevel`` of the user's code: between it and the caller are frames of torch and of meshmuon."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "meshmuon"):
        frame, level = frame.f_back, level + 1
    return level


def shown(value: object) -> str:
    """A value as errors show it, also one whose ``repr`` fails."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
