"""A plan as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .plan_data import PlanData
from .tasks import EVERY_HOLDER, NO_WAVE, Task

_MOST_RANKS_SHOWN = 16


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns under a ruled heading."""
    lines = [head, *rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def describe(plan: PlanData) -> str:
    """The plan as text: totals, a table of the kinds of matrices, a table of ranks."""
    moving = sum(task.wave != NO_WAVE for task in plan.tasks)
    lines = [
        f"{counted(moving, 'matrix', 'matrices')} with an owner and exchanged, {len(plan.tasks) - moving} computed "
        f"where they are, over {counted(len(plan.ranks), 'rank')} in {counted(len(plan.wave_lanes), 'wave')}",
        f"heaviest rank: {_balance(plan)}",
        f"sent per rank and step: {_most_and_mean(plan.bytes_sent)}; nothing is padded",
    ]
    nodes = plan.options.nodes
    if nodes is not None:
        share = sum(plan.bytes_between.values()) / max(1, sum(plan.bytes_sent.values()))
        lines.append(
            f"between {counted(len(nodes.ranks), 'node')}: {_most_and_mean(plan.bytes_between)}, {share:.1%} of all"
        )
    buffers = (
        f"exchange buffers on rank {plan.ranks[0]}: {bytes_text(plan.buffer_bytes(plan.ranks[0]))}" if moving else ""
    )
    lines += [
        buffers or "no exchange",
        "",
        table(("matrices", "shape", "layout", "how", "owners", "waves"), _kinds(plan)),
        "",
        table(("rank", "owns", "load", "FLOPs", "sends"), _ranks(plan)),
    ]
    if len(plan.ranks) > _MOST_RANKS_SHOWN:
        lines.append(f"… and {len(plan.ranks) - _MOST_RANKS_SHOWN} more ranks")
    return "\n".join(lines)


def _balance(plan: PlanData) -> str:
    heaviest, total = max(plan.loads.values(), default=0.0), sum(plan.loads.values())
    if not heaviest:
        return "no work"
    # Where weights in host memory are all that costs anything, there is no bound.
    bound = f", {heaviest / plan.bound:.3f} of what any plan must take" if plan.bound else ""
    return f"{heaviest * len(plan.loads) / total:.3f} of the mean{bound}"


def _most_and_mean(by_rank: Mapping[int, int]) -> str:
    most, mean = max(by_rank.values(), default=0), sum(by_rank.values()) / max(1, len(by_rank))
    return f"{bytes_text(most)} at most, {bytes_text(mean)} on average"


def how_computed(task: Task) -> str:
    """Which ranks compute a matrix, in a few words."""
    if task.wave != NO_WAVE:
        return "shared by replicas" if task.sharded.replicas > 1 else "one owner"
    return "local" if task.sharded.replicas == 1 else "every holder"


def _kinds(plan: PlanData) -> list[tuple[str, ...]]:
    """One line for the matrices of one shape and layout."""
    kinds: dict[tuple[str, str, str], list[Task]] = {}
    for task in plan.tasks:
        shape = f"{task.sharded.rows}×{task.sharded.cols}"
        param = plan.params[task.param]
        kinds.setdefault((shape, str(param.layouts[0]), how_computed(task)), []).append(task)
    lines: list[tuple[str, ...]] = []
    for (shape, layout, how), tasks in kinds.items():
        owners = {task.owner for task in tasks if task.owner != EVERY_HOLDER}
        waves = {task.wave for task in tasks if task.wave != NO_WAVE}
        lines.append((str(len(tasks)), shape, layout, how, str(len(owners) or "-"), str(len(waves) or "-")))
    return lines


def _ranks(plan: PlanData) -> list[tuple[str, ...]]:
    mean = sum(plan.loads.values()) / max(1, len(plan.loads)) or 1.0
    return [
        (
            str(r),
            str(plan.computed[r]),
            f"{plan.loads[r] / mean:.3f}",
            f"{plan.flops[r]:.3g}",
            bytes_text(plan.bytes_sent[r]),
        )
        for r in plan.ranks[:_MOST_RANKS_SHOWN]
    ]


def counted(number: int, singular: str, plural: str = "") -> str:
    """``"1 node"``, ``"1,024 nodes"``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def bytes_text(count: float) -> str:
    """``"12.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
