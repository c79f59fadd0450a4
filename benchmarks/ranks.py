"""One rank of the sharded benchmark; ``sharded.py`` starts it under torchrun.

Here too: layouts, what goes through the process group, and how a script is started on ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import KELLER, Samples, Step, float32_newton_schulz, quartiles, race, ratio
from contenders import gpt_matrices
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import DistMuon, Muon, Workspace, keller, orthogonalize
from meshmuon.device import memory_budget_for
from meshmuon.transport import Agreement, Vote

OPTIONS = ("layers", "width", "rounds", "tiny", "cores", "threads")
LR, MOMENTUM, DECAY = 1e-3, 0.95, 0.1
OURS, NAIVE, REFERENCE, PURE, ALONE = "meshmuon", "naive", "reference", "pure work", "exchanges alone"
# other updates: compared with each other alone
SCHEMES = {"meshmuon, polar_express": "polar_express", "meshmuon, auto": "auto"}
TOLERANCE = 1e-3  # of the update, relative to its largest entry
DATA_PARALLEL = "DistMuon"


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """A layout of all parameters.

    Attributes:
        name: in tables.
        mesh: shape of the mesh.
        placements: placements of the parameters; parameter k has number k modulo their count.
        pieces: how many ranks share a matrix within a replica.
        replicas: copies of each matrix.
        experts: the model is stacks of experts.
    """

    name: str
    mesh: tuple[int, ...]
    placements: tuple[tuple[Placement, ...], ...]
    pieces: int
    replicas: int = 1
    experts: bool = False

    @property
    def data_parallel(self) -> bool:
        """Whether every rank has whole weights and gradients of its own."""
        return self.name == DATA_PARALLEL

    def shapes(self, layers: int, width: int) -> list[tuple[int, ...]]:
        """Shapes of the parameters."""
        if self.experts:
            return [(16, width, width // 2)] * max(1, layers // 2)
        return [*gpt_matrices(layers, width)]

    def place(self, value: Tensor, index: int) -> Tensor:
        """The parameter ``index`` as this rank holds it."""
        if self.data_parallel:
            return value
        placements = self.placements[index % len(self.placements)]
        return distribute_tensor(value, _mesh(self.mesh), placements, src_data_rank=None)

    def bound(self, elements: int) -> float:
        """Bytes that a rank sends at least, on average, when each matrix is orthogonalised once.

        The owner lacks all but its own piece of the matrix, and every holder but the owner lacks the result.
        """
        world = dist.get_world_size()
        if self.data_parallel:  # every rank's gradient to the owner, the weights to every rank
            return 4 * elements * 2 * (world - 1) / world
        return 4 * elements * (1 + self.replicas - 2 / self.pieces) / world


@lru_cache
def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def layouts_for(world: int) -> list[ModelLayout]:
    """The layouts that make sense on that many ranks."""
    layouts = [ModelLayout("FSDP2", (world,), ((Shard(0),),), world)]
    if world > 1:
        layouts.append(ModelLayout(DATA_PARALLEL, (world,), (), 1, world))
    if world >= 4 and world % 2 == 0:
        half = world // 2
        column_wise, row_wise = (_StridedShard(0, split_factor=2), Shard(0)), (Shard(0), Shard(1))
        layouts += [
            ModelLayout("HSDP", (2, half), ((Replicate(), Shard(0)),), half, 2),
            ModelLayout("TP×FSDP", (half, 2), (column_wise, row_wise), world),
            ModelLayout("EP×FSDP, cut", (half, 2), ((Shard(1), Shard(0)),), half, experts=True),
            ModelLayout("EP×FSDP, whole", (half, 2), ((_StridedShard(0, split_factor=2), Shard(0)),), 1, experts=True),
        ]
    return layouts


def values_of(layout: ModelLayout, shapes: list[tuple[int, ...]]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights, the same on all ranks, and gradients: the same, or each rank's own where the optimizer averages."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes]
    own = torch.Generator().manual_seed(1 + dist.get_rank() * layout.data_parallel)
    return weights, [torch.randn(shape, generator=own) for shape in shapes]


class _Timed:
    """A collective under way, whose waiting is added up."""

    def __init__(self, work: Any, wire: Wire) -> None:
        self._work, self._wire = work, wire

    def wait(self, *timeout: timedelta) -> None:
        """Waits and counts."""
        begin = time.perf_counter()
        try:
            self._work.wait(*timeout)
        finally:
            self._wire.waited += time.perf_counter() - begin

    def is_completed(self) -> bool:
        """As torch's."""
        return bool(self._work.is_completed())


