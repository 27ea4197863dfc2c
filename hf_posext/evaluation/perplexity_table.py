"""How reports of perplexity and of pseudo-perplexity print."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Column, Table

from hf_posext.evaluation.perplexity_report import ALL
from hf_posext.evaluation.protocols import BARS, HONEST

if TYPE_CHECKING:
    from hf_posext.evaluation.perplexity_report import PerplexityReport
    from hf_posext.evaluation.pseudo_report import PseudoPerplexityReport


def perplexity_table(report: PerplexityReport) -> RenderableType:
    """Arms x context lengths, each cell the perplexity over its interval; below it what was measured, and the notes."""
    lengths = report.protocol["context_lengths"]
    cells = {(row["arm"], row["context_length"]): row for row in report.rows}
    table = Table(show_footer=True)
    table.add_column("arm", footer="tokens")
    for length in lengths:
        tokens = max((row["tokens"] for row in report.rows if row["context_length"] == length), default=0)
        table.add_column(str(length), footer=f"{tokens:,}", justify="right")
    for arm in report.arms:
        table.add_row(arm, *(_cell(cells.get((arm, length))) for length in lengths))
    return report.titled(f"Perplexity ({report.targets_text}) by context length in tokens", table, _caption(report))


def pseudo_perplexity_table(report: PseudoPerplexityReport) -> RenderableType:
    """Positions and arms x context lengths, each cell the pseudo-perplexity over its interval, tokens below each."""
    lengths = report.protocol["context_lengths"]
    cells = {(row["positions"], row["arm"], row["context_length"]): row for row in report.rows}
    tokens = {(row["positions"], row["context_length"]): f"{row['tokens']:,}" for row in report.rows}
    table = Table("positions", "arm", *(Column(str(length), justify="right") for length in lengths))
    for positions in report.shown_positions:
        for arm in report.arms:
            table.add_row(positions, arm, *(_cell(cells.get((positions, arm, length))) for length in lengths))
        counts = (tokens.get((positions, length), "-") for length in lengths)
        table.add_row(positions, "tokens", *counts, style="bold", end_section=True)
    title = f"Pseudo-perplexity ({report.targets_text}) by context length in tokens"
    return report.titled(title, table, _caption(report))


def _caption(report: PerplexityReport) -> list[str]:
    """What was measured, what each arm is, and how the methods stand against the bars on the same tokens."""
    documents = max((len(measurement.documents) for measurement in report.measurements), default=0)
    left_out = f" ({len(report.skipped)} too short)" if report.skipped else ""
    known = [] if report.trained_length is None else [f"trained length {report.trained_length} tokens"]
    settings = (f"{name} {report.protocol[name]}" for name in ("bos", "draws") if name in report.protocol)
    about = [
        f"protocol {report.protocol['protocol']}",
        f"{documents} document{'' if documents == 1 else 's'}{left_out}",
        *settings,
        *known,
        "in brackets 95 % over documents",
    ]
    return [", ".join(about), *patches(report), *_against_bars(report)]


def patches(report: PerplexityReport) -> list[str]:
    """What each arm was patched with; arms patched alike share a line."""
    arms: dict[str, list[str]] = {}
    for arm, record in report.records.items():
        if record is not None:
            method = [] if record.get("method") == arm else [f"method {record.get('method', '?')}"]
            dynamic = ["dynamic"] if record.get("dynamic") else []
            options = [f"{name} {value}" for name, value in record.get("options", {}).items()]
            text = ", ".join([*method, *dynamic, f"factor {record.get('factor', '?')}", *options])
            arms.setdefault(text, []).append(arm)
    return [f"{', '.join(names)}: {text}" for text, names in arms.items()]


def _against_bars(report: PerplexityReport) -> list[str]:
    """The paired difference of each method to the bars at its longest context: intervals of a table do not say it."""
    lines = []
    for bar in (bar for bar in HONEST if bar in report.arms):
        for arm in (arm for arm in report.arms if arm.partition(" (")[0] not in BARS):
            longest = max(row["context_length"] for row in report.rows if row["arm"] == arm)
            measured = {one.positions for one in report.measurements if (one.arm, one.context_length) == (arm, longest)}
            for positions in (positions for positions in report.shown_positions if positions in measured):
                found = report.difference(arm, bar, longest, positions)
                where = f"{longest}" if positions == ALL else f"{longest}, positions {positions}"
                if found["low"] is not None:
                    ends = f"[{found['low']:+.3f}, {found['high']:+.3f}]"
                    lines.append(f"{arm} - {bar} at {where}: {found['difference']:+.3f} nats per token {ends}, paired")
    return lines


def _cell(row: Mapping[str, Any] | None) -> str:
    """Perplexity and interval as the two lines of a table cell."""
    if row is None:
        return "-"
    if row["low"] is None:
        return number(row["perplexity"])
    return f"{number(row['perplexity'])}\n[{number(row['low'])}, {number(row['high'])}]"


def number(value: float) -> str:
    """Two decimals, none for thousands, an exponent for what is only large."""
    if not math.isfinite(value) or value >= 1e6:
        return f"{value:.1e}"
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}"
