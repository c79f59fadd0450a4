"""What ``meshmuon plan`` reports: one nested structure of plain data, which ``--json`` writes and the text reads.

Tables are lists of rows; ``ranks`` has a column for each figure, with an entry per rank. docs/plan.md describes the
keys.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...matrices import with_stars
from ...plan import EVERY_HOLDER, NO_WAVE, Plan, Task, Wire, how_computed
from ..predict.counts import peers_of_step
from ..predict.timeline import ON_LINKS
from .sharding import MeshAxes
from .simulation import MEMORY_KINDS, SimulatedStage, Simulation

FORMAT, VERSION = "meshmuon plan report", 1
# tensors like the weight that AdamW has, of four
_OF_ADAMW = {"parameters": 1, "gradients": 1, "adamw_state": 2, "total": 4}
_ESTIMATED = ("scratch", "connections")
_MOST_BLOCKS = 64  # of the map of traffic


class Figures(dict[str, Any]):
    """Plain data for JSON, whose keys can be read as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def build_report(simulation: Simulation, command: str, advice: Sequence[str]) -> Figures:
    """The report, without comparisons."""
    stages = simulation.stages
    return Figures(
        format=FORMAT,
        version=VERSION,
        command=command,
        model=_model(simulation),
        mesh=_mesh(simulation),
        machine=Figures(
            (key, getattr(simulation.machine, key)) for key in ("name", "title", "source", "device", "memory_bytes")
        ),
        options=_options(simulation),
        stages=[_stage(number, stage) for number, stage in enumerate(stages)],
        step=_step(simulation),
        balance=balance_of(simulation),
        memory=[_memory(simulation, kind) for kind in (*MEMORY_KINDS, "total")],
        exchanges=[row for number, stage in enumerate(stages) for row in _exchanges(number, stage)],
        ranks=_ranks(simulation),
        params=[row for stage in stages for row in (*_muon_params(stage.plan), *_adamw_params(stage))],
        traffic=[bytes_between_blocks(stage.plan) for stage in stages],
        timeline=list(_timeline(simulation.slowest)),  # of the slowest and of the fastest rank
        advice=list(advice),
        choices=[],  # with other options, if asked for: rows of ``choice_of``
        meshes=[],  # on other meshes, if asked for: rows of ``choice_of``
    )


def choice_of(simulation: Simulation, label: str, *, chosen: bool) -> Figures:
    """A simulation as one row of a comparison."""
    plans = [stage.plan for stage in simulation.stages]
    return Figures(
        label=label,
        chosen=chosen,  # whether this is what the report is about
        seconds=simulation.seconds,
        heaviest_over_mean=max(_over_mean(plan) for plan in plans),
        bytes_sent=max(max(plan.bytes_sent.values()) for plan in plans),  # of the rank that sends most
        # between nodes, of the rank that sends most there
        bytes_between=max(max(plan.bytes_between.values()) for plan in plans),
        most_peers=simulation.most_peers,
        buffers=simulation.most_bytes("exchange_buffers"),
        memory=simulation.most_bytes("total"),
        share=simulation.share,
        refused="",  # why it cannot be planned
    )


def refused_choice(label: str, reason: str) -> Figures:
    whole = dict.fromkeys(("bytes_sent", "bytes_between", "most_peers", "buffers", "memory"), 0)
    numbers = dict.fromkeys(("seconds", "heaviest_over_mean", "share"), 0.0) | whole
    return Figures(label=label, chosen=False, refused=reason, **numbers)


def _over_mean(plan: Plan) -> float:
    total = sum(plan.loads.values())
    return max(plan.loads.values()) * len(plan.loads) / total if total else 1.0


def _model(simulation: Simulation) -> Figures:
    model = simulation.model
    muon = sum(param.size for param in model.params if param.use_muon)
    return Figures(
        name=model.name,
        title=model.title,
        source=model.source,
        parameters=model.size,
        active_parameters=model.active_size,  # that a token uses
        muon_parameters=muon,
        adamw_parameters=model.size - muon,
        # That Muon orthogonalises, each expert and each part of a fused weight separately.
        matrices=sum(len({(task.param, task.matrix) for task in stage.plan.tasks}) for stage in simulation.stages),
        layers=model.layers,
        experts=model.experts,
    )