class Wire:
    """Counts the ragged exchanges and the small agreements of this process from now on."""

    def __init__(self) -> None:
        self.waited, self.agreements = 0.0, 0
        self.exchanges: list[tuple[Tensor, Tensor, list[int], list[int], Any]] = []
        self._exchange: Callable[..., Any] = dist.all_to_all_single
        self._vote: Callable[[Agreement, Vote], Vote] = Agreement.decide
        dist.all_to_all_single = self._counted_exchange  # type: ignore[assignment]
        wire = self

        def counted_vote(agreement: Agreement, vote: Vote) -> Vote:
            wire.agreements += 1
            return wire._vote(agreement, vote)

        Agreement.decide = counted_vote  # type: ignore[assignment, method-assign]

    def reset(self) -> None:
        """Starts counting anew."""
        self.waited, self.agreements = 0.0, 0
        self.exchanges = []

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent in exchanges."""
        return sum(sum(splits) * sent.element_size() for _, sent, _, splits, _ in self.exchanges)

    def alone(self) -> Callable[[], None]:
        """The exchanges counted so far, one after the other, on buffers of their own, with nothing to do meanwhile."""
        calls = [
            (received.clone(), sent.clone(), there, here, group)
            for received, sent, there, here, group in self.exchanges
        ]

        def run() -> None:
            for received, sent, there, here, group in calls:
                self._exchange(received, sent, there, here, group=group, async_op=True).wait()

        return run

    def _counted_exchange(
        self, output: Tensor, sent: Tensor, there: list[int], here: list[int], *, group: Any, async_op: bool
    ) -> Any:
        self.exchanges.append((output, sent, there, here, group))
        return _Timed(self._exchange(output, sent, there, here, group=group, async_op=async_op), self)


class Naive:
    """What a user would write: gather every update on every rank, orthogonalise all of them, keep the own part."""

    def __init__(self, params: list[nn.Parameter], layout: ModelLayout) -> None:
        self.params, self.layout = params, layout
        self.buffers = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        for index, (param, buffer) in enumerate(zip(self.params, self.buffers, strict=True)):
            grad = param.grad
            assert grad is not None
            if self.layout.data_parallel:
                dist.all_reduce(grad)
                grad /= dist.get_world_size()
            buffer.mul_(MOMENTUM).add_(grad)
            update = grad.clone().add_(buffer, alpha=MOMENTUM)
            whole = update.full_tensor() if isinstance(update, DTensor) else update
            result = (
                torch.stack(list(map(self._orthogonalise, whole))) if whole.dim() == 3 else self._orthogonalise(whole)
            )
            scale = 0.2 * max(param.shape[-2:]) ** 0.5
            param.mul_(1 - LR * DECAY).add_(self.layout.place(result, index), alpha=-LR * scale)

    def _orthogonalise(self, matrix: Tensor) -> Tensor:
        return float32_newton_schulz(matrix, KELLER, 5, 1e-7)


@dataclass(frozen=True, slots=True)
class Runner:
    """A contender with weights of its own."""

    params: list[nn.Parameter]
    step: Step
    optimizer: object

    def local(self) -> list[Tensor]:
        """What this rank holds of the weights."""
        whole = [param.detach() for param in self.params]
        return [value.to_local() if isinstance(value, DTensor) else value for value in whole]


def make(name: str, layout: ModelLayout, shapes: list[tuple[int, ...]]) -> Runner:
    weights, grads = values_of(layout, shapes)
    params = [nn.Parameter(layout.place(value, k)) for k, value in enumerate(weights)]
    placed = [layout.place(grad, k) for k, grad in enumerate(grads)]

    def fresh_gradients() -> None:  # the naive way averages in place
        for param, grad in zip(params, placed, strict=True):
            param.grad = grad.clone() if layout.data_parallel else grad

    fresh_gradients()
    if name == NAIVE:
        naive = Naive(params, layout)
        return Runner(params, Step(naive.step, fresh_gradients), naive)
    kind = "experts" if layout.experts else "mlp"
    names = [f"layers.{k}.{kind}.weight" for k in range(len(params))]
    groups = [{"params": params, "names": names, "use_muon": True, "expert_keys": ["experts"]}]
    options: dict[str, Any] = {
        "lr": LR,
        "weight_decay": DECAY,
        "scheme": SCHEMES.get(name, "keller"),
        "none_grad": False,
    }
    if layout.data_parallel:
        ours: Muon = DistMuon(groups, adjust_lr_fn="match_rms_adamw", **options)
    else:
        ours = Muon(groups, use_distributed_muon=name == REFERENCE, **options)
    return Runner(params, Step(ours.step, fresh_gradients), ours)


def pure_work(shapes: list[tuple[int, ...]], cores: int) -> Step:
    """Orthogonalises all matrices once, divided over as many ranks as there are cores; sends nothing."""
    workers, rank = min(cores, dist.get_world_size()), dist.get_rank()
    matrices = [torch.randn(shape) for k, shape in enumerate(sorted(shapes)) if k % workers == rank]
    outs, workspace, scheme = [torch.empty_like(matrix) for matrix in matrices], Workspace(), keller()

    def run() -> None:
        for matrix, out in zip(matrices, outs, strict=True):
            orthogonalize(matrix, scheme, out=out, workspace=workspace)

    return Step(run)


def over_ranks(value: float, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> float:
    word = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(word, how)
    return word.item() / (dist.get_world_size() if how == dist.ReduceOp.SUM else 1)


def check_same(runners: dict[str, Runner]) -> dict[str, float]:
    """Steps each contender once; the largest difference from meshmuon's weights, relative to the size of its step."""
    before = [weight.clone() for weight in runners[OURS].local()]
    for runner in runners.values():
        runner.step.before()
        runner.step.run()
    ours = runners[OURS].local()
    moved = over_ranks(_apart(ours, before), dist.ReduceOp.MAX)
    apart = {
        name: over_ranks(_apart(runner.local(), ours), dist.ReduceOp.MAX) / moved for name, runner in runners.items()
    }
    wrong = {name: difference for name, difference in apart.items() if difference > TOLERANCE}
    if wrong:
        sys.exit(f"not the same update as meshmuon's: {wrong} of the largest entry, at most {TOLERANCE} was expected")
    return apart


