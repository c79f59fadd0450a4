"""One rank of the sharded benchmark; ``sharded.py`` starts it under torchrun."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common  # first: it sets what torch reads when it starts
import torch
import torch.distributed as dist
from common import KELLER, Samples, Step, float32_newton_schulz, quartiles, race, ratio
from layouts import ModelLayout, layouts_for, values_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from wire import Wire

from meshmuon import DistMuon, Muon, Workspace, keller, orthogonalize
from meshmuon.device import memory_budget_for
from meshmuon.tools.doctor.context import Context, DoctorOptions
from meshmuon.tools.doctor.measurements import calibrate
from meshmuon.tools.predict.calibration import Calibration

LR, MOMENTUM, DECAY = 1e-3, 0.95, 0.1
OURS, NAIVE, REFERENCE, PURE, ALONE = "meshmuon", "naive", "reference", "pure work", "exchanges alone"
CHOSEN, CHOSEN_ALONE = "meshmuon, plan chosen by measured rates", "its exchanges alone"
# other updates: compared with each other alone
SCHEMES = {"meshmuon, polar_express": "polar_express", "meshmuon, auto": "auto"}
TOLERANCE = 1e-3  # of the update, relative to its largest entry


class Naive:
    """What a user would write: gather every whole update on every rank, orthogonalise all of them there, keep the
    own part.
    """

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


def rates_for(shapes: Iterable[tuple[int, ...]]) -> Calibration:
    """The doctor's measurements, with matrices of these shapes, summarised on every rank alike."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    options = DoctorOptions(quick=True, shapes=tuple(sorted({(shape[-2], shape[-1]) for shape in shapes})))
    return calibrate(Context(options, dist.get_rank(), dist.get_world_size(), store, torch.device("cpu"), "here"))


def make(name: str, layout: ModelLayout, shapes: list[tuple[int, ...]], rates: Calibration | None = None) -> Runner:
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
        ours = Muon(
            groups,
            use_distributed_muon=name == REFERENCE,
            cost_model=None if rates is None else rates.cost_model(),
            **options,
        )
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


def measure(layout: ModelLayout, options: argparse.Namespace, wire: Wire, rates: Calibration | None) -> dict[str, Any]:
    world = dist.get_world_size()
    main, shapes = layout.name == "FSDP2", shapes_of(layout, options)
    names = [OURS, NAIVE, REFERENCE] if main and world <= 4 else [OURS, NAIVE]
    runners = {name: make(name, layout, shapes) for name in names}
    if rates is not None:
        runners[CHOSEN] = make(CHOSEN, layout, shapes, rates)
    apart = check_same(runners)
    steps, counted = {name: runner.step for name, runner in runners.items()}, {}
    for name, alone in ((OURS, ALONE), *([(CHOSEN, CHOSEN_ALONE)] if rates is not None else [])):
        runners[name].step.run()
        wire.reset()
        runners[name].step.run()
        counted[name] = wire.sent, len(wire.exchanges), wire.agreements
        steps[name], steps[alone] = Step(steps[name].run, wire.reset), Step(wire.alone())
    if main:
        steps[PURE] = pure_work(shapes, options.cores)
        steps |= {name: make(name, layout, shapes).step for name in SCHEMES}
    warmups = 1 if main else 0  # the schemes' first step plans
    waits: dict[str, list[float]] = {name: [] for name in steps}
    shown: Callable[[str, Samples], None] = lambda name, _: waits[name].append(wire.waited)  # noqa: E731
    times = race(steps, options.rounds, warmups=warmups, barrier=dist.barrier, shown=shown)

    def hidden(name: str, alone: str) -> float | None:
        waited = over_ranks(quartiles(waits[name]).median)
        return max(0.0, 1 - waited / quartiles(times[alone].wall).median) if counted[name][1] else None

    optimizer, (sent, exchanges, agreements) = runners[OURS].optimizer, counted[OURS]
    assert isinstance(optimizer, Muon)
    plan, elements = optimizer.plan(), sum(p.numel() for p in runners[OURS].params)
    chosen = runners[CHOSEN].optimizer.plan() if CHOSEN in runners else None  # type: ignore[attr-defined]
    return {
        "layout": layout.name,
        "ranks": world,
        "matrices": len(plan.tasks),
        "steps": {name: samples.facts() for name, samples in times.items()},
        "ratio": {
            name: asdict(ratio(times[OURS].wall, samples.wall))
            for name, samples in times.items()
            if "alone" not in name
        },
        "auto_over_polar_express": asdict(ratio(*(times[name].wall for name in reversed(SCHEMES)))) if main else None,
        "difference": apart,
        "bytes_sent": over_ranks(sent),
        "bytes_planned": None if layout.data_parallel else over_ranks(plan.bytes_sent.get(dist.get_rank(), 0)),
        "bytes_bound": layout.bound(elements),
        "bytes_of_naive": 4 * elements * (world - 1) / world,
        "exchanges": exchanges,
        "agreements": agreements,
        "waves": len(plan.wave_lanes),
        "hidden": hidden(OURS, ALONE),
        "chosen": chosen and {"waves": len(chosen.wave_lanes), "hidden": hidden(CHOSEN, CHOSEN_ALONE)},
        "workspace_bytes": over_ranks(optimizer.workspace_bytes(), dist.ReduceOp.MAX),
        "buffer_bytes": over_ranks(plan.buffer_bytes(dist.get_rank()), dist.ReduceOp.MAX),
        "two_waves_bytes": 2 * memory_budget_for(None),
    }


def host_time(layout: ModelLayout, count: int, rounds: int) -> dict[str, float]:
    """µs per matrix of a step on 8×8 matrices, where only dispatch is left."""
    runner = make(OURS, layout, [(8, 8)] * count)
    return race({OURS: runner.step}, rounds, warmups=3, barrier=dist.barrier)[OURS].microseconds(count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("layers", "width", "rounds", "tiny", "cores", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--layouts", nargs="*", default=None)
    parser.add_argument("--chosen", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # remarks on how the naive way gathers
    dist.init_process_group("gloo")
    chosen = [
        layout for layout in layouts_for(dist.get_world_size()) if not options.layouts or layout.name in options.layouts
    ]
    rates = rates_for(shape for layout in chosen for shape in shapes_of(layout, options)) if options.chosen else None
    wire, results = Wire(), []
    for layout in chosen:
        if dist.get_rank() == 0:
            print(f"  {dist.get_world_size()} ranks, {layout.name} …", flush=True)
        results.append(measure(layout, options, wire, rates))
        wire.reset()
        if layout.name == "FSDP2" and options.tiny:
            results[-1]["host"] = host_time(layout, options.tiny, max(5, options.rounds))
    if dist.get_rank() == 0:
        options.out.write_text(
            json.dumps({"results": results, "machine": common.machine_facts(options.threads)}) + "\n"
        )
    gc.collect()  # an optimizer that outlives its process group may hang the process when it exits
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
