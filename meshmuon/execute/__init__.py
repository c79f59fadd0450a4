"""Runs plans: ``StepExecutor`` is the interface, ``Executor`` the one that most steps use."""

from .data_parallel import DataParallelExecutor
from .elementwise import Elementwise
from .executor import Executor, StepExecutor
from .reference import ReferenceExecutor
from .rounding import RandomWords, RoundingScratch, advance_counters, chunks_of, elements_held, round_stochastically
from .settings import CommDtype, CommDtypeLike, ExecutorSettings
from .step_param import (
    UNOBSERVED,
    CheckedUpdates,
    MatrixKey,
    Observer,
    StepParam,
    StepSettings,
)
from .update_rule import RULE_STATE, UpdateRule, may_fail, rule_memories
from .views import window_of
