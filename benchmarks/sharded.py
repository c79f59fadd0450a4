"""A sharded optimizer step over gloo processes: meshmuon beside the naive way, on five kinds of layouts.

The naive way is what a user would write: the whole of every update on every rank, torch.optim.Muon's Newton–Schulz in
float32 there, and the own shard of the result. ``reference`` is ``use_distributed_muon=True``. For DistMuon the naive
way averages all gradients on all ranks and computes everything everywhere. Contenders take turns; figures are ratios of
one run, round by round.

With more ranks than cores, ranks take turns on a core: the naive way then pays for every rank's repeated work, as it
does in energy on a real cluster, but time hidden behind other work cannot be told from time in which another rank had
the core. What is said of hiding is taken from runs with no more ranks than cores.

A slowed link is a network namespace of its own whose loopback lets through so many bits per second, all ranks together;
it needs root and the kernel's token bucket filter. Delay would need netem as well and is not set.

    python benchmarks/sharded.py                          # 1, 2, 4 and 8 ranks, in turn, then a slowed link
    python benchmarks/sharded.py --ranks 4 --layouts HSDP FSDP2 --link none
    python benchmarks/sharded.py --ranks --link 1gbit          # the slowed link alone
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common  # first: it sets what torch reads when it starts
from common import Goal, Quartiles, Report
from ranks import OPTIONS, run_ranks

WORKER = Path(__file__).with_name("ranks.py")
COLUMNS = (
    "ranks",
    "layout",
    "step, ms",
    "÷ naive",
    "÷ reference",
    "÷ pure work",
    "sent ÷ bound",
    "sent ÷ naive's",
    "exchanges",
    "hidden",
    "workspace MiB",
    "host µs/matrix",
)

LINKED = ["FSDP2", "HSDP", "EP×FSDP, cut"]  # on 4 ranks over a slowed link


def run_world(
    world: int, options: argparse.Namespace, *, layouts: Sequence[str] = (), link: str | None = None
) -> list[dict[str, Any]]:
    """Runs one number of ranks; with ``link`` inside a network namespace."""
    rounds = options.rounds or (2 if options.quick or world > 4 else 3)
    own = argparse.Namespace(**{**vars(options), "rounds": rounds, "tiny": 0 if link or world > 2 else options.tiny})
    chosen = ["--layouts", *layouts] if layouts else []
    results = run_ranks(WORKER, world, own, OPTIONS, *chosen, inside=in_namespace(link) if link else ())
    return [{**result, "link": link} for result in results]


def in_namespace(link: str) -> list[str]:
    """What to write before a command so that it runs in a network namespace whose loopback has that rate."""
    slow = f"ip link set lo up && tc qdisc add dev lo root tbf rate {link} burst 256kb latency 2s"
    return ["unshare", "--net", "sh", "-c", f'{slow} && exec "$@"', "sh"]


def why_no_link(link: str) -> str | None:
    """Why the link cannot be slowed down here, or None."""
    missing = [tool for tool in ("unshare", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    tried = subprocess.run([*in_namespace(link), "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else tried.stderr.strip().splitlines()[-1]


def row_of(result: dict[str, Any]) -> tuple[str, ...]:
    shares = {name: Quartiles(**share).text(digits=2) for name, share in result["ratio"].items()}
    bound, naive = result["bytes_bound"], result["bytes_of_naive"]
    host = result.get("host")
    return (
        str(result["ranks"]) + (f", {result['link']}" if result["link"] else ""),
        result["layout"],
        Quartiles(**result["steps"]["meshmuon"]["wall_s"]).text(1e3, 0),
        shares["naive"],
        shares.get("reference", "–"),
        shares.get("pure work", "–"),
        f"{result['bytes_sent'] / bound:.3f}" if bound else f"{result['bytes_sent']:.0f} B, bound 0",
        f"{result['bytes_sent'] / naive:.3f}" if naive else "–",
        f"{result['exchanges']} + {result['agreements']} small",
        f"{result['hidden']:.2f}" if result["hidden"] is not None else "–",
        f"{result['workspace_bytes'] / 2**20:.1f}",
        f"{host['wall_us']:.1f} (cpu {host['cpu_us']:.1f})" if host else "–",
    )


def compute_is_larger(result: dict[str, Any]) -> bool:
    steps = result["steps"]
    return (
        "pure work" in steps and steps["pure work"]["wall_s"]["median"] > steps["exchanges alone"]["wall_s"]["median"]
    )


def goals_of(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[Goal]:
    goals = []
    for result in results:
        place = f"{result['layout']} on {result['ranks']} ranks" + (f" over {result['link']}" if result["link"] else "")
        if result["ranks"] == 4:
            goals.append(Goal(f"{place}: step ÷ naive", result["ratio"]["naive"]["median"], most=0.5))
        if result["auto_over_polar_express"] and result["ranks"] in (2, 4):
            auto = result["auto_over_polar_express"]["median"]
            goals.append(Goal(f"{place}: step with auto ÷ with polar_express", auto, most=0.55))
        if result["ranks"] > 1 and result["bytes_bound"]:
            goals.append(Goal(f"{place}: bytes ÷ bound", result["bytes_sent"] / result["bytes_bound"], most=1.001))
        if 1 < result["ranks"] <= options.cores and compute_is_larger(result):
            goals.append(Goal(f"{place}: share of communication hidden", result["hidden"], least=0.9))
        if "host" in result and result["ranks"] > 1:
            goals.append(Goal(f"{place}: host µs per matrix", result["host"]["cpu_us"], most=30, note="process time"))
    largest = max(results, key=lambda result: float(result["workspace_bytes"]))
    share = largest["workspace_bytes"] / largest["two_waves_bytes"]
    goals.append(
        Goal("extra memory ÷ two waves", share, most=1, note=f"{largest['layout']} on {largest['ranks']} ranks")
    )
    return goals


def measure(options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for world in report.each(options.ranks, lambda world: f"{world} ranks"):
        results += run_world(world, options, layouts=options.layouts)
    if options.link != "none":
        reason = why_no_link(options.link)
        if reason is None:
            results += run_world(2, options, layouts=["FSDP2"], link=options.link)
            results += run_world(4, options, layouts=options.layouts or LINKED, link=options.link)
        else:
            report.note(f"no slowed link here: {reason}")
    return results


def show(results: Sequence[dict[str, Any]], report: Report) -> None:
    options = report.facts["options"]
    cores, threads = options["cores"], options["threads"]
    report.table(f"one sharded step on {cores} cores, {threads} thread(s) per rank", COLUMNS, map(row_of, results))
    if max(options["ranks"], default=0) > cores:
        report.note(f"more ranks than the {cores} cores take turns on them: see the head of benchmarks/sharded.py.")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="*", default=None, help="numbers of ranks to run (default 1 2 4 8)")
    parser.add_argument("--layouts", nargs="+", default=[], help="names of layouts (default all that fit)")
    parser.add_argument(
        "--layers", type=int, default=4, help="transformer layers for FSDP2, half of them elsewhere (default 4)"
    )
    parser.add_argument(
        "--width", type=int, default=512, help="model width d: 4 of d×d, d×4d, 4d×d per layer (default 512)"
    )
    parser.add_argument("--tiny", type=int, default=500, help="8×8 matrices for the host time (default 500)")
    parser.add_argument(
        "--cores", type=int, default=os.cpu_count() or 1, help="cores that the ranks share (default: all)"
    )
    parser.add_argument(
        "--link", default=None, help="rate of the slowed link, as tc writes it, or none (default 1gbit)"
    )
    parser.add_argument(
        "--timeout", type=float, default=400.0, help="seconds after which a number of ranks is given up (default 400)"
    )


def settle_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.quick:
        options.ranks = [2, 4] if options.ranks is None else options.ranks
        options.layers, options.width, options.tiny, options.link = 2, 32, 20, options.link or "none"
    options.ranks, options.link = [1, 2, 4, 8] if options.ranks is None else options.ranks, options.link or "1gbit"


if __name__ == "__main__":
    common.Benchmark("sharded", __doc__, measure, show, goals_of, add_options, settle_options).main()
