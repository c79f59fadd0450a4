"""From a simulation to its report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields

from torch import Tensor

from ..matrices import with_stars
from ..plan import EVERY_HOLDER, NO_WAVE, Task, how_computed
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
from .simulation import Simulation, Stage, dtype_name, received_bytes, sent_bytes
from .traffic import Direction

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
        traffic=[BlockTraffic(stage.traffic.block_ranks, stage.traffic.between_blocks.tolist()) for stage in simulation.stages],
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
        relayed=any(stage.traffic.relayed for stage in simulation.stages),
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
    timeline, work = stage.timeline, stage.work
    slowest = int(timeline.end.argmax())
    return StepFigures(
        seconds=timeline.seconds,
        orthogonalise=max(float(orthogonalise_seconds(one).max()) for one in simulation.stages),
        exchange=timeline.exchanging,
        exchange_hidden=timeline.hidden,
        exchange_waited_for=timeline.waited_for,
        elementwise=float((work.momentum.sum(0) + work.update.sum(0))[slowest]),
        adamw=float(work.adamw[slowest]),
        host=float(work.host.max()),
        flops=sum(sum(one.planned.plan.flops.values()) for one in simulation.stages),
        tokens_per_step=simulation.workload.tokens_per_step,
        mfu=simulation.workload.mfu,
        training_seconds=simulation.training_seconds,
        share=simulation.share,
    )


def orthogonalise_seconds(stage: Stage) -> Tensor:
    """(ranks,): seconds in which each rank orthogonalises."""
    return stage.work.orthogonalise.sum(0) + stage.work.local


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
        for kind, direction, seconds in (
            ("gather", stage.traffic.gather, stage.work.gather),
            ("scatter", stage.traffic.scatter, stage.work.scatter),
        ):
            inside, total = int(direction.sent_inside[wave].sum()), int(direction.sent[wave].sum())
            messages = int(direction.messages[wave])
            rows.append(
                ExchangeFigures(
                    stage=number,
                    wave=wave,
                    kind=kind,
                    dtypes=", ".join(map(str, lane)) if isinstance(lane, tuple) else str(lane),
                    matrices=matrices[wave],
                    seconds=float(seconds[wave].max()),
                    bytes_inside=inside,
                    bytes_between=total - inside,
                    most_peers=int(direction.peers[wave].max()),
                    mean_peers=_mean_peers(direction, wave),
                    messages=messages,
                    mean_message=total / messages if messages else 0.0,
                    largest_message=int(direction.largest[wave]),
                )
            )
    return rows


def _mean_peers(direction: Direction, wave: int) -> float:
    return float(direction.peers[wave].double().mean())


def _ranks(simulation: Simulation) -> RankColumns:
    columns = RankColumns()
    for stage in simulation.stages:
        plan, traffic, memory = stage.planned.plan, stage.traffic, stage.memory
        columns.rank.extend(plan.ranks)
        columns.matrices.extend(plan.computed[rank] for rank in plan.ranks)
        columns.flops.extend(plan.flops[rank] for rank in plan.ranks)
        columns.seconds.extend(stage.timeline.end.tolist())
        columns.orthogonalise_seconds.extend(orthogonalise_seconds(stage).tolist())
        columns.waited_seconds.extend(stage.timeline.waited.tolist())
        sent, between = sent_bytes(traffic, between=False), sent_bytes(traffic, between=True)
        received, received_between = received_bytes(traffic, between=False), received_bytes(traffic, between=True)
        columns.sent_inside.extend((sent - between).tolist())
        columns.sent_between.extend(between.tolist())
        columns.received_inside.extend((received - received_between).tolist())
        columns.received_between.extend(received_between.tolist())
        columns.peers.extend(traffic.peers.tolist())
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
    chosen = dict.fromkeys((int(work.argmax()), int(work.argmin())))
    rows = []
    for at in chosen:
        for span in stage.timeline.spans:
            start, seconds = float(span.start[at]), float(span.end[at] - span.start[at])
            if seconds > 0:
                track = "links" if span.on_links else "device"
                rows.append(SpanFigures(ranks[at], track, span.name, span.wave, start, seconds))
    return rows
