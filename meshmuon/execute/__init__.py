"""Runs what was planned."""

from .data_parallel import DataParallelExecutor
from .executor import Executor, StepExecutor
from .reference import ReferenceExecutor
from .settings import DEFAULT_MEMORY_BUDGET, ExecutorSettings
from .work import UpdateRule, Work, WorkSettings, local_part

__all__ = [
    "DEFAULT_MEMORY_BUDGET",
    "DataParallelExecutor",
    "Executor",
    "ExecutorSettings",
    "ReferenceExecutor",
    "StepExecutor",
    "UpdateRule",
    "Work",
    "WorkSettings",
    "local_part",
]
