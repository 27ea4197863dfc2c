"""How comparisons are told: sentences and tables that terminal, Markdown and HTML share, and rows for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from hf_posext.evaluation.perplexity_table import number, patches
from hf_posext.evaluation.protocols import BARS, HONEST
from hf_posext.evaluation.significance import BETTER, UNCLEAR, WORSE, smallest_p
from hf_posext.evaluation.statistics import LEVEL

if TYPE_CHECKING:
    from hf_posext.evaluation.comparison_report import ComparisonReport

STYLES = {BETTER: "green", WORSE: "red"}
MARKS = {BETTER: " better", WORSE: " worse", UNCLEAR: " ~"}
TESTED = ("difference", "low", "high", "p", "p_holm", "verdict")


@dataclass(frozen=True)
class Cell:
    """A number of a table with its interval, and what it was found to be; all empty where nothing was measured."""

    value: str = "-"
    interval: str = ""
    verdict: str | None = None


@dataclass(frozen=True)
class Grid:
    """A table of numbers: a title, the headings of its columns, and per arm one cell for each."""

    title: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[Cell, ...]]


def grids(report: ComparisonReport) -> list[Grid]:
    """Perplexities, differences to the first honest bar that there is, and the price on short text."""
    return [_perplexities(report), *_differences(report), *_prices(report)]


def sentences(report: ComparisonReport) -> list[str]:
    """At each length beyond N the best method, and how it stands against the bars."""
    lengths = [length for length in report.protocol["context_lengths"] if length > (report.trained_length or 0)]
    return [sentence for length in lengths for sentence in _best_at(report, length)]


def captions(report: ComparisonReport) -> list[str]:
    """What was measured, how to read the tables, and how each arm was patched."""
    documents = max((len(one.documents) for one in report.measurements), default=0)
    about = (
        f"protocol {report.protocol['protocol']} ({report.targets_text}), {documents} documents, "
        f"bos {report.protocol['bos']}, trained length {report.trained_length} tokens, in brackets 95 % over documents"
    )
    words = "better, worse, ~ (not clearly different): paired p < 0.05, Holm-corrected over each bar"
    return [about, *([words] if report.significance else []), *_resolution(report), *patches(report)]


def comparison_table(report: ComparisonReport) -> RenderableType:
    """All grids as rich tables, sentences, captions and notes."""
    tables = [part for grid in grids(report) for part in (Text(grid.title, style="bold"), _as_rich(grid), "")]
    told = [Text(f"- {sentence}") for sentence in report.reading]
    about = [Text(line, style="dim") for line in captions(report)]
    return Group(*tables, *told, *about, *(Text(f"note: {note}") for note in report.notes))


def as_markdown(report: ComparisonReport) -> str:
    """Sentences, grids, captions and notes as Markdown."""
    parts = ["\n".join(f"- {sentence}" for sentence in report.reading)]
    for grid in grids(report):
        head = _line(("arm", *grid.columns)) + "\n" + "|" + " --- |" + " ---: |" * len(grid.columns)
        rows = (
            _line((arm, *(f"{cell.value} {cell.interval}".strip() for cell in grid.rows[arm]))) for arm in grid.rows
        )
        parts.append(f"**{grid.title}**\n\n" + "\n".join([head, *rows]))
    parts.append("\n".join(f"- {line}" for line in [*captions(report), *report.notes]))
    return "\n\n".join(part for part in parts if part) + "\n"


def as_csv(report: ComparisonReport) -> str:
    """One line per arm and length, `patched_for` and every comparison with a bar beside it; last those of the price."""
    found = {(row["arm"], row["versus"], row["context_length"]): row for row in report.significance}
    bars = [bar for bar in HONEST if bar in report.arms]
    named = [f"{bar}_{name}" for bar in bars for name in TESTED]
    file = io.StringIO()
    writer = csv.DictWriter(file, [*report.rows[0], "patched_for", *named], lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for row in report.rows:
        arm, length = row["arm"], row["context_length"]
        tested = {f"{bar}_{name}": found.get((arm, bar, length), {}).get(name) for bar in bars for name in TESTED}
        writer.writerow({**row, "patched_for": report.patched_for(arm, length), **tested})
    writer.writerows(row for row in report.short_rows if row["patched_for"])
    return file.getvalue()


def _perplexities(report: ComparisonReport) -> Grid:
    """Arms x context lengths."""
    lengths = report.protocol["context_lengths"]
    found = {(row["arm"], row["context_length"]): row for row in report.rows}
    rows = {
        arm: tuple(_perplexity(found[arm, length]) if (arm, length) in found else Cell() for length in lengths)
        for arm in report.arms
    }
    title = f"Perplexity ({report.targets_text}) by context length in tokens"
    return Grid(title, tuple(map(str, lengths)), rows)


def _differences(report: ComparisonReport) -> list[Grid]:
    """Arms x context lengths, a grid for each bar that arms were compared with."""
    found = {(row["arm"], row["versus"], row["context_length"]): row for row in report.significance}
    lengths = report.protocol["context_lengths"]
    return [
        Grid(
            f"NLL minus that of `{bar}`, nats per token, on the same tokens (negative is better)",
            tuple(map(str, lengths)),
            {
                arm: tuple(_difference(found.get((arm, bar, length), {})) for length in lengths)
                for arm in dict.fromkeys(row["arm"] for row in report.significance if row["versus"] == bar)
            },
        )
        for bar in dict.fromkeys(row["versus"] for row in report.significance)
    ]


def _prices(report: ComparisonReport) -> list[Grid]:
    """What each arm costs on text of the trained length."""
    arms = [row for row in report.short_rows if row["patched_for"]]
    if not arms:
        return []
    longest, trained = arms[0]["patched_for"], arms[0]["context_length"]
    rows: dict[str, tuple[Cell, ...]] = {row["arm"]: (_perplexity(row), _difference(_renamed(row))) for row in arms}
    title = f"The price: patched for {longest} tokens, given {trained}"
    return [Grid(title, ("perplexity", "NLL minus that of the unpatched model, nats per token"), rows)]


def _renamed(row: Mapping[str, Any]) -> dict[str, Any]:
    """The difference of a short row in the words of a comparison."""
    return {"difference": row["difference"], "low": row["difference_low"], "high": row["difference_high"]}


def _best_at(report: ComparisonReport, length: int) -> list[str]:
    """One sentence on one length; none where no method was measured."""
    here = {row["arm"]: row for row in report.rows if row["context_length"] == length}
    methods = [row for arm, row in here.items() if arm.partition(" (")[0] not in BARS]
    if not methods:
        return []
    best = min(methods, key=lambda row: row["nll"])
    against = [row for row in report.significance if (row["arm"], row["context_length"]) == (best["arm"], length)]
    words = [f"{_compared(row)} `{row['versus']}` ({number(here[row['versus']]['perplexity'])})" for row in against]
    more = f": {', '.join(words)}" if words else ""
    return [f"At {length} tokens `{best['arm']}` is the best method with {number(best['perplexity'])}{more}."]


def _compared(row: Mapping[str, Any]) -> str:
    """A comparison in words, as far as a bar's name."""
    if row["low"] is None:
        return f"{row['difference']:+z.3f} nats per token, without an interval, to"
    found = f"{row['difference']:+z.3f} nats per token [{row['low']:+z.3f}, {row['high']:+z.3f}]"
    return f"{row['verdict'] or 'not comparable'} ({found}) {'from' if row['verdict'] == UNCLEAR else 'than'}"


