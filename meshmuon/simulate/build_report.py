"""From a simulation to its report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields

from torch import Tensor

from ..matrices import with_stars
from ..plan import EVERY_HOLDER, NO_WAVE, Task, how_computed
from .blocks import bytes_between_blocks
from .meshes import MeshAxes
from .report import (
    BalanceFigures,
    BlockTraffic,
    ChoiceFigures,
    ExchangeFigures,
    MachineFigures,
    MemoryFigures,
    MeshFigures,
    ModelFigures,
    OptionFigures,
    ParamFigures,
    RankColumns,
    Report,
    SpanFigures,
    StageFigures,
    StepFigures,
)
from .sharding import MeshSharding
from .simulation import Simulation, Stage, dtype_name

_OF_ADAMW = {"parameters": 1, "gradients": 1, "adamw_state": 2}  # tensors like the weight that AdamW has
_ESTIMATED = ("scratch", "connections")


def build_report(simulation: Simulation, command: str, advice: Sequence[str]) -> Report:
    """The report, without comparisons."""
    return Report(
        command=command,
        model=_model(simulation),
        mesh=_mesh(simulation),
        machine=_machine(simulation),
        options=_options(simulation),
        stages=[_stage(number, stage) for number, stage in enumerate(simulation.stages)],
        step=_step(simulation),
        balance=balance_of(simulation),
        memory=_memory(simulation),
        exchanges=[row for number, stage in enumerate(simulation.stages) for row in _exchanges(number, stage)],
        ranks=_ranks(simulation),
        params=[row for stage in simulation.stages for row in _params(stage)],
        traffic=[_blocks(stage) for stage in simulation.stages],
        timeline=_timeline(simulation.slowest),
        advice=list(advice),
    )


def choice_of(simulation: Simulation, label: str, *, chosen: bool) -> ChoiceFigures:
    """A simulation as one row of a comparison."""
    return ChoiceFigures(
        label=label,
        chosen=chosen,
        seconds=simulation.seconds,
        heaviest_over_mean=simulation.heaviest_over_mean,
        bytes_sent=simulation.most_sent(between=False),
        bytes_between=simulation.most_sent(between=True),
        most_peers=simulation.most_peers,
        buffers=simulation.most_buffers,
        memory=simulation.most_memory,
        share=simulation.share,
    )


def refused_choice(label: str, reason: str) -> ChoiceFigures:
    """A row for what cannot be planned."""
    return ChoiceFigures(label, False, 0.0, 0.0, 0, 0, 0, 0, 0, 0.0, reason)


def _model(simulation: Simulation) -> ModelFigures:
    model = simulation.model
    muon = sum(param.size for param in model.params if param.use_muon)
    matrices = sum(len({(task.param, task.matrix) for task in stage.planned.plan.tasks}) for stage in simulation.stages)
    return ModelFigures(
        name=model.name,
        title=model.title,
        source=model.source,
        parameters=model.size,
        active_parameters=model.active_size,
        muon_parameters=muon,
        adamw_parameters=model.size - muon,
        matrices=matrices,
        layers=model.layers,
        experts=model.experts,
    )


def _mesh(simulation: Simulation) -> MeshFigures:
    sharding, nodes = simulation.sharding, dict[int, list[int]]()
    if sharding.ranks > 1:
        for rank, node in simulation.node_of.items():
            nodes.setdefault(node, []).append(rank)
    axes: MeshAxes | None = sharding.axes if isinstance(sharding, MeshSharding) else None
    return MeshFigures(
        text=sharding.text,
        axes=axes.axis_sizes if axes is not None else {},
        ranks=sharding.ranks,
        nodes=max(1, len(nodes)),
        ranks_per_node=max((len(node) for node in nodes.values()), default=sharding.ranks),
        relayed=any(stage.planned.plan.relayed for stage in simulation.stages),
    )


def _machine(simulation: Simulation) -> MachineFigures:
    machine = simulation.machine
    return MachineFigures(machine.name, machine.title, machine.source, machine.device, machine.memory_bytes)


def _options(simulation: Simulation) -> OptionFigures:
    options = simulation.options
    planned = next((stage.planned for stage in simulation.stages if stage.planned.plan.params), simulation.stages[0].planned)
    wires = sorted({str(param.lane[1]).removeprefix("torch.") for param in planned.plan.params if isinstance(param.lane, tuple)})
    return OptionFigures(
        replicas=options.replicas,
        comm_dtype=", ".join(wires),
        compute_dtype=dtype_name(planned.compute_dtype),
        param_dtype=dtype_name(options.param_dtype),
        scheme=str(options.scheme),
        memory_budget=options.memory_budget,
        waves_ahead=options.waves_ahead,
    )


def _stage(number: int, stage: Stage) -> StageFigures:
    plan = stage.planned.plan
    return StageFigures(
        stage=number,
        first_rank=plan.ranks[0],
        last_rank=plan.ranks[-1],
        digest=plan.digest,
        waves=len(plan.wave_lanes),
        waves_in_flight=plan.options.in_flight,
        seconds=stage.timeline.seconds,
    )


def _step(simulation: Simulation) -> StepFigures:
    stage = simulation.slowest
    timeline, work = stage.timeline, stage.prediction.work
    slowest = timeline.ranks.index(timeline.slowest)
    return StepFigures(
        seconds=timeline.seconds,
        orthogonalise=max(max(orthogonalise_seconds(one)) for one in simulation.stages),
        exchange=timeline.exchanging,
        exchange_hidden=timeline.hidden,
        exchange_waited_for=timeline.waited_for,
        elementwise=sum(wave.momentum[slowest] + wave.update[slowest] for wave in work.waves),
        adamw=work.adamw[slowest],
        host=host_seconds(stage),
        flops=sum(sum(one.planned.plan.flops.values()) for one in simulation.stages),
        tokens_per_step=simulation.workload.tokens_per_step,
        mfu=simulation.workload.mfu,
        training_seconds=simulation.training_seconds,
        share=simulation.share,
    )


def orthogonalise_seconds(stage: Stage) -> list[float]:
    """By rank: seconds in which it orthogonalises."""
    work = stage.prediction.work
    return [sum(parts) for parts in zip(work.local, *(wave.orthogonalise for wave in work.waves), strict=True)]


def host_seconds(stage: Stage) -> float:
    """Seconds of the host on the rank where it has most to do, ahead of its device or before its cores begin."""
    work = stage.prediction.work
    return max((*work.host, *work.host_ahead))


def _blocks(stage: Stage) -> BlockTraffic:
    blocks = bytes_between_blocks(stage.planned.plan)
    return BlockTraffic(blocks.block_ranks, blocks.between.tolist())


def balance_of(simulation: Simulation) -> BalanceFigures:
    """The heaviest rank and what makes it so."""
    stage = max(simulation.stages, key=lambda one: max(one.planned.plan.loads.values(), default=0.0))
    plan = stage.planned.plan
    heaviest = max(plan.loads, key=lambda rank: plan.loads[rank])
    load, mean = plan.loads[heaviest], sum(plan.loads.values()) / len(plan.loads)
    tasks = [
        task
        for task in plan.tasks
        if task.owner == heaviest or (task.owner == EVERY_HOLDER and heaviest in task.sharded.holdings)
    ]
    largest = max(tasks, key=lambda task: task.cost, default=None)
    name = "" if largest is None else _matrix_name(stage, largest)
    return BalanceFigures(
        heaviest_rank=heaviest,
        heaviest_over_mean=load / mean if mean else 1.0,
        heaviest_over_bound=load / plan.bound if plan.bound else 1.0,
        idle_ranks=sum(count == 0 for one in simulation.stages for count in one.planned.plan.computed.values()),
        matrix=name,
        matrix_shape=(0, 0) if largest is None else (largest.sharded.rows, largest.sharded.cols),
        matrix_share=0.0 if largest is None or not load else largest.cost / load,
    )


def _matrix_name(stage: Stage, task: Task) -> str:
    param = stage.planned.plan.params[task.param]
    return f"{param.name}[{task.matrix}]" if param.stack_dims else param.name


def _memory(simulation: Simulation) -> list[MemoryFigures]:
    rows, weight = [], simulation.options.param_dtype.itemsize
    for kind in (*simulation.stages[0].memory.KINDS, "total"):
        tensors: list[Tensor] = [getattr(stage.memory, kind) for stage in simulation.stages]
        count = sum(tensor.numel() for tensor in tensors)
        alone = [stage.memory.adamw_alone for stage in simulation.stages]
        share = 1.0 if kind == "total" else _OF_ADAMW.get(kind, 0) / 4
        rows.append(
            MemoryFigures(
                kind=kind,
                most=max(int(tensor.max()) for tensor in tensors),
                mean=sum(float(tensor.sum()) for tensor in tensors) / count,
                adamw_most=max(round(int(tensor.max()) * share) // weight * weight for tensor in alone),
                estimated=kind in _ESTIMATED,
            )
        )
    return rows


def _exchanges(number: int, stage: Stage) -> list[ExchangeFigures]:
    plan, rows = stage.planned.plan, []
    matrices: dict[int, int] = defaultdict(int)
    for task in plan.tasks:
        matrices[task.wave] += 1
    for wave, lane in enumerate(plan.wave_lanes):
        traffic, seconds_of, (gather, scatter) = plan.traffic[wave], stage.prediction.work.waves[wave], plan.peers[wave]
        for kind, exchange, seconds, peers in (
            ("gather", traffic.gather, seconds_of.gather, gather),
            ("scatter", traffic.scatter, seconds_of.scatter, scatter),
        ):
            inside, between = sum(exchange.sent_inside), sum(exchange.sent_between)
            rows.append(
                ExchangeFigures(
                    stage=number,
                    wave=wave,
                    kind=kind,
                    dtypes=", ".join(map(str, lane)) if isinstance(lane, tuple) else str(lane),
                    matrices=matrices[wave],
                    seconds=max(seconds),
                    bytes_inside=inside,
                    bytes_between=between,
                    most_peers=max(peers.peers),
                    mean_peers=sum(peers.peers) / len(peers.peers),
                    messages=peers.messages,
                    mean_message=(inside + between) / peers.messages if peers.messages else 0.0,
                    largest_message=peers.largest,
                )
            )
    return rows


def _ranks(simulation: Simulation) -> RankColumns:
    columns = RankColumns()
    for stage in simulation.stages:
        plan, memory = stage.planned.plan, stage.memory
        columns.rank.extend(plan.ranks)
        columns.matrices.extend(plan.computed[rank] for rank in plan.ranks)
        columns.flops.extend(plan.flops[rank] for rank in plan.ranks)
        columns.seconds.extend(stage.timeline.ends.values())
        columns.orthogonalise_seconds.extend(orthogonalise_seconds(stage))
        columns.waited_seconds.extend(stage.timeline.waited)
        for name in ("sent_inside", "sent_between", "received_inside", "received_between"):
            nothing = [0] * len(plan.ranks)
            getattr(columns, name).extend(map(sum, zip(nothing, *(getattr(one, name) for one in stage.exchanges), strict=True)))
        columns.peers.extend(plan.peers_of_step)
        for kind in memory.KINDS:
            getattr(columns, kind).extend(getattr(memory, kind).tolist())
        columns.memory.extend(memory.total.tolist())
        columns.adamw_alone.extend(memory.adamw_alone.tolist())
    assert len({len(getattr(columns, column.name)) for column in fields(columns)}) == 1
    return columns


def _params(stage: Stage) -> list[ParamFigures]:
    """One row for all parameters of one name, number aside, and one shape; of a fused weight, one per part."""
    planned, plan = stage.planned, stage.planned.plan
    tasks: dict[int, list[Task]] = defaultdict(list)
    for task in plan.tasks:
        tasks[task.param].append(task)
    rows: dict[tuple[str, tuple[int, ...], str, object, str], list[int]] = {}
    for k, param in enumerate(plan.params):
        how = how_computed(tasks[k][0]) if tasks[k] else ""
        key = (with_stars(param.name), param.layouts[0].shape, str(param.layouts[0]), param.window, how)
        rows.setdefault(key, []).append(k)
    figures = []
    parts: dict[str, int] = defaultdict(int)
    for (name, shape, layout, window, how), params in rows.items():
        own = [task for k in params for task in tasks[k]]
        first = own[0].sharded if own else None
        parts[name] += window is not None
        figures.append(
            ParamFigures(
                name=name,
                part=None if window is None else parts[name] - 1,
                shape=shape,
                count=len(params),
                optimizer="muon",
                layout=layout,
                matrices=len({(task.param, task.matrix) for task in own}),
                matrix_shape=None if first is None else (first.rows, first.cols),
                how=how,
                flops=float(sum(plan.params[task.param].flops for task in own)),
                owners=len({task.owner for task in own if task.owner != EVERY_HOLDER}),
                bytes_sent=sum(_bytes_of(task, plan.params[task.param].itemsize) for task in own),
            )
        )
    adamw: dict[tuple[str, tuple[int, ...], str], int] = defaultdict(int)
    for item, held in zip(planned.placed, planned.layouts, strict=True):
        if not item.param.use_muon:
            adamw[with_stars(item.param.name), item.param.shape, str(held)] += 1
    for (name, shape, layout), count in adamw.items():
        figures.append(ParamFigures(name, None, shape, count, "adamw", layout, 0, None, "", 0.0, 0, 0))
    return figures


def _bytes_of(task: Task, itemsize: int) -> int:
    if task.wave == NO_WAVE:
        return 0
    own = task.sharded.sizes[task.sharded.holdings[task.owner][0]]
    return itemsize * (task.sharded.size * (1 + task.sharded.replicas) - 2 * own)


def _timeline(stage: Stage) -> list[SpanFigures]:
    """What the slowest and the fastest rank of a stage do."""
    ranks = stage.planned.plan.ranks
    work = orthogonalise_seconds(stage)
    rows = []
    for at in dict.fromkeys((work.index(max(work)), work.index(min(work)))):
        for span in stage.timeline.spans(ranks[at]):
            if span.kind != "wait":
                track = "links" if span.on_links else "device"
                rows.append(SpanFigures(ranks[at], track, span.kind, span.wave, span.start, span.end - span.start))
    return rows
