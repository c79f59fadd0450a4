"""Measurements on the user's machines: products, links, the host's time, a sharded step. All ranks measure at the
same time.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...device import hardware_of, transfers_for
from ...execute.elementwise import apply, fill_with_momentum
from ...optim import Muon
from ...ortho import AUTO, Workspace, default_compute_dtype, expected_flops, orthogonalize
from ...transport import all_gather_objects, swap_with
from ..predict.calibration import Calibration, ElementwiseRates, LinkRate, Rate
from ..predict.launches import launches_of
from ..predict.prediction import predict
from .context import Context, Finding
from .environment import bfloat16_works
from .exchanges import exchange_with, partner, turns, world_exchange
from .numerics import seeded

_LARGEST_SIZE = {"cpu": 2048}  # of products; elsewhere 8192
# matrices that are orthogonalised together, as steps do it where they have several of a shape; fewer large ones
_BATCH = 16
_ELEMENTS = 2**20  # of the tensors of elementwise work, and of batches
_MOST_TURNS = 32  # in which pairs are measured: with many ranks a sample of the pairs
_PAIR_BYTES = 4 * 2**20
_EXCHANGE_BYTES = 8 * 2**20  # per rank, over all its peers
_COPY_BYTES = 64 * 2**20
_REPEATS = 10
_LAUNCHES = 200  # that are timed together
_LONG_STEP = 0.1  # seconds: no step on larger matrices is measured
_LARGEST_STEP = 4  # times the size of the matrices that are measured first
_SLOW_PAIR = 4.0  # times as long as the median: worth a remark, as the next ones
_SLOW_RANK = 0.7  # of the median rate
_SLOW_BFLOAT16 = {"cpu": 0.25}  # of float32's rate; elsewhere 1.5
_AS_PREDICTED = 0.6, 1.7  # of the predicted time
_RateKey: TypeAlias = tuple[str, int] | tuple[str, int, int]  # dtype and size or, if not square, sides


def _seconds(context: Context, work: Callable[[], object], repeats: int, at_least: float = math.inf) -> list[float]:
    """Of each call, after a first one that does not count; fewer repeats once they took ``at_least`` seconds."""
    times: list[float] = []
    while len(times) < repeats + 1 and not (len(times) > 2 and sum(times[1:]) > at_least):
        hardware_of(context.device).finish(context.device)
        began = time.perf_counter()
        work()
        hardware_of(context.device).finish(context.device)
        times.append(time.perf_counter() - began)
    return times[1:]


def _median_seconds(context: Context, work: Callable[[], object], repeats: int, at_least: float = math.inf) -> float:
    return statistics.median(_seconds(context, work, repeats, at_least))


def _usual_seconds(context: Context, work: Callable[[], object]) -> float:
    """Of a call among many. Where ranks share cores, most short calls are not interrupted, and a step is: the mean has
    that.

    Where they do not, only other programs interrupt, and the median leaves them out.
    """
    times = _seconds(context, work, 1000, at_least=0.1)
    return statistics.fmean(times) if ranks_share_cores(context) else statistics.median(times)


def ranks_share_cores(context: Context) -> bool:
    """Whether the device is a CPU with fewer cores than its ranks have threads."""
    ranks = context.nodes.count(context.nodes[context.rank])
    return context.device.type == "cpu" and ranks * torch.get_num_threads() > (os.cpu_count() or 1)


def _by_rank(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of all ranks, in their order."""
    group = dist.group.WORLD
    assert group is not None
    return list(all_gather_objects(figures, group).values())


def medians(by_rank: Sequence[Any]) -> Any:
    """The median over the ranks: of a number, or of each number that all ranks have in a dict; None stays None."""
    first = by_rank[0]
    if not isinstance(first, Mapping):
        return None if first is None else float(statistics.median(by_rank))
    return {
        key: medians([figures[key] for figures in by_rank])
        for key in first
        if all(key in figures for figures in by_rank)
    }


# Products.


def measure_rates(context: Context) -> Finding:
    """Rates of n × n products in each dtype, of the default orthogonalisation, and of elementwise work."""
    on_cpu = context.device.type == "cpu"
    dtypes = [
        torch.float32,
        *([] if on_cpu else [torch.float16]),
        *([torch.bfloat16] if not on_cpu or bfloat16_works() else []),
    ]
    figures = {
        "products": {key: rate for dtype in dtypes for key, rate in _product_rates(context, dtype).items()},
        **_orthogonalisation_rates(context),
        "elementwise": _elementwise(context),
    }
    return summarise_rates(context, _by_rank(figures))


