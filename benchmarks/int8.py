"""int8 on the wire: bytes and seconds of a step beside those with bfloat16 and float32, measured and predicted.

    make bench BENCH=int8

Measured steps are those of row-sharded matrices on 2 and 4 gloo ranks over loopback, as it is and slowed down as in
``sharded.py``; the dtypes take turns. Predicted steps are those of ``meshmuon plan`` on H100s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common  # first: it sets what torch reads when it starts
import torch
import torch.distributed as dist
from common import COLOURS, Benchmark, Goal, Report, quartiles
from sharded import in_namespace, why_no_link
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshmuon import Muon
from meshmuon.tools.simulate.description import load_model
from meshmuon.tools.simulate.inputs import load_machine
from meshmuon.tools.simulate.sharding import MeshAxes
from meshmuon.tools.simulate.simulation import MuonOptions, Simulation, Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DTYPES: dict[str, Any] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bfloat16, int8": (torch.bfloat16, torch.int8),
    "int8": torch.int8,
}
MODELS = (
    ("kimi-k2", "dp_shard=1024,ep=64"),
    ("deepseek-v3", "dp_shard=2048,ep=64"),
    ("llama3-8b", "dp_replicate=8,dp_shard=64"),
    ("llama3-70b", "dp_shard=64"),
    ("llama3-405b", "dp_shard=2048"),
)
LINKS = (None, "1gbit", "200mbit")


def work(options: argparse.Namespace) -> None:
    """What each rank does: steps with every dtype in turns."""
    warnings.simplefilter("ignore")  # of 4d × d weights that may be fused ones
    dist.init_process_group("gloo")
    mesh, d = init_device_mesh("cpu", (dist.get_world_size(),)), options.width
    shapes = [(d, d)] * 4 + [(4 * d, d), (d, 4 * d)]
    optimizers, seconds = {}, {name: list[float]() for name in DTYPES}
    for name, dtypes in DTYPES.items():
        torch.manual_seed(0)
        params = [
            nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)], src_data_rank=None))
            for _ in range(options.layers)
            for shape in shapes
        ]
        for param in params:
            param.grad = torch.randn_like(param)
        group = {"params": params, "names": [f"w{k}" for k in range(len(params))], "use_muon": True}
        optimizers[name] = Muon([group], comm_dtype=dtypes, none_grad=False)
    for turn in range(options.rounds + 1):
        for name, optimizer in optimizers.items():
            dist.barrier()
            begin = time.perf_counter()
            optimizer.step()
            lasted = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(lasted, dist.ReduceOp.MAX)
            if turn:
                seconds[name].append(float(lasted))
    if dist.get_rank() == 0:
        sent = {name: sum(optimizer.plan().bytes_sent.values()) for name, optimizer in optimizers.items()}
        Path(options.worker).write_text(json.dumps({"seconds": seconds, "sent": sent}))
    dist.destroy_process_group()


def run_world(world: int, link: str | None, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(world),
            __file__,
        ]
        for name in ("width", "layers", "rounds"):
            command += [f"--{name}", str(getattr(options, name))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if link:
            command, environment["GLOO_SOCKET_IFNAME"] = [*in_namespace(link), *command], "lo"
        subprocess.run([*command, "--worker", str(out)], check=True, env=environment, timeout=options.timeout)
        return {"ranks": world, "link": link, **json.loads(out.read_text())}


def predict(options: argparse.Namespace) -> list[dict[str, Any]]:
    machine, rows = load_machine("h100"), []
    for name, axes in options.models:
        row: dict[str, Any] = {"model": name, "mesh": axes}
        for label, dtypes in list(DTYPES.items())[1:]:
            muon = MuonOptions(comm_dtype=dtypes, param_dtype=torch.bfloat16)
            stage = Simulation.run(load_model(name), MeshAxes.parse(axes), machine, muon, Workload(2**22, 0.4)).slowest
            sent, planned = sum(stage.plan.bytes_sent.values()), stage.timeline
            row[label] = {"seconds": planned.seconds, "waited": planned.waited_for, "sent": sent}
        rows.append(row)
    return rows


def measure(options: argparse.Namespace, report: Report) -> dict[str, Any]:
    links = []
    for link in options.links:
        reason = None if link is None else why_no_link(link)
        if reason is None:
            links.append(link)
        else:
            report.note(reason)
    places = [(world, link) for world in options.ranks for link in links]
    steps = [run_world(*place, options) for place in report.each(places, str)]
    return {"steps": steps, "models": predict(options)}


def _ratio(row: dict[str, Any], name: str, to: str = "bfloat16") -> float:
    """The median over the turns of a step's seconds over those of the step before with ``to``."""
    return quartiles([a / b for a, b in zip(row["seconds"][name], row["seconds"][to], strict=True)]).median