def _mesh(simulation: Simulation) -> Figures:
    sharding, stages, per_node = simulation.sharding, simulation.stages, simulation.machine.ranks_per_node
    nodes = stages[0].plan.options.nodes if len(stages) == 1 else None
    ranks = [rank for stage in stages for rank in stage.plan.ranks]
    sizes = Counter(rank // per_node if nodes is None else nodes.node_of(rank) for rank in ranks)
    alone = sharding.ranks == 1
    return Figures(
        text=str(sharding),
        axes=asdict(sharding) if isinstance(sharding, MeshAxes) else {},  # by name; none for a layout from a file
        ranks=sharding.ranks,
        nodes=1 if alone else len(sizes),
        ranks_per_node=1 if alone else max(sizes.values()),
    )


def _options(simulation: Simulation) -> Figures:
    options = simulation.options
    stage = next((stage for stage in simulation.stages if stage.plan.params), simulation.stages[0])
    wires = sorted(
        {str(param.lane[1]).removeprefix("torch.") for param in stage.plan.params if isinstance(param.lane, tuple)}
    )
    return Figures(
        replicas=options.replicas,
        comm_dtype=", ".join(wires),
        compute_dtype=stage.planned.compute_dtype,
        param_dtype=str(options.param_dtype).removeprefix("torch."),
        scheme=str(options.scheme),
        memory_budget=stage.plan.options.budget,
        warmup_step=stage.plan.options.in_flight - 1,
    )


def _stage(number: int, stage: SimulatedStage) -> Figures:
    """One pipeline stage; the whole model if there are no stages."""
    return Figures(
        stage=number,
        first_rank=stage.plan.ranks[0],
        last_rank=stage.plan.ranks[-1],
        digest=stage.plan.digest,  # as a real optimizer would have it
        waves=len(stage.plan.wave_lanes),
        waves_in_flight=stage.plan.options.in_flight,
        seconds=stage.timeline.seconds,
    )


def _step(simulation: Simulation) -> Figures:
    """Seconds of an optimizer step, on its slowest rank. The parts from "orthogonalise" to "host" add up to
    "seconds".
    """
    timeline, parts = simulation.slowest.timeline, defaultdict(float, simulation.slowest.timeline.seconds_by_kind)
    tokens = simulation.workload.tokens_per_step
    return Figures(
        rank=timeline.slowest,
        seconds=timeline.seconds,
        bound=timeline.bound,  # that no order of the waves can undercut
        orthogonalise=parts["orthogonalise"],  # matrices that it owns
        local=parts["local"],  # all that is done with matrices that stay where they are
        elementwise=parts["momentum"] + parts["update"],  # of the others
        exchange_waited_for=timeline.waited_for,  # waiting for exchanges in flight; where cores send, sending
        others_waited_for=parts["others"],  # waiting for ranks that come late to an exchange
        adamw=parts["adamw"],
        host=parts["host"],  # that the device waits for the host
        # AdamW on all parameters, for comparison
        adamw_alone=max(stage.adamw_alone_seconds for stage in simulation.stages),
        exchange=timeline.exchanging,  # in which the links of the slowest stage are busy
        exchange_hidden=timeline.hidden,  # of these, while the slowest rank works on something else
        launches=max(timeline.work.launches, default=0),  # kernels, on the rank that has most of them; 0 on CPU
        # in which the host of a GPU prepares the step, beside the device
        host_ahead=max(timeline.work.host_ahead, default=0.0),
        # in the first step, beside "seconds"; null if unknown
        seconds_to_compile=simulation.machine.seconds_to_compile,
        flops=sum(sum(stage.plan.flops.values()) for stage in simulation.stages),
        tokens_per_step=tokens,
        tokens_per_rank=tokens / simulation.sharding.ranks,
        mfu=simulation.workload.mfu,  # the assumed use of the model's FLOPs in forward and backward
        training_seconds=simulation.training_seconds,  # forward and backward of that many tokens
        share=simulation.share,  # of the optimizer in forward, backward and optimizer step together
    )


def balance_of(simulation: Simulation) -> Figures:
    """The heaviest rank and its most expensive matrix."""
    plan = max((stage.plan for stage in simulation.stages), key=lambda plan: max(plan.loads.values(), default=0.0))
    heaviest = max(plan.loads, key=lambda rank: plan.loads[rank])
    load, mean = plan.loads[heaviest], sum(plan.loads.values()) / len(plan.loads)
    tasks = [
        task
        for task in plan.tasks
        if task.owner == heaviest or (task.owner == EVERY_HOLDER and heaviest in task.sharded.holdings)
    ]
    largest, name = max(tasks, key=lambda task: task.cost, default=None), ""
    if largest is not None:
        param = plan.params[largest.param]
        name = f"{param.name}[{largest.matrix}]" if param.stack_dims else param.name
    return Figures(
        heaviest_rank=heaviest,
        heaviest_over_mean=load / mean if mean else 1.0,
        heaviest_over_bound=load / plan.bound if plan.bound else 1.0,  # ÷ what no plan of whole matrices can avoid
        idle_ranks=sum(count == 0 for stage in simulation.stages for count in stage.plan.computed.values()),
        matrix=name,
        matrix_shape=(0, 0) if largest is None else (largest.sharded.rows, largest.sharded.cols),
        matrix_share=0.0 if largest is None or not load else largest.cost / load,  # of the heaviest rank's cost
    )


def _memory(simulation: Simulation, kind: str) -> Figures:
    tensors = [stage.memory[kind] for stage in simulation.stages]
    return Figures(
        kind=kind,
        most=simulation.most_bytes(kind),  # on the rank that has most of it
        mean=sum(float(tensor.sum()) for tensor in tensors) / sum(tensor.numel() for tensor in tensors),
        adamw_most=simulation.most_bytes("adamw_alone") // 4 * _OF_ADAMW.get(kind, 0),  # if AdamW stepped everything
        estimated=kind in _ESTIMATED,
    )


def _exchanges(number: int, stage: SimulatedStage) -> Iterator[Figures]:
    """The gather and the scatter of every wave."""
    plan, matrices = stage.plan, Counter(task.wave for task in stage.plan.tasks)
    for wave, lane in enumerate(plan.wave_lanes):
        for kind, peers in zip(("gather", "scatter"), stage.peers[wave], strict=True):
            exchange, seconds = getattr(plan.traffic[wave], kind), getattr(stage.timeline.work.waves[wave], kind)
            inside, between = sum(exchange.sent_inside), sum(exchange.sent_between)
            yield Figures(
                stage=number,
                wave=wave,
                kind=kind,
                dtypes=", ".join(map(str, lane)) if isinstance(lane, tuple) else str(lane),
                matrices=matrices[wave],
                seconds=max(seconds),
                bytes_inside=inside,  # nodes, sent by all ranks
                bytes_between=between,  # nodes
                most_peers=max(peers.peers),  # of a rank
                mean_peers=sum(peers.peers) / len(peers.peers),
                messages=peers.messages,
                mean_message=(inside + between) / peers.messages if peers.messages else 0.0,  # bytes
                largest_message=peers.largest,  # bytes
            )


def _ranks(simulation: Simulation) -> Figures:
    """Columns, with an entry per rank in each."""
    columns: dict[str, list[Any]] = defaultdict(list)
    for stage in simulation.stages:
        plan, memory = stage.plan, stage.memory
        columns["rank"] += plan.ranks
        columns["matrices"] += [plan.computed[rank] for rank in plan.ranks]  # that it orthogonalises
        columns["flops"] += [plan.flops[rank] for rank in plan.ranks]
        columns["seconds"] += stage.timeline.ends.values()  # until it has ended the step
        columns["orthogonalise_seconds"] += stage.orthogonalise_seconds
        columns["waited_seconds"] += stage.timeline.waited
        exchanges = [exchange for wave in plan.traffic for exchange in (wave.gather, wave.scatter)]
        # bytes, inside and between nodes
        for name in ("sent_inside", "sent_between", "received_inside", "received_between"):
            nothing = [0] * len(plan.ranks)
            columns[name] += map(sum, zip(nothing, *(getattr(exchange, name) for exchange in exchanges), strict=True))
        columns["peers"] += peers_of_step(plan)  # ranks with which it exchanges anything
        for kind in MEMORY_KINDS:
            columns[kind] += memory[kind].tolist()
        columns["memory"] += memory["total"].tolist()
        columns["adamw_alone"] += memory["adamw_alone"].tolist()  # what AdamW would need instead of Muon
    assert len(set(map(len, columns.values()))) == 1
    return Figures(columns)


def _muon_params(plan: Plan) -> Iterator[Figures]:
    """One row for all parameters of one name, number aside, and one shape; of a fused weight, one per part."""
    tasks: dict[int, list[Task]] = defaultdict(list)
    for task in plan.tasks:
        tasks[task.param].append(task)
    alike: dict[tuple[str, tuple[int, ...], str, object, str], list[int]] = {}
    for k, param in enumerate(plan.params):
        how = how_computed(tasks[k][0]) if tasks[k] else ""
        key = (with_stars(param.name), param.layouts[0].shape, str(param.layouts[0]), param.window, how)
        alike.setdefault(key, []).append(k)
    parts: dict[str, int] = defaultdict(int)
    for (name, shape, layout, window, how), params in alike.items():
        own = [task for k in params for task in tasks[k]]
        parts[name] += window is not None
        yield Figures(
            name=name,  # with * for the number
            part=None if window is None else parts[name] - 1,  # of a fused weight, which of its parts
            shape=shape,
            count=len(params),
            optimizer="muon",
            layout=layout,
            matrices=len({(task.param, task.matrix) for task in own}),  # in all of them
            matrix_shape=(own[0].sharded.rows, own[0].sharded.cols) if own else None,
            how=how,  # "one owner", "shared by replicas", "local", "every holder"
            flops=float(sum(plan.params[task.param].flops for task in own)),
            owners=len({task.owner for task in own if task.owner != EVERY_HOLDER}),  # ranks that own some of them
            bytes_sent=sum(_bytes_of(task, plan.params[task.param].wire) for task in own),  # per step
        )


def _adamw_params(stage: SimulatedStage) -> list[Figures]:
    placed = zip(stage.planned.placed, stage.planned.layouts, strict=True)
    rows = (
        (with_stars(item.param.name), item.param.shape, str(layout))
        for item, layout in placed
        if not item.param.use_muon
    )
    nothing = {"matrices": 0, "matrix_shape": None, "how": "", "flops": 0.0, "owners": 0, "bytes_sent": 0}
    return [
        Figures(name=name, part=None, shape=shape, count=count, optimizer="adamw", layout=layout, **nothing)
        for (name, shape, layout), count in Counter(rows).items()
    ]


def _bytes_of(task: Task, wire: Wire) -> int:
    if task.wave == NO_WAVE:
        return 0
    sharded, nbytes = task.sharded, [wire.of(piece) for piece in task.sharded.pieces]
    own = nbytes[sharded.holdings[task.owner][0]]
    return sum(one.gather + one.scatter * sharded.replicas for one in nbytes) - own.gather - own.scatter


def _timeline(stage: SimulatedStage) -> Iterator[Figures]:
    """What the slowest and the fastest rank of a stage do, in seconds from the beginning of the step."""
    work = stage.orthogonalise_seconds
    for at in dict.fromkeys((work.index(max(work)), work.index(min(work)))):
        rank = stage.plan.ranks[at]
        for kind, wave, start, end in stage.timeline.spans(rank):
            if kind != "wait":
                track = "links" if kind in ON_LINKS else "device"
                yield Figures(rank=rank, track=track, name=kind, wave=wave, start=start, seconds=end - start)


def bytes_between_blocks(plan: Plan) -> Figures:
    """What blocks of ranks send each other in a step: nodes, several nodes where there are many, or ranks on one node.

    In both directions, from the first rank of every piece to its last.
    """
    position = {rank: k for k, rank in enumerate(plan.ranks)}
    per_node = 1 if plan.options.nodes is None else max(map(len, plan.options.nodes.ranks))
    block_ranks = per_node * math.ceil(math.ceil(len(position) / per_node) / _MOST_BLOCKS)
    count = math.ceil(len(position) / block_ranks)

    @cache
    def held_by_block(number: int, replica: int | None) -> Tensor:
        """(blocks,): bytes that one replica of a matrix sends, or that all receive."""
        nbytes, holdings = plan.wave_owners.kinds.nbytes[number], plan.wave_owners.matrices[number].holdings
        held = [
            (position[rank], nbytes[piece][replica is None])
            for rank, (piece, of) in holdings.items()
            if replica in (None, of)
        ]
        positions, sizes = map(torch.tensor, zip(*held, strict=True))
        return torch.zeros(count, dtype=torch.int64).index_add_(0, positions // block_ranks, sizes)

    # (number of the matrix, owner) → how many of them, in all waves
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for wave in plan.wave_owners.owned:
        for number, of_owners in wave.items():
            for owner, count_of_owner in of_owners.items():
                counts[number, owner] += count_of_owner
    blocks = torch.zeros(count, count, dtype=torch.int64)
    for (number, owner), times in counts.items():
        (piece, replica), block = plan.wave_owners.matrices[number].holdings[owner], position[owner] // block_ranks
        blocks[:, block] += held_by_block(number, replica) * times
        blocks[block] += held_by_block(number, None) * times
        blocks[block, block] -= sum(plan.wave_owners.kinds.nbytes[number][piece][:2]) * times
    return Figures(ranks_per_block=block_ranks, bytes=blocks.tolist())  # bytes[sender][receiver]
