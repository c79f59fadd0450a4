"""A sharded optimizer step over gloo processes: meshmuon, its all-gather reference path, and the naive way.

The naive way is what a user would write: ``full_tensor()`` of every update, torch.optim.Muon's Newton–Schulz in float32 on every
rank, and the own shard of the result. Contenders take turns within every round; figures are ratios of medians of one run.

    python benchmarks/sharded.py                                            # 1, 2 and 4 ranks, one after the other
    torchrun --nproc-per-node 2 benchmarks/sharded.py --out two_ranks.json  # one number of ranks
"""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX10_1_512")  # see single_device.py
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # ranks share cores: threads that wait must sleep

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from common import float32_newton_schulz, gpt_matrices
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshmuon import Muon
from meshmuon.ortho import Workspace, orthogonalize, resolve_scheme
from meshmuon.transport import Exchange

LR, MOMENTUM, DECAY = 1e-3, 0.95, 0.1
KELLER = (3.4445, -4.7750, 2.0315)


class Counter:
    """Wraps ``Exchange.start``: what goes through the process group, and how long the host waits for it."""

    def __init__(self) -> None:
        self.waited, self.sent, self.calls = 0.0, 0, 0
        original = Exchange.start

        def start(
            exchange: Exchange, received: Tensor, received_splits: list[int], sent: Tensor, sent_splits: list[int]
        ) -> object:
            self.sent += sum(sent_splits) * sent.element_size()
            self.calls += 1
            return Timed(original(exchange, received, received_splits, sent, sent_splits), self)

        Exchange.start = start  # type: ignore[assignment,method-assign]

    def reset(self) -> None:
        """Starts counting anew."""
        self.waited, self.sent, self.calls = 0.0, 0, 0


class Timed:
    """An exchange under way, whose waiting is added up."""

    def __init__(self, pending: object, counter: Counter) -> None:
        self.pending, self.counter = pending, counter

    def wait(self) -> None:
        """Waits and counts."""
        begin = time.perf_counter()
        self.pending.wait()  # type: ignore[attr-defined]
        self.counter.waited += time.perf_counter() - begin