def show(results: dict[str, Any], report: Report) -> None:
    rows = []
    for row in results["steps"]:
        sent = row["sent"]
        for name in DTYPES:
            milliseconds = quartiles(row["seconds"][name]).text(1e3, 0)
            cells = (
                milliseconds,
                f"{_ratio(row, name):.2f}",
                f"{sent[name] / 1e6:.1f}",
                f"{sent[name] / sent['bfloat16']:.3f}",
            )
            rows.append((str(row["ranks"]), row["link"] or "loopback", name, *cells))
    report.table(
        "steps over a link", ("ranks", "link", "comm_dtype", "step, ms", "÷ bfloat16", "MB sent", "÷ bfloat16"), rows
    )
    rows = []
    for row in results["models"]:
        steps = [f"{1e3 * row[name]['seconds']:.1f} ({1e3 * row[name]['waited']:.1f})" for name in list(DTYPES)[1:]]
        bytes_of = [f"{row[name]['sent'] / row['bfloat16']['sent']:.3f}" for name in list(DTYPES)[2:]]
        rows.append((row["model"], row["mesh"], *steps, *bytes_of))
    names = list(DTYPES)[1:]
    columns = (
        "model",
        "mesh",
        *(f"{name}, ms (waiting)" for name in names),
        *(f"{name}: bytes ÷ bfloat16" for name in names[1:]),
    )
    report.table("predicted steps on H100s", columns, rows)


def goals(results: dict[str, Any], options: argparse.Namespace) -> list[Goal]:
    found = []
    for row in results["steps"]:
        place = f"{row['ranks']} ranks, {row['link'] or 'loopback'}"
        found.append(
            Goal(f"{place}: step with int8 ÷ bfloat16", _ratio(row, "int8"), most=0.62 if row["link"] else 1.05)
        )
        found.append(
            Goal(f"{place}: bytes with int8 ÷ bfloat16", row["sent"]["int8"] / row["sent"]["bfloat16"], most=0.51)
        )
    largest = max(row["bfloat16, int8"]["sent"] / row["bfloat16"]["sent"] for row in results["models"])
    return [*found, Goal("models: bytes with (bfloat16, int8) ÷ bfloat16, at most", largest, most=0.765)]


def plot(results: dict[str, Any], figure: Figure) -> None:
    axes, steps = figure.subplots(), results["steps"]
    for k, (name, colour) in enumerate(zip(DTYPES, ("line", "others", "AdamW", "ours"), strict=True)):
        places = [place + 0.2 * k for place in range(len(steps))]
        axes.bar(places, [_ratio(row, name) for row in steps], 0.2, label=name, color=COLOURS[colour])
    axes.set_xticks(range(len(steps)), [f"{row['ranks']} ranks\n{row['link'] or 'loopback'}" for row in steps])
    axes.set_ylabel("step ÷ bfloat16")
    axes.legend()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default 2 4)")
    parser.add_argument("--width", type=int, default=256, help="d: 4 of d×d, 4d×d and d×4d per layer (default 256)")
    parser.add_argument("--layers", type=int, default=8, help="layers (default 8)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds after which a run is given up (default 300)"
    )
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.links, options.models, options.rounds = LINKS, MODELS, options.rounds or 7
    if options.quick:
        options.links, options.models, options.ranks, options.width = (None,), (("llama3-8b", "dp_shard=8"),), [2], 128
        options.layers, options.rounds = 1, 2


BENCHMARK = Benchmark("int8", __doc__, measure, show, goals, plot, (9, 5), add_options, settle_options)

if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        parser = common.make_parser(__doc__)
        add_options(parser)
        work(parser.parse_args())
    else:
        BENCHMARK.main()
