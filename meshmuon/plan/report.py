"""A plan as text for people and as JSON for tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .plan_data import PlanData
from .relays import Relays
from .saved_plan import plan_content
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
    moving = [task for task in plan.tasks if task.wave != NO_WAVE]
    sent, loads = plan.bytes_sent, plan.loads
    heaviest, mean = max(loads.values(), default=0.0), sum(loads.values()) / max(1, len(loads))
    balance = (
        f"{heaviest / mean:.3f} of the mean, {heaviest / plan.bound:.3f} of what any plan must take" if heaviest else "no work"
    )
    buffers = _bytes(plan.buffer_bytes(plan.ranks[0])) if plan.wave_lanes else ""
    lines = [
        f"{_count(len(moving), 'matrix', 'matrices')} with an owner and exchanged, {len(plan.tasks) - len(moving)} computed "
        f"where they are, over {_count(len(plan.ranks), 'rank', 'ranks')} in {_count(len(plan.wave_lanes), 'wave', 'waves')}",
        f"heaviest rank: {balance}",
        f"sent per rank and step: {_bytes(max(sent.values(), default=0))} at most, "
        f"{_bytes(sum(sent.values()) / max(1, len(sent)))} on average; nothing is padded",
        *_between_nodes(plan),
        *_through_relays(plan),
        f"exchange buffers on rank {plan.ranks[0]}: {buffers}" if buffers else "no exchange",
        "",
        table(("matrices", "shape", "layout", "how", "owners", "waves"), _kinds(plan)),
        "",
        table(("rank", "owns", "load", "FLOPs", "sends"), _ranks(plan)),
    ]
    if len(plan.ranks) > _MOST_RANKS_SHOWN:
        lines.append(f"… and {len(plan.ranks) - _MOST_RANKS_SHOWN} more ranks")
    return "\n".join(lines)


def _between_nodes(plan: PlanData) -> list[str]:
    """What leaves nodes, where there are several."""
    if plan.options.nodes is None:
        return []
    between = plan.bytes_between.values()
    share = sum(between) / max(1, sum(plan.bytes_sent.values()))
    count = _count(len(plan.options.nodes.ranks), "node", "nodes")
    return [
        f"between {count}: {_bytes(max(between))} at most, {_bytes(sum(between) / len(between))} on average, {share:.1%} of all"
    ]


def _through_relays(plan: PlanData) -> list[str]:
    """What relays send for others, where the plan has too many peers to send directly."""
    if plan.options.max_peers is None or plan.options.nodes is None:
        return []
    relayed = plan.bytes_relayed.values()
    return [
        f"in two hops between nodes: {plan.most_peers} peers per rank would be more than max_peers={plan.options.max_peers}, "
        f"there are at most {Relays(plan.options.nodes).most_peers}; relays send {_bytes(max(relayed))} at most, "
        f"{_bytes(sum(relayed) / len(relayed))} on average, for others"
    ]


def to_json(plan: PlanData) -> str:
    """The plan as JSON: options, parameters, for every matrix its owner and wave, and what each rank does."""
    sent, between, relayed = plan.bytes_sent, plan.bytes_between, plan.bytes_relayed
    content: dict[str, Any] = {
        **plan_content(plan),
        "buffer_bytes": {str(rank): plan.buffer_bytes(rank) for rank in plan.ranks[:1]},
        "per_rank": {
            str(rank): {
                "load": plan.loads[rank],
                "flops": plan.flops[rank],
                "bytes_sent": sent[rank],
                "bytes_between": between[rank],
                "bytes_relayed": relayed[rank],
            }
            for rank in plan.ranks
        },
    }
    return json.dumps(content)


def how_computed(task: Task) -> str:
    """By whom a matrix is computed, in a few words."""
    if task.wave != NO_WAVE:
        return "shared by replicas" if task.sharded.replicas > 1 else "one owner"
    return "local" if task.sharded.replicas == 1 else "every holder"


def _kinds(plan: PlanData) -> list[tuple[str, ...]]:
    """One line for the matrices of one shape and layout."""
    kinds: dict[tuple[str, str, str], list[Task]] = {}
    for task in plan.tasks:
        shape = f"{task.sharded.rows}×{task.sharded.cols}"
        kinds.setdefault((shape, str(plan.params[task.param].layouts[0]), how_computed(task)), []).append(task)
    lines: list[tuple[str, ...]] = []
    for (shape, layout, how), tasks in kinds.items():
        owners = {task.owner for task in tasks if task.owner != EVERY_HOLDER}
        waves = {task.wave for task in tasks if task.wave != NO_WAVE}
        lines.append((str(len(tasks)), shape, layout, how, str(len(owners) or "-"), str(len(waves) or "-")))
    return lines


def _ranks(plan: PlanData) -> list[tuple[str, ...]]:
    mean = sum(plan.loads.values()) / max(1, len(plan.loads)) or 1.0
    return [
        (str(r), str(plan.computed[r]), f"{plan.loads[r] / mean:.3f}", f"{plan.flops[r]:.3g}", _bytes(plan.bytes_sent[r]))
        for r in plan.ranks[:_MOST_RANKS_SHOWN]
    ]


def _count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
