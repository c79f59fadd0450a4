"""What a demo run leaves in its folder: plots, log.json, plan.html and report.md."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import meshmuon
from demo.clip import clip_findings
from demo.compare import Comparison, Findings, compare
from demo.data import Corpus
from demo.figures import drawing
from demo.health import PICTURE, draw_health, section
from demo.model import ModelConfig
from demo.optimizers import CONTENDERS, OptimizerConfig
from demo.plan_page import FILE as PLAN_PAGE
from demo.plan_page import write_plan_page
from demo.train import RunResult, TrainConfig
from meshmuon.tools.predict.calibration import Calibration

_SCHEDULES = {"linear": "linear decay", "cosine": "cosine decay", "constant": "no decay"}
BITS_PER_NAT = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything that was decided before the first step."""

    model: ModelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    corpus: Corpus
    device: torch.device
    processes: int
    parameters: int
    rates: Calibration | None = None  # of this machine, for the page of the plan

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """What decides the curves: a checkpoint serves only a run with the same. Processes and device do not belong
        to it.
        """
        return {
            "model": asdict(self.model),
            "train": asdict(self.train),
            "optimizer": asdict(self.optimizer),
            "data": {"digest": self.corpus.digest},
        }


def machine(device: torch.device) -> dict[str, object]:
    """Hardware and versions, without names of hosts or users."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "meshmuon": getattr(meshmuon, "__version__", "unknown"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def new_folder(parent: Path) -> Path:
    """A fresh folder below `parent`, named after the time."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        folder = parent / (stamp + suffix)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{parent / stamp}: a hundred runs were started within one second")


def point_latest(folder: Path) -> None:
    """Make `latest` beside the folder point to it, where the file system can."""
    link = folder.parent / "latest"
    try:
        if link.is_symlink():
            link.unlink()
        link.symlink_to(folder.name, target_is_directory=True)
    except OSError:
        pass  # A convenience only: some file systems have no links, and `latest` may be someone's folder.


def write_report(folder: Path, setting: Setting, results: Sequence[RunResult], *, plot: bool) -> str:
    """Write all artefacts for whatever the runs have done so far and return the headline."""
    outcome = findings(setting, results)
    _write_log(folder / "log.json", setting, results, outcome)
    drawn = plot and any(result.evals for result in results)
    if drawn:
        outcome.draw(folder / outcome.picture)
    measured = next((result for result in results if result.health), None)
    if drawn and measured is not None:
        draw_health(folder / PICTURE, measured.health)
    page = markdown(setting, results, outcome, drawn=drawn)
    if plot and results:
        page += "\n" + _plan_section(folder, setting, results[0])
    (folder / "report.md").write_text(page, encoding="utf-8")
    point_latest(folder)
    return outcome.headline


def _plan_section(folder: Path, setting: Setting, result: RunResult) -> str:
    missing = write_plan_page(folder, setting, result) if result.name != "adamw" else "AdamW alone has none"
    text = f"[{PLAN_PAGE}]({PLAN_PAGE}): predicted beside measured" if missing is None else f"No page: {missing}"
    return f"## The page of the {result.title} run's plan\n\n{text.rstrip('.')}.\n"


def findings(setting: Setting, results: Sequence[RunResult]) -> Findings:
    """What was compared has shown so far: QK-clip if there is a threshold for it, else meshmuon and AdamW."""
    if setting.optimizer.qk_threshold is not None:
        return clip_findings(results, setting.optimizer.qk_threshold, qk_norm=setting.model.qk_norm)
    by_name = {result.name: result for result in results}
    both = compare(by_name["muon"], by_name["adamw"]) if len(by_name) == 2 else None
    return Findings(
        headline=headline_of(results, both),
        log={"comparison": None if both is None else asdict(both)},
        section="" if both is None else _comparison_table(both),
        picture="loss.png",
        draw=lambda path: draw_losses(path, results),
    )


