"""What is off, in words, and what to write instead; the same model with other options or on other meshes, side by
side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...errors import ConfigError
from ...plan import DEFAULT_IN_FLIGHT, NO_WAVE, bytes_text, counted
from .render import seconds_text
from .report import Figures, balance_of, choice_of, refused_choice
from .sharding import MeshAxes, Sharding
from .simulation import MuonOptions, Simulation

_UNBALANCED = 1.3  # heaviest rank ÷ mean
_LARGE_MATRIX = 0.1  # of the heaviest rank's cost
_MANY_PEERS = 1024
_LARGE_BUFFERS = 0.05  # of memory
_LARGE_SHARE = 0.05  # of a training step
_SMALLEST_BUDGET = 4 * 2**20
_MUCH_WAITING = 0.1  # of a step: advice that could save less is left out
_MUCH_FASTER = 0.9  # of the seconds of the chosen options
_FASTER = 0.99  # of the seconds so far: what gains less is no reason to go on from it
_BUDGETS = (4, 2, 0.5)  # times ``memory_budget``, tried by a search


def advice_for(simulation: Simulation) -> list[str]:
    """Sentences, the most important first; none if nothing is off."""
    return [
        *_memory(simulation),
        *_balance(simulation),
        *_peers(simulation),
        *_buffers(simulation),
        *_waiting(simulation),
        *_messages(simulation),
    ]


def advice_from_choices(choices: Sequence[Figures]) -> list[str]:
    """What a comparison of options suggests. Schemes are left out: a faster one may be less exact."""
    planned = [row for row in choices if not row.refused and not row.label.startswith("scheme=")]
    if not planned:
        return []
    now, best = next(row for row in planned if row.chosen), min(planned, key=lambda row: row.seconds)
    if best.seconds > _MUCH_FASTER * now.seconds:
        return []
    return [
        f"{best.label} takes {seconds_text(best.seconds)} instead of {seconds_text(now.seconds)}, with "
        f"{bytes_text(best.memory)} of memory instead of {bytes_text(now.memory)}: pass it to Muon."
    ]


def _memory(simulation: Simulation) -> Iterator[str]:
    needed, has = simulation.most_bytes("total"), simulation.machine.memory_bytes
    if has and needed > has:
        yield (
            f"The weights, gradients, state and buffers of a rank take {bytes_text(needed)}, and it has "
            f"{bytes_text(has)}, without any activations: shard over more ranks, use bfloat16 weights (--param-dtype "
            "bfloat16), or offload the optimizer's state."
        )


def _balance(simulation: Simulation) -> Iterator[str]:
    balance = balance_of(simulation)
    if balance.heaviest_over_mean < _UNBALANCED:
        return
    ranks = simulation.sharding.ranks
    per_stage = ranks // len(simulation.stages)
    rows, cols = balance.matrix_shape
    travelling = (task.sharded for task in simulation.slowest.plan.tasks if task.wave != NO_WAVE)
    alike = sum((sharded.rows, sharded.cols) == (rows, cols) for sharded in travelling)
    slowest = max(max(stage.orthogonalise_seconds) for stage in simulation.stages)
    if balance.matrix_share < _LARGE_MATRIX:
        yield (
            f"The heaviest rank, {balance.heaviest_rank}, has {balance.heaviest_over_mean:.1f} times the mean "
            f"({seconds_text(slowest)}), although no matrix is large: the ranks that hold its matrices are few, and "
            "only these can own them. Compare other sizes of ep and dp_replicate."
        )
        return
    matrices = counted(alike, "large matrix", "large matrices")
    text = (
        f"{matrices} of {rows}×{cols} on {counted(per_stage, 'rank')}: the heaviest rank, {balance.heaviest_rank}, has "
        f"{balance.heaviest_over_mean:.1f} times the mean ({seconds_text(slowest)}), {balance.matrix_share:.0%} of it "
        f"for {balance.matrix}"
    )
    if balance.idle_ranks:
        text += f", and {balance.idle_ranks} of {ranks} ranks orthogonalise nothing"
    if balance.heaviest_over_bound < 1.05:
        text += ". No plan of whole matrices is better"
    yield (
        f"{text}. More ranks do not make this step faster; fewer shards with dp_replicate keep the same time with less "
        "traffic."
    )


def _peers(simulation: Simulation) -> Iterator[str]:
    peers = simulation.most_peers
    if peers < _MANY_PEERS:
        return
    connections = simulation.most_bytes("connections")
    text = (
        f"{peers:,} peers per exchange: each needs a connection, about {bytes_text(connections)} of memory on a rank."
    )
    if isinstance(axes := simulation.sharding, MeshAxes):
        factor = next(
            (2**k for k in range(1, 12) if peers // 2**k < _MANY_PEERS // 2 and axes.dp_shard % 2**k == 0), None
        )
        if factor is not None and (axes.ep == 1 or axes.fsdp * axes.tp // factor % axes.ep == 0):
            smaller = replace(axes, dp_replicate=axes.dp_replicate * factor, dp_shard=axes.dp_shard // factor)
            # Where replicas share an owner, it sends the result to all of them, and has as many peers as before.
            text += f' Use dp_replicate, and let each replica compute for itself: --mesh "{smaller}" --replicas repeat.'
    yield text


def _buffers(simulation: Simulation) -> Iterator[str]:
    buffers, has = simulation.most_bytes("exchange_buffers"), simulation.machine.memory_bytes
    if not has or buffers < _LARGE_BUFFERS * has:
        return
    budget = simulation.slowest.plan.options.budget
    # their bound
    lower = max(_SMALLEST_BUDGET, 2 ** int(_LARGE_BUFFERS * has / (3 * DEFAULT_IN_FLIGHT)).bit_length() // 2)
    text = f"Exchange buffers take {bytes_text(buffers)}, {buffers / has:.0%} of memory"
    if lower < budget:
        yield f"{text}: lower memory_budget to {bytes_text(lower)} ({lower})."
    else:
        ahead = simulation.slowest.plan.options.in_flight - 1
        yield f"{text}: lower warmup_step, now {ahead}, so that fewer waves are in flight."


def _waiting(simulation: Simulation) -> Iterator[str]:
    timeline = simulation.slowest.timeline
    if simulation.share < _LARGE_SHARE:
        return
    text, others = (
        f"The optimizer takes {simulation.share:.0%} of a training step",
        timeline.seconds_by_kind.get("others", 0.0),
    )
    if timeline.waited_for > 0.5 * timeline.seconds:
        wire = max((param.wire.itemsize for param in simulation.slowest.plan.params), default=2)
        fix = "comm_dtype=torch.bfloat16 halves what is sent" if wire > 2 else "larger batches make it rarer"
        yield f"{text}, {seconds_text(timeline.waited_for)} of it waiting for exchanges: {fix}."
    elif others > 0.5 * timeline.seconds:
        yield (
            f"{text}, {seconds_text(others)} of it waiting for ranks that have more to do in a wave: raise "
            "memory_budget."
        )
    elif timeline.seconds_by_kind.get("host", 0.0) > 0.5 * timeline.seconds:
        yield (
            f"{text}, and the host is the slowest part: experts in one stacked parameter need fewer calls than one by "
            "one."
        )
    else:
        yield f"{text}, most of it orthogonalising: more ranks or a larger batch make the share smaller."


def _messages(simulation: Simulation) -> Iterator[str]:
    messages = sum(gather.messages for gather, _ in simulation.slowest.peers)
    total = sum(sum(wave.gather.sent) for wave in simulation.slowest.plan.traffic)
    latency = simulation.machine.seconds_per_peer * simulation.machine.between.bytes_per_second
    if messages and 0 < total / messages < latency and simulation.most_peers > simulation.machine.ranks_per_node:
        yield (
            f"A message has {bytes_text(total / messages)} on average: starting it takes longer than sending it. "
            "Fewer shards per matrix (dp_replicate, or ep for experts) make messages larger."
        )


def compare_options(simulation: Simulation) -> list[Figures]:
    """The options as they are, and each of them changed alone."""
    rows = [_row(simulation, label, simulation.sharding, options) for label, options in _other_options(simulation)]
    return [choice_of(simulation, "as chosen", chosen=True), *rows]


def search_options(simulation: Simulation) -> list[Figures]:
    """The options as they are, and what a search for faster ones has tried: ``replicas``, then ``memory_budget``.

    Each choice plans again, so that there is no search where a step hardly waits. It goes on from the fastest so far.
    """
    rows, timeline = [choice_of(simulation, "as chosen", chosen=True)], simulation.slowest.timeline
    waits = timeline.waited_for + timeline.seconds_by_kind.get("others", 0.0)
    if not simulation.slowest.plan.wave_lanes or waits <= _MUCH_WAITING * timeline.seconds:
        return rows
    fastest, found = simulation, dict[str, str]()  # by option, as ``Muon`` takes it
    for name, value, text in (*_replicas(simulation), *_budgets(simulation, _BUDGETS)):
        options = replace(fastest.options, **{name: value})
        other = Simulation.run(simulation.model, simulation.sharding, simulation.machine, options, simulation.workload)
        tried = found | {name: text}
        rows.append(choice_of(other, ", ".join(tried.values()), chosen=False))
        if other.seconds < _FASTER * fastest.seconds:
            fastest, found = other, tried
    return rows


def _replicas(simulation: Simulation) -> Iterator[tuple[str, Any, str]]:
    """An option, another value and how ``Muon`` takes it."""
    params = simulation.stages[0].plan.params
    if any(sharded.replicas > 1 for param in params for sharded in param.sharded_matrices(param.layouts[0])[:1]):
        for replicas in ("share", "repeat"):
            if replicas != simulation.options.replicas:
                yield "replicas", replicas, f'replicas="{replicas}"'


def _budgets(simulation: Simulation, factors: Sequence[float]) -> Iterator[tuple[str, Any, str]]:
    for factor in factors:
        budget = int(simulation.slowest.plan.options.budget * factor)
        yield "memory_budget", budget, f"memory_budget={budget if budget % 2**20 else f'{budget >> 20}*2**20'}"


def compare_meshes(simulation: Simulation, others: Sequence[Sharding]) -> list[Figures]:
    rows = [_row(simulation, str(sharding), sharding, simulation.options) for sharding in others]
    return [choice_of(simulation, str(simulation.sharding), chosen=True), *rows]


def _row(simulation: Simulation, label: str, sharding: Sharding, options: MuonOptions) -> Figures:
    try:
        other = Simulation.run(simulation.model, sharding, simulation.machine, options, simulation.workload)
    except ConfigError as error:
        return refused_choice(label, str(error))
    return choice_of(other, label, chosen=False)


def _other_options(simulation: Simulation) -> Iterator[tuple[str, MuonOptions]]:
    options = simulation.options
    for name, value, text in _replicas(simulation):
        yield text, replace(options, **{name: value})
    used = {param.wire.itemsize for param in simulation.stages[0].plan.params}
    for dtype in (torch.bfloat16, torch.float32):
        if used != {dtype.itemsize}:
            yield f"comm_dtype={str(dtype).removeprefix('torch.')}", replace(options, comm_dtype=dtype)
    for scheme in ("polar_express", "keller"):
        if scheme != options.scheme:
            yield f'scheme="{scheme}"', replace(options, scheme=scheme)
    for name, value, text in _budgets(simulation, (4, 0.25)):
        yield text, replace(options, **{name: value})