def _apart(weights: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return max((float((p - q).abs().max()) for p, q in zip(weights, others, strict=True) if p.numel()), default=0.0)


def shapes_of(layout: ModelLayout, options: argparse.Namespace) -> list[tuple[int, ...]]:
    return layout.shapes(options.layers if layout.name == "FSDP2" else max(1, options.layers // 2), options.width)


def measure(layout: ModelLayout, options: argparse.Namespace, wire: Wire) -> dict[str, Any]:
    world = dist.get_world_size()
    main, shapes = layout.name == "FSDP2", shapes_of(layout, options)
    names = [OURS, NAIVE, REFERENCE] if main and world <= 4 else [OURS, NAIVE]
    runners = {name: make(name, layout, shapes) for name in names}
    apart = check_same(runners)
    steps = {name: runner.step for name, runner in runners.items()}
    steps[OURS].run()
    wire.reset()
    steps[OURS].run()
    sent, exchanges, agreements = wire.sent, len(wire.exchanges), wire.agreements
    steps[OURS], steps[ALONE] = Step(steps[OURS].run, wire.reset), Step(wire.alone())
    if main:
        steps[PURE] = pure_work(shapes, options.cores)
        steps |= {name: make(name, layout, shapes).step for name in SCHEMES}
    warmups = 1 if main else 0  # the schemes' first step plans
    waits: dict[str, list[float]] = {name: [] for name in steps}
    shown: Callable[[str, Samples], None] = lambda name, _: waits[name].append(wire.waited)  # noqa: E731
    times = race(steps, options.rounds, warmups=warmups, barrier=dist.barrier, shown=shown)
    waited, optimizer = over_ranks(quartiles(waits[OURS]).median), runners[OURS].optimizer
    assert isinstance(optimizer, Muon)
    plan, elements = optimizer.plan(), sum(p.numel() for p in runners[OURS].params)
    return {
        "layout": layout.name,
        "ranks": world,
        "matrices": len(plan.tasks),
        "steps": {name: samples.facts() for name, samples in times.items()},
        "ratio": {
            name: asdict(ratio(times[OURS].wall, samples.wall)) for name, samples in times.items() if name != ALONE
        },
        "auto_over_polar_express": asdict(ratio(*(times[name].wall for name in reversed(SCHEMES)))) if main else None,
        "difference": apart,
        "bytes_sent": over_ranks(sent),
        "bytes_planned": None if layout.data_parallel else over_ranks(plan.bytes_sent.get(dist.get_rank(), 0)),
        "bytes_bound": layout.bound(elements),
        "bytes_of_naive": 4 * elements * (world - 1) / world,
        "exchanges": exchanges,
        "agreements": agreements,
        "hidden": max(0.0, 1 - waited / quartiles(times[ALONE].wall).median) if exchanges else None,
        "workspace_bytes": over_ranks(optimizer.workspace_bytes(), dist.ReduceOp.MAX),
        "two_waves_bytes": 2 * memory_budget_for(None),
    }


def host_time(layout: ModelLayout, count: int, rounds: int) -> dict[str, float]:
    """µs per matrix of a step on 8×8 matrices, where only dispatch is left."""
    runner = make(OURS, layout, [(8, 8)] * count)
    return race({OURS: runner.step}, rounds, warmups=3, barrier=dist.barrier)[OURS].microseconds(count)


def run_ranks(
    script: Path,
    world: int,
    options: argparse.Namespace,
    names: Sequence[str],
    *arguments: str,
    inside: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Runs a script under torchrun on so many ranks, with those of the options; the results that it leaves.

    ``inside`` is a command that runs another one, in a network namespace.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        command = [*inside, *torchrun, str(script), *arguments, "--out", str(out)]
        for name in names:
            command += [f"--{name}", str(getattr(options, name))]
        environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
        if inside:
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        subprocess.run(command, check=True, env=environment, timeout=options.timeout)
        results: list[dict[str, Any]] = json.loads(out.read_text())
    return results


def run_rank(measure_all: Callable[[argparse.Namespace], list[dict[str, Any]]], names: Sequence[str]) -> None:
    """What ``run_ranks`` starts: measures on this rank, with the options of the command line; the first rank writes."""
    parser = argparse.ArgumentParser()
    for name in names:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--layouts", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # remarks on how the naive way gathers
    dist.init_process_group("gloo")
    results = measure_all(options)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(results) + "\n")
    gc.collect()  # an optimizer that outlives its process group may hang the process when it exits
    dist.destroy_process_group()


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    wire, results = Wire(), []
    for layout in layouts_for(dist.get_world_size()):
        if options.layouts and layout.name not in options.layouts:
            continue
        if dist.get_rank() == 0:
            print(f"  {dist.get_world_size()} ranks, {layout.name} …", flush=True)
        results.append(measure(layout, options, wire))
        wire.reset()
        if layout.name == "FSDP2" and options.tiny:
            results[-1]["host"] = host_time(layout, options.tiny, max(5, options.rounds))
    return results


if __name__ == "__main__":
    run_rank(measure_all, OPTIONS)
