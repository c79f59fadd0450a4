"""Find the learning rate of either optimizer for the demo's model, or compare update rules, and write the table.

Every combination of the given learning rates, weight decays, schemes, rules and seeds is one training run of the
same length as the demo's. Results go to sweep.json after each run, so a stopped sweep continues where it was;
sweep.md holds the table and, with several seeds, mean and spread over them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from demo import options
from demo.data import Corpus
from demo.model import ModelConfig
from demo.optimizers import OPTIMIZERS, TITLES, OptimizerConfig
from demo.processes import Runtime
from demo.progress import show_progress
from demo.report import machine
from demo.train import NonFiniteLossError, Run, RunResult, TrainConfig
from meshmuon.params.rules import RuleName

Row = dict[str, Any]
KEYS = ("optimizer", "scheme", "rule", "lr", "weight_decay", "seed", "steps")
_HEAD = "| optimizer | scheme | rule | lr | weight decay | seed | steps | validation loss |"
_RULE = "|---|---|---|--:|--:|--:|--:|--:|"
CAUTIOUS = "cautious"  # the plain rule with cautious weight decay


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    group = result.add_argument_group("sweep")
    group.add_argument("--optimizer", choices=OPTIMIZERS, required=True, help="whose learning rate to sweep")
    group.add_argument(
        "--lrs",
        type=options.number(0),
        nargs="+",
        default=[1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2],
        help="peak learning rates",
    )
    group.add_argument(
        "--weight-decays",
        type=options.number(0, or_equal=True),
        nargs="+",
        help="weight decays (default: --weight-decay or --adamw-weight-decay)",
    )
    group.add_argument(
        "--schemes",
        choices=options.SCHEMES,
        nargs="+",
        help="Newton–Schulz schemes, for meshmuon (default: --scheme)",
    )
    group.add_argument(
        "--rules",
        choices=(*options.RULES, CAUTIOUS),
        nargs="+",
        help="update rules, for meshmuon (default: --rule)",
    )
    group.add_argument("--seeds", type=options.whole(0), nargs="+", help="seeds (default: --seed)")
    group.add_argument("--out", type=Path, default=Path("runs/sweep"), help="folder for sweep.json and sweep.md")
    options.add_model_options(result)
    options.add_train_options(result)
    options.add_optimizer_options(result)
    return result


def combinations(args: argparse.Namespace) -> list[Row]:
    """One row for each run to be done, without its result."""
    own_decay = args.weight_decay if args.optimizer == "muon" else args.adamw_weight_decay
    decays = args.weight_decays or [own_decay]
    schemes = (args.schemes or [args.scheme]) if args.optimizer == "muon" else [None]
    rules = (args.rules or [CAUTIOUS if args.cautious else args.rule]) if args.optimizer == "muon" else [None]
    seeds = args.seeds or [args.seed]
    return [
        dict(zip(KEYS, (args.optimizer, scheme, rule, lr, decay, seed, args.steps), strict=True))
        for seed, scheme, rule, decay, lr in itertools.product(seeds, schemes, rules, decays, args.lrs)
    ]


def configured(row: Row, base: OptimizerConfig) -> OptimizerConfig:
    """`base` with the row's hyperparameters."""
    if row["optimizer"] == "adamw":
        return replace(base, adamw_lr=row["lr"], adamw_weight_decay=row["weight_decay"])
    cautious = row["rule"] == CAUTIOUS
    rule: RuleName = "plain" if cautious else row["rule"]
    return replace(base, lr=row["lr"], weight_decay=row["weight_decay"], scheme=row["scheme"], rule=rule, cautious=cautious)


def train_row(
    row: Row,
    text: Corpus,
    model: ModelConfig,
    optimizer: OptimizerConfig,
    config: TrainConfig,
    runtime: Runtime,
) -> Row:
    """Train one combination and return the row with its result; divergence is a result too."""
    run = Run(row["optimizer"], text, model, optimizer, config, runtime)
    label = f"{row['lr']:g}"
    try:
        with show_progress(label, config.steps, run.result.tokens_per_step) as progress:
            run.train(progress)
    except NonFiniteLossError as error:
        print(error)
    return {**row, **summary(run.result)}


