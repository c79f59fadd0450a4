"""Command-line options shared by the demo and the sweep: each size a flag, each flag checked."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from demo.data import Corpus, TrainBatches, default_source_root, load_corpus
from demo.model import MLP_KINDS, WEIGHTS, ModelConfig
from demo.optimizers import CLIP_RUNS, OPTIMIZERS, OptimizerConfig
from demo.processes import Runtime, launched
from demo.train import SCHEDULES, TrainConfig

SCHEMES = ("auto", "polar_express", "keller", "zolotarev", "hybrid", "halley")
ROUNDINGS = ("nearest", "stochastic")
RULES = ("plain", "normuon", "muon_plus", "muoneq")
ADAMW_LR, ADAMW_WEIGHT_DECAY = 2e-3, 1.0
# Without QK-norm and at four times the best lr of the sweep, logits pass the threshold in the first 30 steps and
# reach nine times as much. Found by trial, see docs/demo.md.
QK_CLIP_PRESET = {"qk_norm": False, "lr": 6.4e-2, "steps": 150, "qk_threshold": 50.0}


def whole(minimum: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `minimum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {minimum}, got {text!r}")
        return value

    return parse


def number(above: float = -math.inf, below: float = math.inf, *, or_equal: bool = False) -> Callable[[str], float]:
    """An argparse type: a number between `above` and `below`; `or_equal` lets it be `above` itself."""
    range_text = f"{'at least' if or_equal else 'above'} {above:g}"
    if below < math.inf:
        range_text += f" and below {below:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (above < value < below or (or_equal and value == above)):
            raise argparse.ArgumentTypeError(f"must be a number {range_text}, got {text!r}")
        return value

    return parse


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Flags of `ModelConfig`."""
    group = parser.add_argument_group("model")
    group.add_argument("--d-model", type=whole(1), default=192, help="width of the residual stream")
    group.add_argument("--layers", type=whole(1), default=4, help="number of transformer layers")
    group.add_argument("--heads", type=whole(1), default=3, help="attention heads; must divide --d-model")
    group.add_argument("--d-ff", type=whole(1), help="inner width of the MLP (default: 4 × d-model)")
    group.add_argument("--seq-len", type=whole(1), default=256, help="bytes per sequence")
    group.add_argument("--mlp", choices=MLP_KINDS, default="relu2", help="MLP variant")
    group.add_argument(
        "--qk-norm",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="normalise queries and keys before the dot product",
    )
    group.add_argument(
        "--tied-head",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="use the embedding as the output head",
    )
    group.add_argument("--rope-base", type=number(1), default=10_000.0, help="base of the rotary wavelengths")
    group.add_argument(
        "--weights",
        choices=tuple(WEIGHTS),
        default="float32",
        help="dtype of the weights; the model computes in float32",
    )


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Flags of `TrainConfig`, the data and the machine."""
    group = parser.add_argument_group("training")
    group.add_argument("--steps", type=whole(1), default=250, help="steps of each run")
    group.add_argument("--batch-size", type=whole(1), default=16, help="sequences per step, over all processes")
    group.add_argument(
        "--microbatches",
        type=whole(1),
        help="parts in which a batch is computed, over all processes (default: one per process); with 2, one process "
        "and two "
        "processes of as many threads give the same bits where --grad-clip is 0",
    )
    group.add_argument("--warmup-steps", type=whole(0), help="steps of lr warm-up (default: 20, fewer in short runs)")
    group.add_argument("--schedule", choices=SCHEDULES, default="linear", help="lr decay after the warm-up")
    group.add_argument(
        "--grad-clip",
        type=number(0, or_equal=True),
        default=1.0,
        help="largest gradient norm; 0 turns it off",
    )
    group.add_argument("--eval-every", type=whole(1), default=25, help="steps between validations")
    group.add_argument("--eval-windows", type=whole(1), default=64, help="validation sequences")
    group.add_argument("--seed", type=whole(0), default=0, help="seed of the weights and the data order")
    group.add_argument("--data", type=Path, help="folder of .py files (default: Python's standard library)")
    group.add_argument(
        "--valid-fraction", type=number(0, 1), default=0.1, help="share of the files kept for validation"
    )
    group.add_argument("--device", help="torch device (default: cuda if there is one, else cpu)")
    group.add_argument(
        "--threads", type=whole(1), help="CPU threads per process (default: the cores divided over the processes)"
    )


def add_process_options(parser: argparse.ArgumentParser) -> None:
    """How many processes train together; without it a script trains in one."""
    parser.add_argument(
        "--nproc", type=whole(1), help="processes that share model and batch by FSDP2 (default: 2, or one per GPU)"
    )


def add_checkpoint_options(parser: argparse.ArgumentParser) -> None:
    """Whether and where checkpoints are kept."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--checkpoint-every",
        type=whole(0),
        default=0,
        help="steps between checkpoints, 0 for none; a stopped run that keeps them goes on when it is started again",
    )
    group.add_argument(
        "--checkpoint-dir",
        type=Path,
        help="folder of the checkpoints (default: checkpoints/ in the folder of the run, where an unfinished run with "
        "the same options is looked for first)",
    )
    group.add_argument(
        "--stop-after", type=whole(1), help="stop as by Ctrl-C once a run has a checkpoint after so many steps"
    )


