"""Runs plans: ``StepExecutor`` is the interface, ``Executor`` the one that most steps use."""

from .data_parallel import DataParallelExecutor
from .elementwise import Elementwise
from .executor import Executor, StepExecutor
from .int8_momentum import Int8Momentum, MomentumBlocks
from .reference import ReferenceExecutor
from .rounding import Elements, RandomWords, RoundingScratch, advance_counters, chunks_of, elements_held, round_stochastically
from .settings import ExecutorSettings
from .step_param import (
    UNOBSERVED,
    CheckedUpdates,
    MatrixKey,
    Observer,
    RuleChain,
    RunningStep,
    StepParam,
    StepSettings,
    UpdateRule,
    may_fail,
)
from .views import window_of

__all__ = [
    "UNOBSERVED",
    "CheckedUpdates",
    "DataParallelExecutor",
    "Elements",
    "Elementwise",
    "Executor",
    "ExecutorSettings",
    "Int8Momentum",
    "MatrixKey",
    "MomentumBlocks",
    "Observer",
    "RandomWords",
    "ReferenceExecutor",
    "RoundingScratch",
    "RuleChain",
    "RunningStep",
    "StepExecutor",
    "StepParam",
    "StepSettings",
    "UpdateRule",
    "advance_counters",
    "chunks_of",
    "elements_held",
    "may_fail",
    "round_stochastically",
    "window_of",
]
