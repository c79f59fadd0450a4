"""A plan as text for people and as JSON for tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..layout import Layout, Mesh, Replicated
from .plan_data import PlanData
from .relays import Relays
from .tasks import EVERY_HOLDER, NO_WAVE, Task

PLAN_VERSION = 1  # of the JSON
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
    buffers = bytes_text(plan.buffer_bytes(plan.ranks[0])) if plan.wave_lanes else ""
    lines = [
        f"{counted(len(moving), 'matrix', 'matrices')} with an owner and exchanged, {len(plan.tasks) - len(moving)} computed "
        f"where they are, over {counted(len(plan.ranks), 'rank')} in {counted(len(plan.wave_lanes), 'wave')}",
        f"heaviest rank: {balance}",
        f"sent per rank and step: {bytes_text(max(sent.values(), default=0))} at most, "
        f"{bytes_text(sum(sent.values()) / max(1, len(sent)))} on average; nothing is padded",
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
    count = counted(len(plan.options.nodes.ranks), "node")
    most, mean = bytes_text(max(between)), bytes_text(sum(between) / len(between))
    return [f"between {count}: {most} at most, {mean} on average, {share:.1%} of all"]


def _through_relays(plan: PlanData) -> list[str]:
    """What relays send for others, where the plan has too many peers to send directly."""
    if plan.options.max_peers is None or plan.options.nodes is None:
        return []
    relayed = plan.bytes_relayed.values()
    return [
        f"in two hops between nodes: {plan.most_peers} peers per rank would be more than {plan.options.max_peers}, "
        f"there are at most {Relays(plan.options.nodes).most_peers}; relays send {bytes_text(max(relayed))} at most, "
        f"{bytes_text(sum(relayed) / len(relayed))} on average, for others"
    ]


def to_json(plan: PlanData) -> str:
    """The plan as JSON: options, parameters, for every matrix its owner and wave, and what each rank does."""
    sent, between, relayed = plan.bytes_sent, plan.bytes_between, plan.bytes_relayed
    content: dict[str, Any] = {
        **_content(plan),
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


def _content(plan: PlanData) -> dict[str, Any]:
    """Everything that makes the same plan again. Layouts and meshes are listed once and referred to by number."""
    layouts: dict[Layout, int] = {}
    meshes: dict[Mesh, int] = {}
    parameters = [
        {
            "name": param.name,
            "shape": list(param.layouts[0].shape),
            "layouts": [str(layout) for layout in param.layouts],
            "layout_numbers": [layouts.setdefault(layout, len(layouts)) for layout in param.layouts],
            "flops_per_matrix": param.flops,
            "bytes_per_element": param.itemsize,
            "stack_dims": param.stack_dims,
            "lane": list(param.lane) if isinstance(param.lane, tuple) else str(param.lane),
            "share": param.share,
            "private": param.private,
            "window": None if param.window is None else [asdict(indices) for indices in param.window],
            "staged": param.staged,
            "how": param.how,
            "compute_dtype": param.compute_dtype,
        }
        for param in plan.params
    ]
    options = plan.options
    return {
        "version": PLAN_VERSION,
        "digest": plan.digest,
        "ranks": list(plan.ranks),
        "options": {
            "replicas": options.replicas,
            "chunk_size": options.chunk_size,
            "budget": options.budget,
            "in_flight": options.in_flight,
            "max_peers": options.max_peers,
            "cost": asdict(options.cost),
        },
        "nodes": None if options.nodes is None else [list(node) for node in options.nodes.ranks],
        "waves": [{"lane": str(lane), "parameter": _first_param(plan, wave)} for wave, lane in enumerate(plan.wave_lanes)],
        "layouts": [
            {
                "shape": list(layout.shape),
                "mesh": meshes.setdefault(layout.mesh, len(meshes)),
                "placements": [None if isinstance(p, Replicated) else [p.dim, p.split_factor] for p in layout.placements],
            }
            for layout in layouts
        ],
        "meshes": [{"shape": list(mesh.shape), "ranks": list(mesh.ranks)} for mesh in meshes],
        "parameters": parameters,
        "matrices": [
            {
                "parameter": plan.params[task.param].name,
                "param": task.param,
                "matrix": task.matrix,
                "owner": None if task.owner == EVERY_HOLDER else task.owner,
                "wave": None if task.wave == NO_WAVE else task.wave,
                "pieces": len(task.sharded.pieces),
                "replicas": task.sharded.replicas,
                "cost": task.cost,
            }
            for task in plan.tasks
        ],
    }


def _first_param(plan: PlanData, wave: int) -> int:
    return next(task.param for task in plan.tasks if task.wave == wave)


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
        (str(r), str(plan.computed[r]), f"{plan.loads[r] / mean:.3f}", f"{plan.flops[r]:.3g}", bytes_text(plan.bytes_sent[r]))
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
