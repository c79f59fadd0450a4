"""A report as text: tables of rich on a terminal, plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from ..plan import table
from .report import ChoiceFigures, Report
from .units import bytes_text, count_text, flops_text, seconds_text

_MOST_EXCHANGES = 12
_MOST_PARAMS = 24


@dataclass(frozen=True, slots=True)
class Section:
    """A title with a table, or with lines."""

    title: str
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    lines: tuple[str, ...] = ()


def print_report(report: Report, stream: TextIO | None = None) -> None:
    """Prints all of a report."""
    output = sys.stdout if stream is None else stream
    sections = list(sections_of(report))
    if output.isatty():
        try:
            _print_rich(sections, output)
        except ImportError:  # rich is optional
            pass
        else:
            return
    print(plain_text(sections), file=output)


def plain_text(sections: Sequence[Section]) -> str:
    """Sections as plain text."""
    blocks = []
    for section in sections:
        parts = [section.title, "=" * len(section.title), *section.lines]
        if section.head:
            parts.append(table(section.head, section.rows))
        blocks.append("\n".join(parts))
    return "\n\n".join(blocks)


def _print_rich(sections: Sequence[Section], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=stream)
    for section in sections:
        console.print(f"\n[bold]{section.title}[/bold]")
        for line in section.lines:
            console.print(line, highlight=False, markup=False)
        if section.head:
            grid = Table(header_style="bold")
            for name in section.head:
                grid.add_column(name, overflow="fold")
            for row in section.rows:
                grid.add_row(*row)
            console.print(grid)


def sections_of(report: Report) -> Iterator[Section]:
    """All that is printed, in order."""
    yield _summary(report)
    yield _memory(report)
    yield _ranks(report)
    if report.exchanges:
        yield _exchanges(report)
    yield _params(report)
    if report.choices:
        yield _choices("choices", report.choices)
    if report.meshes:
        yield _choices("meshes", report.meshes)
    if report.advice:
        yield Section("advice", lines=tuple(f"- {sentence}" for sentence in report.advice))


def _summary(report: Report) -> Section:
    model, mesh, step, balance = report.model, report.mesh, report.step, report.balance
    active = "" if model.active_parameters == model.parameters else f", {count_text(model.active_parameters)} active"
    stages = f", {len(report.stages)} pipeline stages" if len(report.stages) > 1 else ""
    waves = max(stage.waves for stage in report.stages)
    relays = ", in two hops between nodes" if mesh.relayed else ""
    rows = (
        ("model", f"{model.title}: {count_text(model.parameters)} parameters{active}"),
        ("Muon", f"{model.matrices:,} matrices, {count_text(model.muon_parameters)} parameters"),
        ("AdamW", f"{count_text(model.adamw_parameters)} parameters"),
        ("mesh", f"{mesh.text}: {mesh.ranks:,} ranks on {mesh.nodes:,} nodes of {mesh.ranks_per_node}{stages}{relays}"),
        ("machine", report.machine.title),
        (
            "options",
            f"replicas={report.options.replicas}, comm_dtype={report.options.comm_dtype or '-'}, "
            f"scheme={report.options.scheme}, memory_budget={bytes_text(report.options.memory_budget)}",
        ),
        ("optimizer step", f"{seconds_text(step.seconds)} in {waves} waves, {flops_text(step.flops)} on all ranks"),
        ("  orthogonalising", f"{seconds_text(step.orthogonalise)} on the rank that takes longest"),
        (
            "  exchanges",
            f"{seconds_text(step.exchange)}: {seconds_text(step.exchange_hidden)} hidden, "
            f"{seconds_text(step.exchange_waited_for)} waited for",
        ),
        ("  momentum, update", seconds_text(step.elementwise)),
        ("  AdamW", seconds_text(step.adamw)),
        ("  host", f"{seconds_text(step.host)}, ahead of the device"),
        (
            "training step",
            f"{seconds_text(step.training_seconds)} for {count_text(step.tokens_per_step)} tokens at {step.mfu:.0%} of the peak: "
            f"the optimizer is {step.share:.1%} of it all",
        ),
        (
            "balance",
            f"rank {balance.heaviest_rank} has {balance.heaviest_over_mean:.3f} of the mean, {balance.heaviest_over_bound:.3f} "
            f"of what any plan must take; its largest matrix is {balance.matrix} "
            f"({balance.matrix_shape[0]}×{balance.matrix_shape[1]}, {balance.matrix_share:.0%})",
        ),
        ("plan", ", ".join(stage.digest[:12] for stage in report.stages[:4]) + (" …" if len(report.stages) > 4 else "")),
    )
    width = max(len(name) for name, _ in rows)
    return Section(f"{model.name} on {mesh.text}", lines=tuple(f"{name:<{width}}  {figures}" for name, figures in rows))


def _memory(report: Report) -> Section:
    has = report.machine.memory_bytes
    rows = tuple(
        (
            row.kind.replace("_", " ") + (" (estimate)" if row.estimated else ""),
            bytes_text(row.most),
            bytes_text(row.mean),
            bytes_text(row.adamw_most) if row.adamw_most else "-",
            f"{row.most / has:.1%}" if has else "-",
        )
        for row in report.memory
    )
    return Section("memory per rank", ("kind", "most", "mean", "AdamW alone", "of the device"), rows)


def _ranks(report: Report) -> Section:
    ranks = report.ranks
    columns: tuple[tuple[str, Sequence[float], str], ...] = (
        ("matrices", ranks.matrices, "count"),
        ("FLOPs", ranks.flops, "flops"),
        ("orthogonalising", ranks.orthogonalise_seconds, "seconds"),
        ("waiting", ranks.waited_seconds, "seconds"),
        ("sent inside nodes", ranks.sent_inside, "bytes"),
        ("sent between nodes", ranks.sent_between, "bytes"),
        ("received inside nodes", ranks.received_inside, "bytes"),
        ("received between nodes", ranks.received_between, "bytes"),
        ("peers", ranks.peers, "count"),
        ("memory", ranks.memory, "bytes"),
    )
    write = {"count": lambda value: f"{value:,.0f}", "flops": flops_text, "seconds": seconds_text, "bytes": bytes_text}
    rows = []
    for name, values, unit in columns:
        most, least = max(values), min(values)
        at = ranks.rank[list(values).index(most)]
        total = "-" if unit in ("seconds",) or name == "peers" else write[unit](sum(values))
        mean = write[unit](sum(values) / len(values))
        rows.append((name, write[unit](least), mean, write[unit](most), str(at), total))
    return Section(f"{len(ranks.rank):,} ranks", ("per step", "least", "mean", "most", "rank", "in total"), tuple(rows))


def _exchanges(report: Report) -> Section:
    shown = report.exchanges[:_MOST_EXCHANGES]
    rows = tuple(
        (
            f"{row.stage}.{row.wave} {row.kind}" if len(report.stages) > 1 else f"{row.wave} {row.kind}",
            str(row.matrices),
            seconds_text(row.seconds),
            bytes_text(row.bytes_inside),
            bytes_text(row.bytes_between),
            f"{row.most_peers:,}",
            f"{row.messages:,}",
            bytes_text(row.mean_message),
            bytes_text(row.largest_message),
        )
        for row in shown
    )
    hidden = len(report.exchanges) - len(shown)
    title = f"exchanges (first {len(shown)} of {len(report.exchanges)})" if hidden else "exchanges"
    head = ("wave", "matrices", "time", "inside", "between", "peers", "messages", "mean message", "largest")
    return Section(title, head, rows)


def _params(report: Report) -> Section:
    shown = sorted(report.params, key=lambda row: (row.optimizer != "muon", -row.flops))[:_MOST_PARAMS]
    rows = tuple(
        (
            row.name if row.part is None else f"{row.name}, part {row.part}",
            "×".join(map(str, row.shape)),
            str(row.count),
            row.optimizer,
            str(row.matrices or "-"),
            "-" if row.matrix_shape is None else f"{row.matrix_shape[0]}×{row.matrix_shape[1]}",
            row.how or "-",
            str(row.owners or "-"),
            bytes_text(row.bytes_sent),
        )
        for row in shown
    )
    more = len(report.params) - len(shown)
    head = ("parameter", "shape", "count", "by", "matrices", "each", "how", "owners", "sent")
    return Section(f"parameters (first {len(shown)} of {len(report.params)})" if more else "parameters", head, rows)


def _choices(title: str, choices: Sequence[ChoiceFigures]) -> Section:
    rows = tuple(
        (f"* {row.label}" if row.chosen else f"  {row.label}", f"cannot be planned: {row.refused}", *[""] * 7)
        if row.refused
        else (
            f"* {row.label}" if row.chosen else f"  {row.label}",
            seconds_text(row.seconds),
            f"{row.share:.1%}",
            f"{row.heaviest_over_mean:.3f}",
            bytes_text(row.bytes_sent),
            bytes_text(row.bytes_between),
            f"{row.most_peers:,}",
            bytes_text(row.buffers),
            bytes_text(row.memory),
        )
        for row in choices
    )
    head = (title, "step", "share", "heaviest/mean", "sent", "between nodes", "peers", "buffers", "memory")
    return Section(f"side by side: {title}", head, rows)