def add_comparison_options(parser: argparse.ArgumentParser) -> None:
    """What is compared with what."""
    group = parser.add_argument_group("comparison")
    group.add_argument("--only", choices=(*OPTIMIZERS, *CLIP_RUNS, "both"), default="both", help="which runs to do")
    preset = {name: value for name, value in QK_CLIP_PRESET.items() if name not in ("qk_norm", "qk_threshold")}
    shown = ", ".join(("--no-qk-norm", *(f"--{name.replace('_', '-')} {value}" for name, value in preset.items())))
    group.add_argument(
        "--qk-clip",
        action="store_true",
        help="compare meshmuon without and with QK-clip instead of meshmuon with AdamW, on a model whose attention "
        "logits "
        f"explode: {shown}, unless these flags are given",
    )
    group.add_argument(
        "--qk-threshold",
        type=number(0),
        help=f"largest attention logit that --qk-clip leaves alone, {QK_CLIP_PRESET['qk_threshold']:g} unless given",
    )


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; where --qk-clip is among them, flags that are not given have its defaults."""
    args = parser.parse_args(arguments)
    if args.qk_clip:
        parser.set_defaults(**QK_CLIP_PRESET)
        args = parser.parse_args(arguments)
    return args


def contenders(args: argparse.Namespace) -> tuple[str, ...]:
    """The names of the runs to do; `ValueError` for flags that belong to the other comparison."""
    runs, others, which = (CLIP_RUNS, OPTIMIZERS, "with") if args.qk_clip else (OPTIMIZERS, CLIP_RUNS, "without")
    if args.only in others:
        raise ValueError(f"--only {args.only} is none of the runs {which} --qk-clip: choose {', '.join(runs)} or both")
    if args.qk_threshold is not None and not args.qk_clip:
        raise ValueError("--qk-threshold without --qk-clip: there is no QK-clip to use it; add --qk-clip")
    if args.qk_clip and (args.adamw_lr, args.adamw_weight_decay) != (ADAMW_LR, ADAMW_WEIGHT_DECAY):
        raise ValueError("--adamw-lr and --adamw-weight-decay with --qk-clip: there is no AdamW run; leave them out")
    return runs if args.only == "both" else (args.only,)


def add_optimizer_options(parser: argparse.ArgumentParser) -> None:
    """Flags of `OptimizerConfig`. The defaults come from the sweep recorded in docs/demo.md."""
    lr = number(0)
    decay = number(0, or_equal=True)
    group = parser.add_argument_group("optimizers")
    group.add_argument("--lr", type=lr, default=1.6e-2, help="peak lr of meshmuon")
    group.add_argument("--adam-part-lr", type=lr, help="peak lr of meshmuon's AdamW part (default: the same as --lr)")
    group.add_argument("--adamw-lr", type=lr, default=ADAMW_LR, help="peak lr of the AdamW baseline")
    group.add_argument("--weight-decay", type=decay, default=0.1, help="weight decay of meshmuon")
    group.add_argument(
        "--adamw-weight-decay", type=decay, default=ADAMW_WEIGHT_DECAY, help="weight decay of the AdamW baseline"
    )
    group.add_argument("--momentum", type=number(0, 1, or_equal=True), default=0.95, help="meshmuon's momentum")
    group.add_argument("--ns-steps", type=whole(1), default=5, help="Newton–Schulz steps of meshmuon")
    group.add_argument("--scheme", choices=SCHEMES, default=SCHEMES[0], help="how updates are orthogonalised")
    group.add_argument("--rule", choices=RULES, default=RULES[0], help="meshmuon's update rule")
    group.add_argument(
        "--cautious", action="store_true", help="decay only weights that the update does not push away from zero"
    )
    group.add_argument(
        "--rounding",
        choices=ROUNDINGS,
        default=ROUNDINGS[0],
        help="how meshmuon rounds --weights bfloat16 after a step",
    )


def model_config(args: argparse.Namespace) -> ModelConfig:
    """The model asked for; `ValueError` if the sizes do not fit together."""
    if args.rounding == "stochastic" and args.weights != "bfloat16":
        raise ValueError("--rounding stochastic is for bfloat16 weights: add --weights bfloat16")
    return ModelConfig(
        d_model=args.d_model,
        n_layers=args.layers,
        n_heads=args.heads,
        d_ff=args.d_ff or 4 * args.d_model,
        seq_len=args.seq_len,
        mlp=args.mlp,
        qk_norm=args.qk_norm,
        tied_head=args.tied_head,
        rope_base=args.rope_base,
        weights=args.weights,
    )


def train_config(args: argparse.Namespace) -> TrainConfig:
    """The training asked for; `ValueError` if nothing would be left after the warm-up."""
    warmup_steps = min(20, args.steps // 10) if args.warmup_steps is None else args.warmup_steps
    if warmup_steps >= args.steps:
        raise ValueError(f"--warmup-steps {warmup_steps} must be smaller than --steps {args.steps}")
    return TrainConfig(
        steps=args.steps,
        batch_size=args.batch_size,
        warmup_steps=warmup_steps,
        schedule=args.schedule,
        grad_clip=args.grad_clip,
        eval_every=args.eval_every,
        eval_windows=args.eval_windows,
        seed=args.seed,
        microbatches=args.microbatches,
    )


def optimizer_config(args: argparse.Namespace) -> OptimizerConfig:
    """The hyperparameters asked for."""
    return OptimizerConfig(
        lr=args.lr,
        adamw_lr=args.adamw_lr,
        weight_decay=args.weight_decay,
        adamw_weight_decay=args.adamw_weight_decay,
        adam_part_lr=args.adam_part_lr,
        momentum=args.momentum,
        ns_steps=args.ns_steps,
        scheme=args.scheme,
        rule=args.rule,
        cautious=args.cautious,
        rounding=args.rounding,
        qk_threshold=getattr(args, "qk_threshold", None),  # the sweep has no such flag
    )


def corpus(args: argparse.Namespace) -> Corpus:
    """The text asked for; `ValueError` if there is too little of it."""
    root = default_source_root() if args.data is None else args.data
    if not root.is_dir():
        raise ValueError(f"--data {root}: no such folder")
    text = load_corpus(root, args.valid_fraction)
    TrainBatches(text.train, args.seq_len, args.batch_size, args.seed)  # refuses too little text
    if text.valid.numel() <= args.seq_len:
        raise ValueError(
            f"{text.valid.numel()} bytes of validation text do not fill one window of {args.seq_len}: "
            "lower --seq-len or raise --valid-fraction"
        )
    return text


def runtime(args: argparse.Namespace) -> Runtime:
    """This process's device and place; `ValueError` for a launch that the demo cannot serve."""
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    nproc = getattr(args, "nproc", 1) or (torch.cuda.device_count() if name == "cuda" else 2)
    if launched():
        nproc = int(os.environ["WORLD_SIZE"])
    if args.batch_size % nproc:
        raise ValueError(f"--batch-size {args.batch_size} does not divide over {nproc} processes: change it or --nproc")
    microbatches = getattr(args, "microbatches", None)
    if microbatches and (microbatches % nproc or args.batch_size % microbatches):
        raise ValueError(
            f"--microbatches {microbatches} must divide by {nproc} processes, and --batch-size {args.batch_size} by it"
        )
    rank = int(os.environ.get("RANK", "0")) if nproc > 1 else 0
    if name == "cuda" and nproc > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(args.threads or max(1, (os.cpu_count() or 1) // nproc))
    return Runtime(device, rank, nproc)
