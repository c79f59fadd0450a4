"""A data parallel step over gloo processes: gradients to new weights, three ways.

``all-reduce + Muon`` averages all gradients on every rank and repeats all the work there, as DDP with any Muon does; with
``replica_group`` the work is divided and results are sent; ``DistMuon`` averages at the owners. Contenders take turns; figures
are medians of one run.

    python benchmarks/data_parallel.py                      # 2 and 4 ranks
"""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX10_1_512")  # see single_device.py
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

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
from common import gpt_matrices
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from meshmuon import DistMuon, Muon

CONTENDERS = ("all-reduce + Muon", "all-reduce + Muon(replica_group)", "DistMuon")


def make(name: str, shapes: list[tuple[int, int]]) -> tuple[list[nn.Parameter], Callable[[], None]]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    own = torch.Generator().manual_seed(dist.get_rank())
    grads = [torch.randn(shape, generator=own) for shape in shapes]
    groups = [{"params": params, "names": [f"layers.{k}.weight" for k in range(len(params))], "use_muon": True}]
    options = {"lr": 0.02, "weight_decay": 0.0, "adjust_lr_fn": "original", "none_grad": False}
    if name == "DistMuon":
        ours: Muon = DistMuon(groups, **options)
    else:
        ours = Muon(groups, replica_group=dist.group.WORLD if "replica" in name else None, **options)

    def step() -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        if name != "DistMuon":
            pending = [dist.all_reduce(param.grad, async_op=True) for param in params]
            for work in pending:
                work.wait()
            for param in params:
                param.grad.div_(dist.get_world_size())
        ours.step()

    return params, step


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shapes = gpt_matrices(options.layers, options.width)
    contenders = {name: make(name, shapes) for name in CONTENDERS}
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for turn in track(range(options.rounds + 1), description=f"{dist.get_world_size()} ranks", disable=dist.get_rank() != 0):
        for name, (_, step) in contenders.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            if turn:
                times[name].append(time.perf_counter() - begin)
    first = contenders[CONTENDERS[0]][0]
    result = {
        "ranks": dist.get_world_size(),
        "wall_s": {name: statistics.median(found) for name, found in times.items()},
        "largest_difference": {
            name: max(float((p - q).detach().abs().max()) for p, q in zip(params, first, strict=True))
            for name, (params, _) in contenders.items()
        },
    }
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps(result) + "\n")
    dist.destroy_process_group()


def drive(options: argparse.Namespace) -> None:
    results = []
    for world in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "result.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), __file__]
            command += ["--layers", str(options.layers), "--width", str(options.width), "--rounds", str(options.rounds)]
            subprocess.run([*command, "--out", str(out)], check=True)
            results.append(json.loads(out.read_text()))
    table = Table(title="one data parallel step, gradients included; ms")
    for column in ("ranks", *CONTENDERS, "DistMuon ÷ all-reduce + Muon"):
        table.add_column(column)
    for one in results:
        walls = [one["wall_s"][name] for name in CONTENDERS]
        table.add_row(str(one["ranks"]), *(f"{wall * 1e3:.0f}" for wall in walls), f"{walls[2] / walls[0]:.3f}")
    Console(width=140).print(table)
    facts = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "layers": options.layers,
        "width": options.width,
        "rounds": options.rounds,
        "results": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"wrote {options.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks to run (default 2 4)")
    parser.add_argument("--layers", type=int, default=2, help="transformer layers (default 2)")
    parser.add_argument("--width", type=int, default=768, help="model width d: 4 of d×d, d×4d, 4d×d per layer (default 768)")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps per contender (default 7)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/data_parallel.json"), help="the figures")
    options = parser.parse_args()
    run_rank(options) if "RANK" in os.environ else drive(options)


if __name__ == "__main__":
    main()
