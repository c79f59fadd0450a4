"""Plans and parameters in words, the same on every rank: what ranks compare when they disagree, and show in errors."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import Layout
from ..ortho import Orthogonalizer, Scheme
from ..plan import Plan, PlannedParam
from .plan_input import PlanInput

__all__ = ["description", "failure_text", "how", "owners"]


def owners(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Each matrix that ranks share, and who does what with it when."""
    return tuple(
        (plan.params[task.param].name, f"matrix {task.matrix} to owner {task.owner} in wave {task.wave}")
        for task in plan.tasks
        if not plan.params[task.param].private
    )


def failure_text(failure: Exception | None) -> tuple[str, str] | None:
    """An error's class and text."""
    return None if failure is None else (type(failure).__name__, str(failure))


def how(plan_input: PlanInput) -> str:
    """How a parameter's matrices are computed, in words that are the same on every rank."""
    rule = "" if plan_input.rule is None else f", {_stable_text(plan_input.rule)}"
    return f"{_scheme_text(plan_input.scheme)} in {str(plan_input.compute_dtype).removeprefix('torch.')}{rule}"


def _stable_text(thing: object) -> str:
    """``repr``, unless it is the default one, which holds an address."""
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__repr__ is object.__repr__ else repr(thing)


def _scheme_text(scheme: Scheme | Orthogonalizer | None) -> str:
    if isinstance(scheme, Scheme):
        return "steps " + ", ".join(f"({step[0]:.6g} {step[1]:.6g} {step[2]:.6g})" for step in scheme.steps)
    return f"{getattr(scheme, '__module__', '')}.{getattr(scheme, '__qualname__', type(scheme).__qualname__)}"


def description(plan_input: PlanInput, layouts: Sequence[Layout], parts: Sequence[PlannedParam]) -> tuple[str, str]:
    """A parameter's name, and all of it that must be equal on every rank."""
    where = f"{'×'.join(map(str, plan_input.shape))} {'; '.join(map(str, layouts))}"
    if not parts:
        return plan_input.name, f"{where}, for AdamW"
    work = ", ".join(
        f"{entry.flops} FLOPs" if entry.window is None else f"{entry.window}: {entry.flops} FLOPs" for entry in parts
    )
    return plan_input.name, f"{where}, {parts[0].lane}, lead {parts[0].stack_dims}, {work}, {parts[0].how}"