class Naive:
    """Gathers every whole update on every rank and computes all of them there."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.buffers = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self) -> None:
        """One step."""
        for param, buffer in zip(self.params, self.buffers, strict=True):
            grad = param.grad
            buffer.mul_(MOMENTUM).add_(grad)
            full = (grad + MOMENTUM * buffer).full_tensor()
            update = float32_newton_schulz(full, KELLER, 5, 1e-7)
            shard = distribute_tensor(update, param.device_mesh, param.placements, src_data_rank=None)
            param.mul_(1 - LR * DECAY).add_(shard, alpha=-LR * 0.2 * max(param.shape) ** 0.5)


def make(name: str, shapes: list[tuple[int, int]], mesh: DeviceMesh) -> tuple[list[nn.Parameter], Callable[[], None], object]:
    torch.manual_seed(0)
    values = [torch.randn(shape) / shape[1] ** 0.5 for shape in shapes]
    grads = [torch.randn(shape) for shape in shapes]
    params = [nn.Parameter(distribute_tensor(v, mesh, [Shard(0)], src_data_rank=None)) for v in values]
    for param, grad in zip(params, grads, strict=True):
        param.grad = distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
    if name == "naive":
        naive = Naive(params)
        return params, naive.step, naive
    groups = [{"params": params, "names": [f"layers.{k}.weight" for k in range(len(params))], "use_muon": True}]
    options = {"lr": LR, "weight_decay": DECAY, "scheme": "keller", "none_grad": False}
    ours = Muon(groups, use_distributed_muon=name == "reference", **options)
    return params, lambda: ours.step(), ours


CONTENDERS = ("meshmuon", "reference", "naive")


def timed(step: Callable[[], None]) -> tuple[float, float]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    dist.barrier()
    return time.perf_counter() - wall, time.process_time() - cpu


def pure_work(shapes: list[tuple[int, int]], cores: int) -> Callable[[], None]:
    """All matrices orthogonalised once, divided over as many ranks as there are cores; nothing is sent."""
    workers = min(cores, dist.get_world_size())
    scheme, workspace = resolve_scheme("keller", 5), Workspace()
    mine = [torch.randn(shape) for k, shape in enumerate(sorted(shapes)) if k % workers == dist.get_rank()]
    mine = mine if dist.get_rank() < workers else []
    outs = [torch.empty_like(x) for x in mine]

    def run() -> None:
        for x, out in zip(mine, outs, strict=True):
            orthogonalize(x, scheme, out=out, workspace=workspace)

    return run


def exchanges_alone(optimizer: Muon) -> Callable[[], None]:
    """The exchanges of a step, one after the other, with nothing to do meanwhile."""
    executor = optimizer._executor
    flows = [flow for wave in executor._program.waves for flow in (wave.gather, wave.scatter)]

    def run() -> None:
        for flow in flows:
            flow.start(executor._exchange).wait()

    return run


def host_time(mesh: DeviceMesh, count: int, rounds: int) -> dict[str, float]:
    """Seconds per matrix of a step on 8×8 matrices, where only dispatch is left."""
    _, step, _ = make("meshmuon", [(8, 8)] * count, mesh)
    for _ in range(3):
        step()
    times = [timed(step) for _ in range(rounds)]
    return {
        "wall_us": statistics.median(t[0] for t in times) / count * 1e6,
        "cpu_us": statistics.median(t[1] for t in times) / count * 1e6,
    }


def mean_over_ranks(value: float) -> float:
    word = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(word)
    return word.item() / dist.get_world_size()


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    counter = Counter()
    shapes = gpt_matrices(options.layers, options.width)
    contenders = {name: make(name, shapes, mesh) for name in CONTENDERS}
    for _, step, _ in contenders.values():
        step()
    first = [p.detach().to_local() for p in contenders["meshmuon"][0]]
    differences = {
        name: max(float((p.detach().to_local() - q).abs().max()) for p, q in zip(params, first, strict=True))
        for name, (params, _, _) in contenders.items()
    }
    optimizer = contenders["meshmuon"][2]
    assert isinstance(optimizer, Muon)
    steps = {name: step for name, (_, step, _) in contenders.items()}
    steps["pure work"] = pure_work(shapes, options.cores)
    steps["exchanges alone"] = exchanges_alone(optimizer)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    waits = []
    for _ in track(range(options.rounds), description=f"{world} ranks", disable=rank != 0):
        for name, step in steps.items():
            counter.reset()
            times[name].append(timed(step))
            if name == "meshmuon":
                waits.append(counter.waited)
                sent, calls = counter.sent, counter.calls
    plan = optimizer.plan()
    elements = sum(rows * cols for rows, cols in shapes)
    result = {
        "ranks": world,
        "steps": {
            name: {
                "wall_s": statistics.median(t[0] for t in found),
                "spread_s": max(t[0] for t in found) - min(t[0] for t in found),
                "cpu_s_all_ranks": mean_over_ranks(statistics.median(t[1] for t in found)) * world,
            }
            for name, found in times.items()
        },
        "largest_difference": differences,
        "bytes_sent_counted": mean_over_ranks(sent),
        "bytes_sent_planned": mean_over_ranks(plan.bytes_sent[rank]),
        "bytes_bound": 2 * (world - 1) / world**2 * elements * 4,
        "exchanges": calls,
        "waves": len(plan.lanes),
        "waited_s": mean_over_ranks(statistics.median(waits)),
        "buffer_bytes": max_over_ranks(plan.buffer_bytes(rank)),
        "workspace_bytes": max_over_ranks(optimizer.workspace_bytes()),
        "host": host_time(mesh, options.tiny, options.rounds),
    }
    if rank == 0:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


def max_over_ranks(value: float) -> float:
    word = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(word, dist.ReduceOp.MAX)
    return word.item()


def show(results: list[dict], cores: int, console: Console) -> None:
    table = Table(title=f"one sharded step on {cores} cores, one thread per rank; times in ms")
    for column in (
        "ranks",
        "meshmuon",
        "÷ reference",
        "÷ naive",
        "÷ pure work",
        "sent ÷ bound",
        "wait hidden",
        "buffers MiB",
        "host µs/matrix",
    ):
        table.add_column(column)
    for one in results:
        wall = {name: row["wall_s"] for name, row in one["steps"].items()}
        bound = one["bytes_bound"]
        alone = wall["exchanges alone"]
        table.add_row(
            str(one["ranks"]),
            f"{wall['meshmuon'] * 1e3:.0f}",
            f"{wall['meshmuon'] / wall['reference']:.3f}",
            f"{wall['meshmuon'] / wall['naive']:.3f}",
            f"{wall['meshmuon'] / wall['pure work']:.3f}",
            f"{one['bytes_sent_counted'] / bound:.3f}" if bound else "-",
            f"{1 - one['waited_s'] / alone:.2f}" if one["exchanges"] else "-",
            f"{one['buffer_bytes'] / 2**20:.1f}",
            f"{one['host']['wall_us']:.1f} (cpu {one['host']['cpu_us']:.1f})",
        )
    console.print(table)


def plot(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    names = [*CONTENDERS, "pure work"]
    colours = ("#2a6f97", "#a9b4c2", "#d9c7b0", "#c9e0c5")
    for k, (name, colour) in enumerate(zip(names, colours, strict=True)):
        places = [i + (k - 1.5) * 0.2 for i in range(len(results))]
        axes.bar(places, [one["steps"][name]["wall_s"] * 1e3 for one in results], 0.19, label=name, color=colour)
    axes.set_xticks(range(len(results)), [f"{one['ranks']} ranks" for one in results])
    axes.set_ylabel("median time of a step, ms")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def drive(options: argparse.Namespace) -> None:
    """Runs every number of ranks under torchrun, one after the other, and puts the results together."""
    results = []
    for world in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), __file__]
            for name in ("layers", "width", "rounds", "tiny", "cores"):
                command += [f"--{name}", str(getattr(options, name))]
            subprocess.run([*command, "--out", str(out)], check=True)
            results.append(json.loads(out.read_text()))
    show(results, options.cores, Console(width=160))
    facts = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cores": options.cores,
        "layers": options.layers,
        "width": options.width,
        "rounds": options.rounds,
        "tiny_matrices": options.tiny,
        "results": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts, indent=1) + "\n")
    plot(results, options.out.with_suffix(".png"))
    print(f"wrote {options.out} and {options.out.with_suffix('.png').name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks to run (default 1 2 4)")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers (default 4)")
    parser.add_argument("--width", type=int, default=768, help="model width d: 4 of d×d, d×4d, 4d×d per layer (default 768)")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps per contender (default 7)")
    parser.add_argument("--tiny", type=int, default=500, help="8×8 matrices for the host time (default 500)")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="cores that the ranks share (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/sharded.json"), help="the figures; the plot goes beside")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
    else:
        drive(options)


if __name__ == "__main__":
    main()
