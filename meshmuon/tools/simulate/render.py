"""A report as text, in tables of rich on a terminal and plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TextIO

from ...plan import bytes_text, counted, table
from .report import Figures

_MOST_EXCHANGES = 12
_MOST_PARAMS = 24


@dataclass(frozen=True, slots=True)
class TextSection:
    """A title with a table, or with lines."""

    title: str
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    lines: tuple[str, ...] = ()


def print_report(report: Figures, stream: TextIO | None = None) -> None:
    output = sys.stdout if stream is None else stream
    sections = list(sections_of(report))
    if output.isatty() and find_spec("rich") is not None:
        _print_rich(sections, output)
        return
    for number, section in enumerate(sections):
        underlined = [*([""] if number else []), section.title, "=" * len(section.title)]
        print(
            *underlined,
            *section.lines,
            *([table(section.head, section.rows)] if section.head else []),
            sep="\n",
            file=output,
        )


def _print_rich(sections: Sequence[TextSection], stream: TextIO) -> None:
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


def sections_of(report: Figures) -> Iterator[TextSection]:
    yield _summary(report)
    yield _memory(report)
    yield _ranks(report.ranks)
    if report.exchanges:
        yield _exchanges(report)
    yield _params(report)
    if report.choices:
        yield _choices("choices", report.choices)
    if report.meshes:
        yield _choices("meshes", report.meshes)
    if report.advice:
        yield TextSection("advice", lines=tuple(f"- {sentence}" for sentence in report.advice))


def _summary(report: Figures) -> TextSection:
    model, mesh, step, balance = report.model, report.mesh, report.step, report.balance
    active = "" if model.active_parameters == model.parameters else f", {count_text(model.active_parameters)} active"
    stages = f", {len(report.stages)} pipeline stages" if len(report.stages) > 1 else ""
    nodes = counted(mesh.nodes, "node") + (f" of {mesh.ranks_per_node}" if mesh.nodes > 1 else "")
    waves = counted(max(stage.waves for stage in report.stages), "wave")
    rows = (
        ("model", f"{model.title}: {count_text(model.parameters)} parameters{active}"),
        ("Muon", f"{counted(model.matrices, 'matrix', 'matrices')}, {count_text(model.muon_parameters)} parameters"),
        ("AdamW", f"{count_text(model.adamw_parameters)} parameters"),
        ("mesh", f"{mesh.text}: {counted(mesh.ranks, 'rank')} on {nodes}{stages}"),
        ("machine", report.machine.title),
        (
            "options",
            f"replicas={report.options.replicas}, comm_dtype={report.options.comm_dtype or '-'}, "
            f"scheme={report.options.scheme}, memory_budget={bytes_text(report.options.memory_budget)}",
        ),
        (
            "optimizer step",
            f"{seconds_text(step.seconds)} in {waves}, {step.seconds / (step.bound or 1.0):.2f} of their bound; "
            f"{flops_text(step.flops)} in all; on rank {step.rank}:",
        ),
        *((f"  {name}", text) for name, text in _parts(step) if text),
        (
            "training step",
            f"{seconds_text(step.training_seconds)} for {count_text(step.tokens_per_step)} tokens, "
            f"{count_text(step.tokens_per_rank)} a rank, at {step.mfu:.0%} of the peak: the optimizer is "
            f"{step.share:.1%} of it",
        ),
        (
            "balance",
            f"rank {balance.heaviest_rank} has {balance.heaviest_over_mean:.3f} of the mean, "
            f"{balance.heaviest_over_bound:.3f} of what any plan must take; its largest matrix is {balance.matrix} "
            f"({balance.matrix_shape[0]}×{balance.matrix_shape[1]}, {balance.matrix_share:.0%})",
        ),
        (
            "plan",
            ", ".join(stage.digest[:12] for stage in report.stages[:4]) + (" …" if len(report.stages) > 4 else ""),
        ),
    )
    width = max(len(name) for name, _ in rows)
    return TextSection(
        f"{model.name} on {mesh.text}", lines=tuple(f"{name:<{width}}  {figures}" for name, figures in rows)
    )


def _parts(step: Figures) -> Iterator[tuple[str, str]]:
    """What the time of the slowest rank goes into. The times that come first add up to the step; empty where there
    is none.
    """

    def text(seconds: float, more: str = "") -> str:
        return seconds_text(seconds) + more if seconds else ""

    yield "orthogonalising", text(step.orthogonalise)
    yield "local matrices", text(step.local, ", from gradient to weight")
    yield "momentum, update", text(step.elementwise)
    hidden = f"; {seconds_text(step.exchange_hidden)} are hidden" if step.exchange_hidden else ""
    yield "exchanges", text(step.exchange_waited_for, f" of {seconds_text(step.exchange)}{hidden}")
    yield "other ranks", text(step.others_waited_for, ", waiting for those that come late to an exchange")
    yield "AdamW", text(step.adamw, f"; {seconds_text(step.adamw_alone)} if it stepped all parameters")
    yield "host", text(step.host)
    issued = f"{step.launches:,} on the rank with most, issued by its host in {seconds_text(step.host_ahead)}"
    yield "launches", issued if step.launches else ""
    known, unknown = "about {}, as others have measured it", "not predicted; meshmuon doctor measures prepare()"
    to_compile = unknown if step.seconds_to_compile is None else known.format(seconds_text(step.seconds_to_compile))
    yield "first step", f"kernels compile, or in prepare(): {to_compile}" if step.launches else ""


_EXCHANGES = {  # key of a row → heading
    "matrices": "matrices",
    "seconds": "time",
    "bytes_inside": "inside",
    "bytes_between": "between",
    "most_peers": "peers",
    "messages": "messages",
    "mean_message": "mean message",
    "largest_message": "largest",
}
_CHOICES = {
    "seconds": "step",
    "share": "share",
    "heaviest_over_mean": "heaviest/mean",
    "bytes_sent": "sent",
    "bytes_between": "between nodes",
    "most_peers": "peers",
    "buffers": "buffers",
    "memory": "memory",
}
_RANKS = {
    "matrices": "matrices",
    "flops": "FLOPs",
    "orthogonalise_seconds": "orthogonalising",
    "waited_seconds": "waiting",
    "sent_inside": "sent inside nodes",
    "sent_between": "sent between nodes",
    "received_inside": "received inside nodes",
    "received_between": "received between nodes",
    "peers": "peers",
    "memory": "memory",
}
_COUNTS = ("matrices", "peers", "most_peers", "messages")


def _written(key: str, value: float) -> str:
    """A figure of the report in the unit that its key has."""
    if key in _COUNTS:
        return f"{value:,.0f}"
    if key == "flops":
        return flops_text(value)
    if key == "share":
        return f"{value:.1%}"
    if key == "heaviest_over_mean":
        return f"{value:.3f}"
    return seconds_text(value) if key.endswith("seconds") else bytes_text(value)


def _memory(report: Figures) -> TextSection:
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
    return TextSection("memory per rank", ("kind", "most", "mean", "AdamW alone", "of the device"), rows)


def _ranks(ranks: Figures) -> TextSection:
    rows = []
    for key, heading in _RANKS.items():
        values = ranks[key]
        most = max(values)
        figures = (_written(key, figure) for figure in (min(values), sum(values) / len(values), most))
        total = "-" if key.endswith("seconds") or key == "peers" else _written(key, sum(values))
        rows.append((heading, *figures, str(ranks.rank[values.index(most)]), total))
    return TextSection(
        counted(len(ranks.rank), "rank"), ("per step", "least", "mean", "most", "rank", "in total"), tuple(rows)
    )


def _exchanges(report: Figures) -> TextSection:
    rows = []
    for row in report.exchanges:
        wave = f"{row.stage}.{row.wave}" if len(report.stages) > 1 else row.wave
        rows.append((f"{wave} {row.kind}", *(_written(key, row[key]) for key in _EXCHANGES)))
    return _first("exchanges", ("wave", *_EXCHANGES.values()), rows, _MOST_EXCHANGES)


def _params(report: Figures) -> TextSection:
    head = ("parameter", "shape", "count", "by", "matrices", "each", "how", "owners", "sent")
    rows = [
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
        for row in sorted(report.params, key=lambda row: (row.optimizer != "muon", -row.flops))
    ]
    return _first("parameters", head, rows, _MOST_PARAMS)


def _choices(title: str, choices: Sequence[Figures]) -> TextSection:
    rows = []
    for row in choices:
        refused = (f"cannot be planned: {row.refused}", *[""] * 7)
        figures = refused if row.refused else [_written(key, row[key]) for key in _CHOICES]
        rows.append((f"{'*' if row.chosen else ' '} {row.label}", *figures))
    return TextSection(f"side by side: {title}", (title, *_CHOICES.values()), tuple(rows))


def _first(title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]], most: int) -> TextSection:
    shown = tuple(rows[:most])
    return TextSection(f"{title} (first {most} of {len(rows)})" if len(shown) < len(rows) else title, head, shown)


def seconds_text(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def count_text(number: float) -> str:
    """``"8.03B"``, with three digits."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(number) >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def flops_text(number: float) -> str:
    """``"1.2 PFLOP"``."""
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}FLOP"
    return f"{number:.0f} FLOP"
