"""One optimizer step on one device: meshmuon beside torch.optim.Muon, on GPT-like matrices.

Contenders take turns within every round, so that a busy machine slows all of them alike; the figures are ratios of medians
of one run. Before timing, all contenders must have computed the same update.

    python benchmarks/single_device.py --layers 2 --rounds 9 --threads 1
"""

from __future__ import annotations

import os

# Some virtual machines advertise AMX but trap its instructions, which kills bfloat16 products on CPU.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX10_1_512")

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.optim._muon as torch_muon
from common import float32_newton_schulz, gpt_matrices
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from meshmuon import Muon

LR = 1e-3


def make_contender(name: str, params: list[Tensor]) -> Callable[[], None]:
    if name.startswith("torch"):
        theirs = torch.optim.Muon(params, lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        if name == "torch.optim.Muon, as shipped (bf16)":
            return lambda: theirs.step()

        def step() -> None:
            with mock.patch.object(torch_muon, "_zeropower_via_newtonschulz", float32_newton_schulz):
                theirs.step()

        return step
    form = "standard" if "standard" in name else "auto"
    groups = [{"params": params, "use_muon": True}]
    ours = Muon(groups, lr=LR, weight_decay=0.1, scheme="keller", none_grad=False, form=form)
    return lambda: ours.step()


CONTENDERS = ("meshmuon", "meshmuon, standard form", "torch.optim.Muon, fp32", "torch.optim.Muon, as shipped (bf16)")


def build(shapes: list[tuple[int, int]], names: tuple[str, ...]) -> dict[str, tuple[list[Tensor], Callable[[], None]]]:
    contenders = {}
    for name in names:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape) / shape[1] ** 0.5) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        contenders[name] = (params, make_contender(name, params))
    return contenders


def check_same_update(contenders: dict[str, tuple[list[Tensor], Callable[[], None]]]) -> dict[str, float]:
    """Largest difference from the first contender's parameters after one step, relative to the step's largest entry."""
    first = next(iter(contenders.values()))[0]
    before = [p.detach().clone() for p in first]
    for _, step in contenders.values():
        step()
    largest = max(float((p - b).detach().abs().max()) for p, b in zip(first, before, strict=True))
    return {
        name: max(float((p - q).detach().abs().max()) for p, q in zip(params, first, strict=True)) / largest
        for name, (params, _) in contenders.items()
    }


def measure(contenders: dict[str, tuple[list[Tensor], Callable[[], None]]], rounds: int) -> dict[str, dict[str, list[float]]]:
    times: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in contenders}
    for _ in track(range(rounds), description="rounds"):
        for name, (_, step) in contenders.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            times[name]["wall"].append(time.perf_counter() - wall)
            times[name]["cpu"].append(time.process_time() - cpu)
    return times


def memory_of_step(step: Callable[[], None]) -> dict[str, int]:
    """Allocations of one step as the CPU allocator reports them: number above a scalar's size, and peak bytes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    now = peak = large = 0
    assert profile.profiler is not None
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
            large += event.nbytes() > 64
    return {"allocations": large, "peak_bytes": peak}


def state_bytes(shapes: list[tuple[int, int]]) -> int:
    """One float32 momentum buffer per matrix: what the first step allocates to keep, for every contender."""
    return sum(4 * rows * cols for rows, cols in shapes)


def summarise(times: dict[str, dict[str, list[float]]], same: dict[str, float], memory: dict[str, list[dict[str, int]]]) -> dict:
    rows = {}
    for name, measured in times.items():
        cpu = statistics.median(measured["cpu"])
        rows[name] = {
            "wall_s": statistics.median(measured["wall"]),
            "wall_spread_s": max(measured["wall"]) - min(measured["wall"]),
            "cpu_s": cpu,
            "difference": same[name],
            "first_step": memory[name][0],
            "third_step": memory[name][1],
        }
    return rows


def show(rows: dict, console: Console) -> None:
    table = Table(title="one step; ratio = meshmuon ÷ contender")
    for column in (
        "contender",
        "wall ms",
        "spread",
        "cpu ms",
        "ratio wall",
        "ratio cpu",
        "rel. difference",
        "peak MiB 1st/3rd",
        "allocs 3rd",
    ):
        table.add_column(column)
    ours = rows["meshmuon"]
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['wall_s'] * 1e3:.1f}",
            f"{row['wall_spread_s'] * 1e3:.1f}",
            f"{row['cpu_s'] * 1e3:.1f}",
            f"{ours['wall_s'] / row['wall_s']:.3f}",
            f"{ours['cpu_s'] / row['cpu_s']:.3f}",
            f"{row['difference']:.1e}",
            f"{row['first_step']['peak_bytes'] / 2**20:.1f} / {row['third_step']['peak_bytes'] / 2**20:.1f}",
            str(row["third_step"]["allocations"]),
        )
    console.print(table)


def plot(rows: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    names = list(rows)
    axes.barh(names, [rows[n]["wall_s"] * 1e3 for n in names], color=["#2a6f97"] + ["#a9b4c2"] * (len(names) - 1))
    axes.invert_yaxis()
    axes.set_xlabel("median time of a step, ms")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="transformer layers (default 2)")
    parser.add_argument("--width", type=int, default=768, help="model width d: 4 of d×d, d×4d, 4d×d per layer (default 768)")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps per contender (default 9)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument(
        "--no-bf16", action="store_true", help="leave out torch.optim.Muon as shipped, which is slow on most CPUs"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench/single_device.json"), help="the figures; the plot goes beside"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    names = CONTENDERS[:-1] if options.no_bf16 else CONTENDERS
    memory: dict[str, list[dict[str, int]]] = {}
    for name, (_, step) in build(gpt_matrices(options.layers, options.width), names).items():
        memory[name] = [memory_of_step(step)]
        step()
        memory[name].append(memory_of_step(step))
    contenders = build(gpt_matrices(options.layers, options.width), names)
    same = check_same_update(contenders)
    rows = summarise(measure(contenders, options.rounds), same, memory)
    show(rows, Console(width=160))
    result = {
        "machine": platform.processor() or platform.machine(),
        "onednn_max_cpu_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "not set"),
        "torch": torch.__version__,
        "threads": options.threads,
        "layers": options.layers,
        "width": options.width,
        "rounds": options.rounds,
        "state_bytes": state_bytes(gpt_matrices(options.layers, options.width)),
        "contenders": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    plot(rows, options.out.with_suffix(".png"))
    print(f"wrote {options.out} and {options.out.with_suffix('.png').name}")


if __name__ == "__main__":
    main()