def summary(result: RunResult) -> Row:
    """Final validation loss (None if the run diverged) and times of a run."""
    return {
        "status": result.status,
        "valid_loss": result.evals[-1].loss if result.status == "finished" else None,
        "train_seconds": result.seconds,
        "optimizer_share": result.optimizer_share,
    }


def markdown(rows: list[Row]) -> str:
    """The results as a table, sorted by optimizer, scheme, rule, seed, weight decay and lr; then the means over seeds."""
    lines = [_HEAD, _RULE]
    for row in sorted(rows, key=lambda r: (*_kind(r)[:3], r["seed"], r["weight_decay"], r["lr"])):
        loss = row["status"] if row["valid_loss"] is None else f"{row['valid_loss']:.4f}"
        lines.append(_line(row, str(row["seed"]), loss))
    return "\n".join(lines) + "\n" + means(rows)


def means(rows: list[Row]) -> str:
    """Mean, standard deviation, smallest and largest loss of what was run with several seeds."""
    kinds: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(_kind(row), []).append(row)
    lines = []
    for _, same_kind in sorted(kinds.items()):
        losses = [row["valid_loss"] for row in same_kind if row["valid_loss"] is not None]
        if len(same_kind) > 1 and len(losses) == len(same_kind):
            spread = f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})"
            lines.append(_line(same_kind[0], f"{len(same_kind)} seeds", spread))
    return "\n" + "\n".join([_HEAD, _RULE, *lines]) + "\n" if lines else ""


def _kind(row: Row) -> tuple[Any, ...]:
    """All but the seed."""
    return row["optimizer"], row["scheme"] or "", row["rule"] or "", row["weight_decay"], row["lr"], row["steps"]


def _line(row: Row, seed: str, loss: str) -> str:
    return (
        f"| {TITLES[row['optimizer']]} | {row['scheme'] or '–'} | {row['rule'] or '–'} | {row['lr']:g} | {row['weight_decay']:g} "
        f"| {seed} | {row['steps']} | {loss} |"
    )


def save(out: Path, rows: list[Row], setting: Row) -> None:
    """Write both files anew."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "sweep.json").write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")
    (out / "sweep.md").write_text(markdown(rows))


def earlier_rows(out: Path, setting: Row) -> list[Row]:
    """Rows of a former sweep in `out`; `ValueError` if it was run with another setting."""
    path = out / "sweep.json"
    if not path.exists():
        return []
    log = json.loads(path.read_text())
    for part in ("model", "train", "optimizer", "data"):
        if log["setting"][part] != setting[part]:
            raise ValueError(f"{path} holds a sweep with other {part} options ({log['setting'][part]}): choose another --out")
    rows: list[Row] = log["rows"]
    return rows


def sweep(args: argparse.Namespace) -> Path:
    """Run what is missing and return the path of the table."""
    runtime, model, train = options.runtime(args), options.model_config(args), options.train_config(args)
    base, text = options.optimizer_config(args), options.corpus(args)
    swept = {"lr", "adamw_lr", "weight_decay", "adamw_weight_decay", "scheme", "rule", "cautious", "qk_threshold"}
    setting: Row = {
        "model": asdict(model),
        "train": {key: value for key, value in asdict(train).items() if key not in ("seed", "steps")},
        "optimizer": {key: value for key, value in asdict(base).items() if key not in swept},
        "data": text.digest,
        "machine": machine(runtime.device),
    }
    rows = earlier_rows(args.out, setting)
    done = {tuple(row[key] for key in KEYS) for row in rows}
    for row in combinations(args):
        if tuple(row[key] for key in KEYS) in done:
            continue
        config = replace(train, seed=row["seed"])
        rows.append(train_row(row, text, model, configured(row, base), config, runtime))
        save(args.out, rows, setting)
    save(args.out, rows, setting)
    return Path(args.out / "sweep.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    command_line = parser()
    args = command_line.parse_args(arguments)
    try:
        path = sweep(args)
    except ValueError as error:
        command_line.error(str(error))
    except KeyboardInterrupt:
        print(f"\nStopped; the finished runs are in {args.out}. The same command continues.")
        return 130
    print(path.read_text())
    print(f"Table: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
