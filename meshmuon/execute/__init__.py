"""Runs plans: ``StepExecutor`` is the interface, ``Executor`` the one that most steps use."""

from .data_parallel import DataParallelExecutor
from .executor import Executor, StepExecutor
from .reference import ReferenceExecutor
from .settings import DEFAULT_MEMORY_BUDGET, ExecutorSettings
from .step_param import StepParam, StepSettings, UpdateRule

__all__ = [
    "DEFAULT_MEMORY_BUDGET",
    "DataParallelExecutor",
    "Executor",
    "ExecutorSettings",
    "ReferenceExecutor",
    "StepExecutor",
    "StepParam",
    "StepSettings",
    "UpdateRule",
]