def _resolution(report: ComparisonReport) -> list[str]:
    """Says so where there is too little to tell even the clearest difference from chance."""
    comparisons = max((row["comparisons"] for row in report.significance), default=0)
    documents = min((row["documents"] for row in report.significance), default=0)
    if not comparisons or comparisons * smallest_p(documents) < 1 - LEVEL:
        return []
    return [f"no verdict is possible: {documents} documents, {comparisons} comparisons with a bar"]


def _perplexity(row: Mapping[str, Any]) -> Cell:
    """A perplexity with its interval."""
    interval = "" if row["low"] is None else f"[{number(row['low'])}, {number(row['high'])}]"
    return Cell(number(row["perplexity"]), interval)


def _difference(row: Mapping[str, Any]) -> Cell:
    """A difference with its interval and its verdict."""
    if not row:
        return Cell()
    interval = "" if row["low"] is None else f"[{row['low']:+z.3f}, {row['high']:+z.3f}]"
    found = row.get("verdict")
    return Cell(f"{row['difference']:+z.3f}{MARKS.get(found or '', '')}", interval, found)


def _as_rich(grid: Grid) -> Table:
    """A grid for the terminal."""
    table = Table("arm", *(Column(name, justify="right") for name in grid.columns))
    for arm, cells in grid.rows.items():
        texts = (
            Text(f"{cell.value}\n{cell.interval}".strip(), style=STYLES.get(cell.verdict or "", "")) for cell in cells
        )
        table.add_row(Text(arm), *texts)
    return table


def _line(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