def _product_rates(context: Context, dtype: torch.dtype) -> dict[_RateKey, float]:
    """FLOPs per second by dtype and size."""
    rates: dict[_RateKey, float] = {}

    def measure(size: int) -> float:
        with context.doing(f"measuring products of {size}×{size} in {dtype}"):
            a = seeded((size, size), size).to(context.device, dtype)
            seconds = _usual_seconds(context, partial(torch.mm, a, a, out=torch.empty_like(a)))
        rates[_name(dtype), size] = 2.0 * size**3 / seconds
        return seconds

    _measure_sizes(context, measure, longest=0.025)
    return rates


def _orthogonalisation_rates(context: Context) -> dict[str, dict[_RateKey, float]]:
    """FLOPs per second of a further matrix of a batch and of a single one, by dtype and size or, if not square,
    sides.
    """
    of_further, alone = dict[_RateKey, float](), dict[_RateKey, float]()

    def measure(*sides: int) -> float:
        size, length = sides[0], sides[-1]
        dtype = default_compute_dtype(context.device, torch.float32, AUTO, size)
        flops = expected_flops(size, length, AUTO, "auto", dtype, context.device)
        count = max(2, min(_BATCH, _ELEMENTS // (size * length)))
        with context.doing(f"measuring orthogonalisation of {size}×{length} in {dtype}"):
            single, batch = (_orthogonalisation_seconds(context, number, size, length) for number in (1, count))
        key: _RateKey = (_name(dtype), size) if size == length else (_name(dtype), size, length)
        alone[key] = flops / single
        # Where launches take all of the time, a batch takes as long as a matrix: no rate is above twice that of the
        # batch.
        of_further[key] = flops / max((batch - single) / (count - 1), batch / count / 2)
        return batch

    for sides in sorted({tuple(sorted(shape)) for shape in context.options.shapes}):
        measure(*sides)
    _measure_sizes(context, measure, longest=0.4)
    return {"orthogonalisation": of_further, "alone": alone}


def _orthogonalisation_seconds(context: Context, *shape: int) -> float:
    batch = seeded(shape, shape[-2]).to(context.device)
    return _usual_seconds(
        context, partial(orthogonalize, batch, AUTO, out=torch.empty_like(batch), workspace=Workspace())
    )


def _measure_sizes(context: Context, measure: Callable[[int], float], *, longest: float) -> None:
    """Of square matrices, for sizes that double, until one takes longer than ``longest`` seconds."""
    size, largest = 128, _LARGEST_SIZE.get(context.device.type, 8192) // (4 if context.options.quick else 1)
    while size <= largest and measure(size) <= longest:
        size *= 2


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _elementwise(context: Context) -> dict[str, float]:
    """Seconds per element of what a step does element by element, by the names of ``ElementwiseRates``."""
    with context.doing("measuring elementwise work"):
        grad, buffer, update, weight = (seeded((_ELEMENTS,), k).to(context.device) for k in range(4))
        weight.grad = grad
        work: dict[str, Callable[[], object]] = {
            "momentum": partial(fill_with_momentum, [update], [grad], [buffer], 0.95, 0.95),
            "update": partial(apply, [weight], [update], 1.0, 0.0),
            "copy": partial(update.copy_, grad),
            "adamw": torch.optim.AdamW([weight], lr=0.0, fused=True).step,
        }
        return {kind: max(1e-15, _usual_seconds(context, run) / _ELEMENTS) for kind, run in work.items()}


def summarise_rates(context: Context, by_rank: Sequence[Mapping[str, Any]]) -> Finding:
    """Medians over the ranks, and the slowest rank."""
    figures, texts = medians(by_rank), dict[str, list[str]]()
    for kind in ("products", "orthogonalisation"):
        for (dtype, *sides), rate in figures[kind].items():
            text = f"{_giga(rate)} at {'×'.join(map(str, sides))}"
            texts.setdefault(f"{dtype} products" if kind == "products" else kind, []).append(text)
    lines = [f"{work} {', '.join(rates)}" for work, rates in texts.items()]
    lines[-1] += " GFLOP/s"
    largest = [list(of_rank["orthogonalisation"].values())[-1] for of_rank in by_rank]
    share = min(largest) / statistics.median(largest)
    if len(by_rank) > 1:
        lines.append(f"slowest rank {largest.index(min(largest))}: {share:.2f} of the median")
        if share < _SLOW_RANK:
            lines[-1] += ", look at its clock, its temperature and what else runs there"
    lines += remark_on_bfloat16(context.device.type, figures["products"])
    for kind in ("products", "orthogonalisation", "alone"):
        rates = figures[kind].items()
        figures[kind] = [
            asdict(Rate(dtype, size, rate, length[0] if length else None)) for (dtype, size, *length), rate in rates
        ]
    figures |= {"slowest_rank": largest.index(min(largest)), "slowest_share": share}
    context.figures["rates"] = figures
    return Finding("; ".join(lines), figures=figures)


def remark_on_bfloat16(device_type: str, products: Mapping[tuple[str, int], float]) -> list[str]:
    """A sentence if products in bfloat16 are slower than such a device should be."""
    sizes = [size for dtype, size in products if dtype == "bfloat16" and ("float32", size) in products]
    share = max((products["bfloat16", size] / products["float32", size] for size in sizes), default=math.inf)
    if share >= _SLOW_BFLOAT16.get(device_type, 1.5):
        return []
    meaning = (
        "this CPU has no units for it, keep compute_dtype=torch.float32, its default"
        if device_type == "cpu"
        else "its matrix units are not in use, look at the driver, at torch's build and at what else runs there"
    )
    return [f"bfloat16 reaches {share:.2g} of float32's rate: {meaning}"]


def _giga(value: float) -> str:
    return f"{value / 1e9:.3g}"


# Links.


def measure_links(context: Context) -> Finding:
    """Each pair of ranks, one pair of a rank at a time, and exchanges of all ranks with all ranks."""
    exchange, world = world_exchange(context), context.world

    def swap_seconds(peer: int, count: int, repeats: int) -> float:
        """In which this rank and ``peer`` send each other ``count`` float32."""
        sent = torch.zeros(count, device=context.device)
        return _median_seconds(context, partial(swap_with, peer, sent, torch.empty_like(sent)), repeats)

    def exchange_seconds(count: int, repeats: int) -> float:
        """Of an exchange of ``count`` float32 with each of the others."""
        part, peers = torch.zeros(count, device=context.device), [rank for rank in range(world) if rank != context.rank]
        sent, received = dict.fromkeys(peers, part), dict.fromkeys(peers, count)
        return _median_seconds(context, partial(exchange_with, exchange, sent, received, part), repeats)

    pairs: dict[int, tuple[float, float]] = {}  # by peer: seconds of a few bytes, and of _PAIR_BYTES
    for turn in range(min(turns(world), _MOST_TURNS)):
        peer = partner(context.rank, turn, world)
        if peer is not None:
            with context.doing(f"measuring the link to rank {peer}"):
                pairs[peer] = swap_seconds(peer, 1, _REPEATS), swap_seconds(peer, _PAIR_BYTES // 4, 3)
    with context.doing("measuring exchanges of all ranks"):
        count = _EXCHANGE_BYTES // 4 // (world - 1)
        latency = exchange_seconds(1, 2 * _REPEATS)
        began, cpu = time.perf_counter(), time.process_time()
        seconds = exchange_seconds(count, 2 * _REPEATS)
        cpu_share = (time.process_time() - cpu) / (time.perf_counter() - began)
    link = LinkRate(4 * count * (world - 1) / seconds, latency)
    return summarise_links(
        context, _by_rank({"pairs": pairs, "exchange": asdict(link), "exchange_cpu_share": cpu_share})
    )


def summarise_links(context: Context, by_rank: Sequence[Mapping[str, Any]]) -> Finding:
    """Medians over pairs inside and between nodes, the slowest pair, and exchanges of all ranks."""
    pairs: dict[tuple[int, int], tuple[float, float]] = {}
    for rank, of_rank in enumerate(by_rank):
        # both ranks of a pair have measured it; the slower one counts
        for peer, (latency, seconds) in of_rank["pairs"].items():
            ends = min(rank, peer), max(rank, peer)
            known = pairs.get(ends, (0.0, 0.0))
            pairs[ends] = max(latency, known[0]), max(seconds, known[1])

    def slowest_of(chosen: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], float]:
        ends = max(chosen, key=lambda ends: pairs[ends][1])
        return ends, _PAIR_BYTES / pairs[ends][1]

    texts, (slowest, rate) = list[str](), slowest_of(pairs)
    figures = {key: medians([of_rank[key] for of_rank in by_rank]) for key in ("exchange", "exchange_cpu_share")}
    figures |= {"slowest_pair": {"ranks": list(slowest), "bytes_per_second": rate}, "pairs_measured": len(pairs)}
    for kind, place in (("inside", "inside a node"), ("between", "between nodes")):
        chosen = [ends for ends in pairs if (context.nodes[ends[0]] == context.nodes[ends[1]]) is (kind == "inside")]
        figures[kind] = None
        if chosen:
            latency, seconds = (
                statistics.median(times) for times in zip(*(pairs[ends] for ends in chosen), strict=True)
            )
            link, (slowest, rate) = LinkRate(_PAIR_BYTES / seconds, latency), slowest_of(chosen)
            figures[kind], ratio = asdict(link), link.bytes_per_second / rate
            text = f"{place} {_link_text(link)} per pair, slowest pair {slowest[0]}-{slowest[1]} {_giga(rate)} GB/s"
            remark = (
                f", {ratio:.0f} times as slow as the median: look at the cable, the card and the interface of these "
                "ranks"
            )
            texts.append(text + (remark if ratio > _SLOW_PAIR else ""))
    texts.append(f"all ranks at once {_link_text(LinkRate(**figures['exchange']))} per rank")
    context.figures["links"] = figures
    return Finding("; ".join(texts), figures=figures)


def _link_text(link: LinkRate) -> str:
    return f"{_giga(link.bytes_per_second)} GB/s and {1e6 * link.seconds:.0f} µs"


# The host, and a whole step.


def _step_times(context: Context, count: int, size: int, *, repeats: int) -> tuple[list[float], Muon, float]:
    """The times of steps on ``count`` matrices that are sharded over all ranks; last, that of ``prepare()``."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, whole = context.mesh(context.world), seeded((size, size), 5).to(context.device)
    params = [nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)) for _ in range(count)]
    optimizer = Muon([{"params": params, "use_muon": True}], none_grad=False)
    began = time.monotonic()
    optimizer.prepare()
    seconds_to_prepare = time.monotonic() - began
    for param in params:
        param.grad = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    for _ in range(2):  # the first ones are slower
        optimizer.step()
    return _seconds(context, optimizer.step, repeats), optimizer, seconds_to_prepare


def measure_host(context: Context) -> Finding:
    """Steps on few and on many tiny matrices: the difference is the host's time per matrix.

    The fastest steps count or, on CPU, where a step shares the cores with all of its work, the usual ones.
    """
    few, many, on_cpu = 8, 72, context.device.type == "cpu"
    with context.doing("measuring steps on tiny matrices"):
        measured = {count: _step_times(context, count, 8, repeats=2 * _REPEATS) for count in (few, many)}
    times = {count: statistics.median(seconds) if on_cpu else min(seconds) for count, (seconds, *_) in measured.items()}
    per_matrix = max(1e-7, (times[many] - times[few]) / (many - few))
    issued, per_launch = few * per_matrix, None
    if on_cpu:
        issued += _orthogonalisation_seconds(context, 1, 8, 8)  # in predictions, the first of a batch has this time
    else:
        per_launch = seconds_per_launch(context)
        issued = per_launch * max(launches.total for launches in launches_of(measured[few][1].plan()).values())
    figures = {
        "seconds_per_matrix": per_matrix,
        "seconds_per_step": max(1e-6, times[few] - issued),
        "seconds_per_launch": per_launch,
        "copies": None if on_cpu else asdict(copy_link(context)),
    }
    return summarise_host(context, _by_rank(figures))


def seconds_per_launch(context: Context) -> float:
    """The host's time for issuing a product of tiny matrices, as a step does; the device keeps up with it."""
    a, out = torch.ones(2, 1, 16, 16, device=context.device)

    def issue() -> None:
        for _ in range(_LAUNCHES):
            torch.bmm(a, a, out=out)

    with context.doing("measuring launches"):
        return max(1e-7, min(_seconds(context, issue, _REPEATS)) / _LAUNCHES)


def copy_link(context: Context) -> LinkRate:
    """How fast pinned memory of the host is copied to the device and back, as weights in host memory are."""
    transfers, seconds = transfers_for(context.device), dict[int, float]()
    with context.doing("measuring copies between host and device"):
        for count in (1, _COPY_BYTES):
            host, device = (
                transfers.host_buffer(count, torch.uint8),
                torch.empty(count, dtype=torch.uint8, device=context.device),
            )

            def to_and_fro(host: Tensor = host, device: Tensor = device) -> None:
                transfers.load(device, host)
                transfers.store(host, device)
                transfers.settle()

            seconds[count] = _median_seconds(context, to_and_fro, _REPEATS) / 2
    return LinkRate(_COPY_BYTES / seconds[_COPY_BYTES], seconds[1])


def summarise_host(context: Context, by_rank: Sequence[Mapping[str, Any]]) -> Finding:
    figures = context.figures["host"] = medians(by_rank)
    text = (
        f"{1e6 * figures['seconds_per_matrix']:.0f} µs per matrix and {1e3 * figures['seconds_per_step']:.2f} ms per "
        "step"
    )
    if figures["seconds_per_launch"] is not None:
        text += f", {1e6 * figures['seconds_per_launch']:.1f} µs per launch"
    if figures["copies"] is not None:
        text += f"; {_link_text(LinkRate(**figures['copies']))} between host and device"
    return Finding(text, figures=figures)


def measure_step(context: Context) -> Finding:
    """A step on sharded matrices beside its prediction; on larger ones, as long as a step takes little time.

    The time is that of the slowest rank.
    """
    count, size = (8, 128) if context.device.type == "cpu" else (16, 512)
    largest = size if context.options.quick else _LARGEST_STEP * size
    while True:
        with context.doing(f"measuring steps on {count} matrices of {size}×{size}"):
            times, optimizer, to_prepare = _step_times(context, count, size, repeats=5)
            slowest = torch.tensor([statistics.median(times), to_prepare], dtype=torch.float32, device=context.device)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks must go on, or none
            seconds, to_prepare = slowest.tolist()
        if size == largest or seconds > _LONG_STEP:
            break
        size *= 2
    figures: dict[str, Any] = {"seconds": seconds, "matrices": count, "size": size, "predicted_seconds": None}
    figures["seconds_to_prepare"] = to_prepare
    text = f"{count} matrices of {size}×{size} take {1e3 * seconds:.1f} ms, prepare() {1e3 * to_prepare:.0f} ms"
    calibration = calibration_of(context)
    if calibration is None:
        return Finding(f"{text}; without the other measurements there is no prediction", figures=figures)
    predicted = predict(optimizer.plan(), calibration)
    figures |= {"predicted_seconds": predicted.seconds, "prediction": predicted.seconds_by_kind}
    parts = ", ".join(f"{name} {1e3 * value:.1f}" for name, value in predicted.seconds_by_kind.items())
    text += f"; predicted {1e3 * predicted.seconds:.1f} ms ({parts}): {seconds / predicted.seconds:.2f} of it"
    return Finding(text + remark_on_prediction(seconds / predicted.seconds), figures=figures)


def remark_on_prediction(ratio: float) -> str:
    """What it may mean that a step took ``ratio`` of its prediction; nothing if they agree."""
    low, high = _AS_PREDICTED
    if low <= ratio <= high:
        return ""
    reason = (
        "the rates above were measured while something else slowed the machine, and plans should not follow them"
        if ratio < low
        else "something else slowed the step, or ranks share a device, a core or a link"
    )
    return f". It should be near 1: {reason}. Run it again on an idle machine, with --only rates,links,host,step"


def calibrate(context: Context) -> Calibration:
    """Measures all that predictions need, on every rank at the same time; the process group exists."""
    for measure in (measure_rates, measure_host, *([measure_links] if context.world > 1 else [])):
        dist.barrier()
        measure(context)
    calibration = calibration_of(context)
    assert calibration is not None
    return calibration


def calibration_of(context: Context) -> Calibration | None:
    """The measurements so far as a calibration; None if some were left out."""
    figures, on_cpu = context.figures, context.device.type == "cpu"
    if not {"rates", "host", *(["links"] if context.world > 1 else [])} <= set(figures):
        return None
    rates, host, links = figures["rates"], figures["host"], figures.get("links", {})

    def link(row: Mapping[str, float] | None) -> LinkRate | None:
        return None if row is None else LinkRate(**row)

    exchange = link(links.get("exchange"))
    waiting = 0.0 if exchange is None else 2 * exchange.seconds  # of the exchanges of tiny matrices
    return Calibration(
        device=context.device.type,
        device_name=hardware_of(context.device).name(context.device),
        ranks=context.world,
        ranks_per_node=max(Counter(context.nodes).values()),
        compute_dtype=_name(default_compute_dtype(context.device, torch.float32)),
        products=tuple(Rate(**rate) for rate in rates["products"]),
        orthogonalisation=tuple(Rate(**rate) for rate in rates["orthogonalisation"]),
        alone=tuple(Rate(**rate) for rate in rates["alone"]),
        inside=link(links.get("inside")),
        between=link(links.get("between")),
        exchange=exchange,
        host_seconds_per_matrix=host["seconds_per_matrix"],
        host_seconds_per_step=max(1e-6, host["seconds_per_step"] - waiting),
        elementwise=ElementwiseRates(**rates["elementwise"]),
        exchange_cpu_share=max(1e-3, links["exchange_cpu_share"]) if links and on_cpu else None,
        copies=link(host["copies"]),
        host_seconds_per_launch=host["seconds_per_launch"],
    )
