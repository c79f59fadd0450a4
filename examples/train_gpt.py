"""Train a small byte-level GPT twice, with meshmuon and with a tuned AdamW, and compare.

Both runs start from the same weights and see the same bytes (Python's own standard library) in the same
order, over two processes that share model and batch by FSDP2 (--nproc for another number). With the
defaults it takes a little over four minutes on two CPU cores and writes a folder runs/<time>/ with

  loss.png    validation loss over steps and over time
  log.json    every figure of the runs, the options, the machine
  report.md   the comparison in one page

Ctrl-C stops early and still writes the report of what was done.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from demo import options
from demo.model import build_model
from demo.optimizers import OPTIMIZERS
from demo.processes import Runtime, joined
from demo.progress import QuietProgress, show_progress
from demo.report import Setting, new_folder, write_report
from demo.train import NonFiniteLossError, Run, RunResult, warm_up

INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The command line."""

    class Format(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass

    result = argparse.ArgumentParser(description=__doc__, formatter_class=Format, allow_abbrev=False)
    result.add_argument("--only", choices=(*OPTIMIZERS, "both"), default="both", help="which runs to do")
    result.add_argument("--out", type=Path, default=Path("runs"), help="folder in which runs/<time>/ is made")
    result.add_argument("--plot", action=argparse.BooleanOptionalAction, default=True, help="draw loss.png (needs matplotlib)")
    options.add_process_options(result)
    options.add_model_options(result)
    options.add_train_options(result)
    options.add_optimizer_options(result)
    return result


def prepare(args: argparse.Namespace) -> tuple[Setting, Runtime]:
    """Check everything that can be checked before the first step; `ValueError` says what to change."""
    runtime = options.runtime(args)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("loss.png needs matplotlib: install it, or pass --no-plot")
    model = options.model_config(args)
    setting = Setting(
        model=model,
        train=options.train_config(args),
        optimizer=options.optimizer_config(args),
        corpus=options.corpus(args),
        device=runtime.device,
        processes=runtime.world_size,
        parameters=sum(p.numel() for p in build_model(model, args.seed, runtime.device).parameters()),
    )
    return setting, runtime


def train_all(
    names: Sequence[str], setting: Setting, runtime: Runtime, results: list[RunResult]
) -> Exception | KeyboardInterrupt | None:
    """Train one after the other into `results`; returns what stopped it early, if anything did."""
    try:
        warm_up(setting.model, setting.train, setting.corpus, runtime)
        for name in names:
            run = Run(name, setting.corpus, setting.model, setting.optimizer, setting.train, runtime)
            results.append(run.result)
            if runtime.rank:
                run.train(QuietProgress())
                continue
            with show_progress(run.result.title, setting.train.steps, run.result.tokens_per_step) as progress:
                run.train(progress)
    except (KeyboardInterrupt, NonFiniteLossError) as stop:
        return stop
    return None


def names_of(args: argparse.Namespace) -> Sequence[str]:
    """The runs to do."""
    return OPTIMIZERS if args.only == "both" else (args.only,)


def follow(arguments: Sequence[str] | None) -> int:
    """What every process but the first does: the same steps, without a word."""
    args = parser().parse_args(arguments)
    setting, runtime = prepare(args)
    with joined(runtime, follow, arguments):
        train_all(names_of(args), setting, runtime, [])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    if int(os.environ.get("RANK", "0")):
        return follow(arguments)
    command_line = parser()
    args = command_line.parse_args(arguments)
    try:
        setting, runtime = prepare(args)
        folder = new_folder(args.out)
    except (ValueError, OSError) as error:
        command_line.error(str(error))
    print(
        f"{setting.parameters:,} parameters, {setting.corpus.train.numel() / 1e6:.1f} MB of training text, "
        f"{setting.train.steps} steps of {setting.train.batch_size} × {setting.model.seq_len} bytes "
        f"on {runtime.device}" + (f", {runtime.world_size} processes with FSDP2" if runtime.world_size > 1 else ""),
        flush=True,
    )
    results: list[RunResult] = []
    stop: Exception | KeyboardInterrupt | None
    try:
        with joined(runtime, follow, arguments):
            stop = train_all(names_of(args), setting, runtime, results)
    except (KeyboardInterrupt, ChildProcessError) as error:  # before the training began
        stop = error
    headline = write_report(folder, setting, results, plot=args.plot)
    if isinstance(stop, Exception):
        print(f"\nerror: {stop}\nWhat was done so far: {folder / 'report.md'}", file=sys.stderr)
        return 1
    if stop is not None:
        print("\nStopped by Ctrl-C; the report covers what was done.")
    print(f"\n{headline}\nReport: {folder / 'report.md'}")
    return INTERRUPTED if stop is not None else 0


if __name__ == "__main__":
    sys.exit(main())
