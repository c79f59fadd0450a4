"""A step on experts under EP × FSDP over gloo processes: meshmuon beside its all-gather reference path.

``whole``: as many experts as ranks or more, each on its rank. ``cut``: experts over ``ep``, their rows over ``efsdp``, so that
several ranks share each expert. Contenders take turns; figures are medians of one run.

    python benchmarks/experts.py
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
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from meshmuon import Muon

LAYOUTS = {"whole": (_StridedShard(0, split_factor=2), Shard(0)), "cut": (Shard(1), Shard(0))}


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("efsdp", "ep"))
    optimizers, names = {}, [f"layers.{k}.experts.w" for k in range(options.stacks)]
    for layout, placements in LAYOUTS.items():
        for path in ("meshmuon", "reference"):
            generator = torch.Generator().manual_seed(0)
            values = [torch.randn(options.experts, options.rows, options.cols, generator=generator) for _ in names]
            params = [nn.Parameter(distribute_tensor(v, mesh, list(placements), src_data_rank=None)) for v in values]
            for param in params:
                param.grad = param.detach().clone()
            group = {"params": params, "names": names, "use_muon": True, "expert_keys": ["experts"]}
            optimizers[layout, path] = Muon([group], none_grad=False, use_distributed_muon=path == "reference")
    times: dict[tuple[str, str], list[float]] = {key: [] for key in optimizers}
    for turn in track(range(options.rounds + 1), description="rounds", disable=dist.get_rank() != 0):
        for key, optimizer in optimizers.items():
            dist.barrier()
            begin = time.perf_counter()
            optimizer.step()
            dist.barrier()
            if turn:
                times[key].append(time.perf_counter() - begin)
    results = []
    for layout in LAYOUTS:
        ours, reference = (optimizers[layout, path] for path in ("meshmuon", "reference"))
        pairs = zip(ours.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True)
        plan = ours.plan()
        results.append(
            {
                "layout": layout,
                "wall_s": {path: statistics.median(times[layout, path]) for path in ("meshmuon", "reference")},
                "bit_equal": all(torch.equal(p.to_local(), q.to_local()) for p, q in pairs),
                "bytes_sent": max(plan.bytes_sent.values()),
                "reference_bytes": (dist.get_world_size() - 1) / dist.get_world_size() * 4 * sum(p.numel() for p in params),
                "waves": len(plan.lanes),
            }
        )
    if dist.get_rank() == 0:
        Path(options.out).write_text(json.dumps(results) + "\n")
    dist.destroy_process_group()


def drive(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(options.ranks),
            __file__,
        ]
        for name in ("ranks", "stacks", "experts", "rows", "cols", "rounds"):
            command += [f"--{name}", str(getattr(options, name))]
        subprocess.run([*command, "--out", str(out)], check=True)
        results = json.loads(out.read_text())
    table = Table(title=f"one step on experts, {options.ranks} ranks")
    for column in (
        "experts",
        "meshmuon ms",
        "reference ms",
        "ratio",
        "sent per rank MiB",
        "all-gather per rank MiB",
        "bit-equal",
    ):
        table.add_column(column)
    for one in results:
        ours, theirs = one["wall_s"]["meshmuon"], one["wall_s"]["reference"]
        sent, gathered = one["bytes_sent"] / 2**20, one["reference_bytes"] / 2**20
        cells = (f"{ours * 1e3:.0f}", f"{theirs * 1e3:.0f}", f"{ours / theirs:.3f}", f"{sent:.1f}", f"{gathered:.1f}")
        table.add_row(one["layout"], *cells, str(one["bit_equal"]))
    Console(width=140).print(table)
    facts = {**{k: v for k, v in vars(options).items() if k != "out"}, "machine": platform.processor() or platform.machine()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**facts, "torch": torch.__version__, "results": results}, indent=1) + "\n")
    print(f"wrote {options.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="an even number of ranks (default 4)")
    parser.add_argument("--stacks", type=int, default=3, help="expert parameters (default 3)")
    parser.add_argument("--experts", type=int, default=16, help="experts per parameter (default 16)")
    parser.add_argument("--rows", type=int, default=512, help="rows of an expert (default 512)")
    parser.add_argument("--cols", type=int, default=256, help="columns of an expert (default 256)")
    parser.add_argument("--rounds", type=int, default=7, help="timed steps per contender (default 7)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/experts.json"), help="the figures")
    options = parser.parse_args()
    run_rank(options) if "RANK" in os.environ else drive(options)


if __name__ == "__main__":
    main()
