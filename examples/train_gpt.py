"""Train a small byte-level GPT twice, with meshmuon and with a tuned AdamW, and compare.

Both runs start from the same weights and see the same bytes (Python's own standard library) in the same
order, over two processes that share model and batch by FSDP2 (--nproc for another number). With the
defaults it takes a little over four minutes on two CPU cores and writes a folder runs/<time>/ with

  loss.png    validation loss over steps and over time
  health.png  meshmuon's health: updates, gradients, singular values
  log.json    every figure of the runs, the options, the machine
  report.md   the comparison in one page

Ctrl-C stops early and still writes the report of what was done. With --checkpoint-every the same command, given
again after Ctrl-C or a crash, goes on from the last checkpoint, also with another number of processes.

With --qk-clip it compares something else: meshmuon without and with QK-clip, on a model without QK-norm and at an lr so
large that attention logits explode. logits.png, with the loss and the largest logit of every step, then stands for
loss.png.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from demo import options
from demo.checkpoints import FOLDER, CheckpointError, Checkpoints, opened, unfinished_run
from demo.model import build_model
from demo.optimizers import CONTENDERS
from demo.processes import Runtime, from_first, joined
from demo.progress import QuietProgress, show_progress
from demo.report import Setting, new_folder, write_report
from demo.train import NonFiniteLossError, Run, RunResult, warm_up

INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """The command line."""

    class Format(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
        pass

    result = argparse.ArgumentParser(description=__doc__, formatter_class=Format, allow_abbrev=False)
    result.add_argument("--out", type=Path, default=Path("runs"), help="folder in which runs/<time>/ is made")
    result.add_argument(
        "--plot", action=argparse.BooleanOptionalAction, default=True, help="draw the plot (needs matplotlib)"
    )
    options.add_comparison_options(result)
    options.add_process_options(result)
    options.add_checkpoint_options(result)
    options.add_model_options(result)
    options.add_train_options(result)
    options.add_optimizer_options(result)
    return result


def prepare(args: argparse.Namespace) -> tuple[Setting, Runtime]:
    """Check everything that can be checked before the first step; `ValueError` says what to change."""
    options.contenders(args)
    runtime = options.runtime(args)
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the plot needs matplotlib: install it, or pass --no-plot")
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


def places(args: argparse.Namespace, setting: Setting, stack: ExitStack) -> tuple[Path, Checkpoints | None]:
    """The folder of the report, an unfinished run's if there is one to go on with, and the checkpoints if they are
    kept.
    """
    if not args.checkpoint_every:
        for flag in ("--checkpoint-dir", "--stop-after"):
            if getattr(args, flag[2:].replace("-", "_")) is not None:
                raise ValueError(f"{flag} without --checkpoint-every: say after how many steps to write a checkpoint")
        return new_folder(args.out), None
    folder, root = None, args.checkpoint_dir
    if root is None:
        folder = unfinished_run(args.out, options.contenders(args), setting.options) or new_folder(args.out)
        root = folder / FOLDER
    checkpoints = stack.enter_context(opened(root, args.checkpoint_every, setting.options))
    return folder or new_folder(args.out), replace(checkpoints, stop_after=args.stop_after)


def train_all(
    names: Sequence[str], setting: Setting, runtime: Runtime, checkpoints: Checkpoints | None, results: list[RunResult]
) -> Exception | KeyboardInterrupt | None:
    """Train one after the other into `results`; returns what stopped it early, if anything did."""
    try:
        checkpoints = from_first(checkpoints, runtime)
        warm_up(setting.model, setting.train, setting.corpus, runtime)
        for name in names:
            try:
                train_one(name, setting, runtime, checkpoints, results)
            except NonFiniteLossError as diverged:
                if not CONTENDERS[name].may_diverge:
                    raise
                say(str(diverged), runtime)
    except (KeyboardInterrupt, NonFiniteLossError, CheckpointError) as stop:
        return stop
    return None


def train_one(
    name: str, setting: Setting, runtime: Runtime, checkpoints: Checkpoints | None, results: list[RunResult]
) -> None:
    """Train a contender from its start or from its newest checkpoint; read it back where it has already finished."""
    checkpoint = None if checkpoints is None else checkpoints.newest(name, runtime)
    if checkpoint is not None and checkpoint.result.status == "finished":
        results.append(checkpoint.result)
        say(f"{checkpoint.result.title}: finished before, read from {checkpoint.path}", runtime)
        return
    run = Run(name, setting.corpus, setting.model, setting.optimizer, setting.train, runtime)
    if checkpoints is not None and checkpoint is not None:
        checkpoints.resume(run, checkpoint)
        say(f"{run.result.title}: goes on after step {run.result.steps_done} from {checkpoint.path}", runtime)
    results.append(run.result)
    after_step = None if checkpoints is None else checkpoints.after_step
    if runtime.rank:
        run.train(QuietProgress(), after_step)
        return
    done = run.result.steps_done
    with show_progress(run.result.title, setting.train.steps, run.result.tokens_per_step, done) as progress:
        run.train(progress, after_step)


def say(text: str, runtime: Runtime) -> None:
    """Print once, not once per process."""
    if runtime.rank == 0:
        print(text, flush=True)


def follow(arguments: Sequence[str] | None) -> int:
    """What every process but the first does: the same steps, without a word."""
    args = options.parsed(parser(), arguments)
    setting, runtime = prepare(args)
    with joined(runtime, follow, arguments):
        train_all(options.contenders(args), setting, runtime, None, [])
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    if int(os.environ.get("RANK", "0")):
        return follow(arguments)
    command_line = parser()
    args = options.parsed(command_line, arguments)
    with ExitStack() as stack:
        try:
            setting, runtime = prepare(args)
            folder, checkpoints = places(args, setting, stack)
        except (ValueError, OSError) as error:
            command_line.error(str(error))
        print(introduction(setting), flush=True)
        results: list[RunResult] = []
        stop: Exception | KeyboardInterrupt | None
        try:
            with joined(runtime, follow, arguments):
                stop = train_all(options.contenders(args), setting, runtime, checkpoints, results)
        except (KeyboardInterrupt, ChildProcessError) as error:
            stop = error
        headline = write_report(folder, setting, results, plot=args.plot)
    return conclude(stop, headline, folder, checkpoints)


def introduction(setting: Setting) -> str:
    """What is about to be trained, in one line."""
    return (
        f"{setting.parameters:,} parameters, {setting.corpus.train.numel() / 1e6:.1f} MB of training text, "
        f"{setting.train.steps} steps of {setting.train.batch_size} × {setting.model.seq_len} bytes "
        f"on {setting.device}" + (f", {setting.processes} processes with FSDP2" if setting.processes > 1 else "")
    )


def conclude(
    stop: Exception | KeyboardInterrupt | None, headline: str, folder: Path, checkpoints: Checkpoints | None
) -> int:
    """Say how it ended and return the exit code."""
    more = "" if checkpoints is None else "\nThe same command goes on from the last checkpoint."
    if isinstance(stop, Exception):
        print(f"\nerror: {stop}\nWhat was done so far: {folder / 'report.md'}{more}", file=sys.stderr)
        return 1
    if stop is not None:
        print(f"\nStopped by {str(stop) or 'Ctrl-C'}; the report covers what was done.{more}")
    print(f"\n{headline}\nReport: {folder / 'report.md'}")
    return INTERRUPTED if stop is not None else 0


if __name__ == "__main__":
    sys.exit(main())