def headline_of(results: Sequence[RunResult], both: Comparison | None) -> str:
    """One sentence that says how it went."""
    if both is None:
        parts = [
            f"{result.title}: {result.steps_done} steps done, last validation loss {result.evals[-1].loss:.4f} after "
            f"step {result.evals[-1].step}"
            for result in results
            if result.evals
        ]
        return "; ".join(parts) + "." if parts else "Nothing was trained."
    difference = both.adamw_at_step - both.muon_at_step
    text = (
        f"After {both.step} steps meshmuon's validation loss is {both.muon_at_step:.4f}, AdamW's "
        f"{both.adamw_at_step:.4f}: meshmuon is {abs(difference):.4f} {'lower' if difference > 0 else 'higher'}."
    )
    if both.muon_steps_to_adamw_best is not None and both.muon_seconds_to_adamw_best is not None:
        text += (
            f" It reached AdamW's best loss in {both.muon_steps_to_adamw_best / both.adamw_steps:.0%} of the steps "
            f"and {both.muon_seconds_to_adamw_best / both.adamw_seconds:.0%} of the time (read between evaluations)."
        )
    return text


def _write_log(path: Path, setting: Setting, results: Sequence[RunResult], outcome: Findings) -> None:
    corpus = setting.corpus
    log: dict[str, Any] = {
        "format": 1,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "headline": outcome.headline,
        "machine": machine(setting.device),
        "model": {**asdict(setting.model), "parameters": setting.parameters},
        "train": {**asdict(setting.train), "processes": setting.processes},
        "optimizer": asdict(setting.optimizer),
        "data": {
            "digest": corpus.digest,
            "train_files": len(corpus.train_files),
            "train_bytes": corpus.train.numel(),
            "valid_files": len(corpus.valid_files),
            "valid_bytes": corpus.valid.numel(),
        },
        "runs": {result.name: _run_log(result) for result in results},
        **outcome.log,
    }
    path.write_text(json.dumps(log, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _run_log(result: RunResult) -> dict[str, Any]:
    return {
        **asdict(result),
        "seconds": result.seconds,
        "optimizer_share": result.optimizer_share,
        "tokens_per_second": result.tokens_per_second,
    }


def draw_losses(path: Path, results: Sequence[RunResult]) -> None:
    """Validation loss over steps and over seconds, with the training loss behind it."""
    with drawing(path, (11, 4.2), dpi=130) as figure:
        by_step, by_time = figure.subplots(1, 2, sharey=True)
        for result in results:
            color = CONTENDERS[result.name].color
            losses = [point.loss for point in result.evals]
            by_step.plot(range(1, result.steps_done + 1), result.train_loss, color=color, alpha=0.25, linewidth=0.8)
            by_step.plot([p.step for p in result.evals], losses, "o-", color=color, markersize=3, label=result.title)
            by_time.plot([p.seconds for p in result.evals], losses, "o-", color=color, markersize=3, label=result.title)
            for point in result.resumed:
                by_step.axvline(point.step, color=color, linestyle=":", linewidth=1.0)
        # The first losses are those of a uniform guess; the interesting part lies below.
        reached = [point.loss for result in results for point in result.evals[1:]]
        if reached:
            by_step.set_ylim(min(reached) - 0.15, max(reached) + 0.15)
        by_step.set(xlabel="step", ylabel="loss (nats per byte)", title="equal steps (faint: training loss)")
        by_time.set(xlabel="training time (s), evaluation excluded", title="equal time")
        for axes in (by_step, by_time):
            axes.legend()


def markdown(setting: Setting, results: Sequence[RunResult], outcome: Findings, *, drawn: bool) -> str:
    """The report as one Markdown page."""
    parts = [f"# meshmuon training demo\n\n**{outcome.headline}**\n"]
    unfinished = [f"{result.title} ({result.status})" for result in results if result.status != "finished"]
    if unfinished:
        parts.append(f"Not all runs came to their end: {', '.join(unfinished)}. The figures cover what was done.\n")
    resumed = [
        f"{result.title} after step {point.step} on {point.processes} process{'es' if point.processes > 1 else ''}"
        for result in results
        for point in result.resumed
    ]
    if resumed:
        where = " (dotted lines)" if drawn else ""
        parts.append(
            f"Resumed from a checkpoint: {', '.join(resumed)}{where}. The curves are whole; the times leave out steps "
            "that were lost and made again.\n"
        )
    if drawn:
        parts.append(f"![{Path(outcome.picture).stem}]({outcome.picture})\n")
    if outcome.section:
        parts.append(outcome.section)
    parts.append(_runs_table(results))
    measured = next((result for result in results if result.health), None)
    if measured is not None:
        parts.append(section(measured.title, measured.health, measured.alarms, drawn=drawn))
    parts.append(_setting_section(setting))
    for result in results:
        if result.routing is not None:
            parts.append(f"## Routing of the {result.title} run\n\n```text\n{result.routing.rstrip()}\n```\n")
        if result.plan is not None:
            parts.append(
                f"## Plan of the {result.title} run\n\nWhich process orthogonalises which matrices, and what "
                "travels:\n\n"
                f"```text\n{result.plan.rstrip()}\n```\n"
            )
    return "\n".join(parts)


def _comparison_table(both: Comparison) -> str:
    rows = [
        "## Validation loss (nats per byte)\n",
        "| compared at | meshmuon | AdamW | difference |",
        "|---|--:|--:|--:|",
    ]
    for label, muon, adamw in (
        (f"equal steps ({both.step})", both.muon_at_step, both.adamw_at_step),
        (f"equal training time ({both.seconds:.1f} s)", both.muon_at_time, both.adamw_at_time),
    ):
        rows.append(f"| {label} | {muon:.4f} | {adamw:.4f} | {muon - adamw:+.4f} |")
    return "\n".join(rows) + (
        "\n\nTime counts training only, not evaluation. At equal time the slower run is read between two of its "
        "evaluations, before its lr has decayed to the end, which counts against it.\n"
    )


def _runs_table(results: Sequence[RunResult]) -> str:
    columns = (
        "optimizer",
        "steps",
        "validation loss",
        "bits per byte",
        "training time",
        "median step",
        "tokens/s",
        "share of the step in the optimizer",
    )
    rows = ["## Runs\n", f"| {' | '.join(columns)} |", "|---" + "|--:" * (len(columns) - 1) + "|"]
    for result in results:
        loss = result.evals[-1].loss if result.evals else float("nan")
        median = statistics.median(result.step_seconds) if result.step_seconds else float("nan")
        rows.append(
            f"| {result.title} | {result.steps_done} | {loss:.4f} | {loss * BITS_PER_NAT:.4f} "
            f"| {result.seconds:.1f} s | {1e3 * median:.0f} ms | {result.tokens_per_second:,.0f} "
            f"| {result.optimizer_share:.1%} |"
        )
    return "\n".join(rows) + "\n"


def _setting_section(setting: Setting) -> str:
    model, train, optimizer, corpus = setting.model, setting.train, setting.optimizer, setting.corpus
    part_lr = optimizer.lr if optimizer.adam_part_lr is None else optimizer.adam_part_lr
    facts = {
        "model": f"{model.n_layers} layers, width {model.d_model}, {model.n_heads} heads, MLP {model.mlp} "
        f"{model.d_ff}, QK-norm {'on' if model.qk_norm else 'off'}, "
        f"head {'tied' if model.tied_head else 'untied'}, {setting.parameters:,} parameters",
        "training": f"{train.steps} steps of {train.batch_size} × {model.seq_len} bytes, warm-up "
        f"{train.warmup_steps}, {_SCHEDULES[train.schedule]}, gradient clip {train.grad_clip:g}, seed {train.seed}, "
        + ("one process" if setting.processes == 1 else f"{setting.processes} processes with FSDP2"),
        "meshmuon": f"lr {optimizer.lr:g} (AdamW part {part_lr:g}), momentum {optimizer.momentum:g}, "
        f"{optimizer.scheme}, {optimizer.ns_steps} steps, {'cautious ' if optimizer.cautious else ''}weight decay "
        f"{optimizer.weight_decay:g}, rule {optimizer.rule}",
        **_against(optimizer, model),
        "data": f"{corpus.train.numel():,} bytes of {len(corpus.train_files)} files for training, "
        f"{corpus.valid.numel():,} bytes of {len(corpus.valid_files)} files for validation, "
        f"digest {corpus.digest}",
        "machine": ", ".join(f"{key} {value}" for key, value in machine(setting.device).items()),
    }
    return "## Setting\n\n" + "".join(f"- {name}: {text}\n" for name, text in facts.items())


def _against(optimizer: OptimizerConfig, model: ModelConfig) -> dict[str, str]:
    if optimizer.qk_threshold is not None:
        return {
            "QK-clip": f"threshold {optimizer.qk_threshold:g}, {model.head_dim} rows per head, in the clipped run only"
        }
    return {"AdamW": f"lr {optimizer.adamw_lr:g}, weight decay {optimizer.adamw_weight_decay:g}, fused"}
