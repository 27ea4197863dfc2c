"""A comparison as one HTML page: everything is inside it, and it follows the light or dark theme of its reader."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from hf_posext.evaluation.comparison_plot import plot_tradeoff
from hf_posext.evaluation.comparison_table import Cell, Grid, captions, grids
from hf_posext.evaluation.dark import darkened
from hf_posext.evaluation.plots import plot_perplexity
from hf_posext.evaluation.significance import BETTER, WORSE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_posext.evaluation.comparison_report import ComparisonReport

CLASSES = {BETTER: ' class="better"', WORSE: ' class="worse"'}
DARK = "(prefers-color-scheme: dark)"
STYLE = f"""
:root {{ color-scheme: light dark;
  --ink: #1a1a1a; --paper: #fff; --rule: #d5d5d5; --better: #00694b; --worse: #a83a00 }}
@media {DARK} {{
  :root {{ --ink: #ebebeb; --paper: #141414; --rule: #3c3c3c; --better: #5fd3ac; --worse: #ff9a5c }}
}}
body {{ color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem }}
img {{ max-width: 100%; height: auto }}
figure {{ margin: 1.5rem 0 }}
figcaption, caption {{ font-weight: 600; text-align: left; padding: .4rem 0 }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; margin: 1.5rem 0; font-variant-numeric: tabular-nums }}
th, td {{ padding: .25rem .8rem; border-bottom: 1px solid var(--rule); text-align: right }}
th:first-child {{ text-align: left }}
td small {{ display: block; opacity: .75 }}
.better {{ color: var(--better) }}
.worse {{ color: var(--worse) }}
pre {{ overflow-x: auto; font-size: .8rem }}
"""


def as_page(report: ComparisonReport) -> str:
    """The page: what the numbers say, both figures, all tables, notes, and the settings and rows as JSON."""
    trained, longest = report.trained_length, report.protocol["context_lengths"][-1]
    figures = [
        _figure(plot_perplexity(report), "Perplexity by context length"),
        _figure(plot_tradeoff(report), "What is gained on long text, and what it costs on short text"),
    ]
    data = json.dumps(report.to_dict()["protocol"], indent=2)
    body = [
        f"<h1>Context extension: {trained} to {longest} tokens</h1>",
        _list(report.reading),
        *figures,
        *map(_table, grids(report)),
        _list([*captions(report), *report.notes]),
        f"<details><summary>Settings</summary><pre>{escape(data)}</pre></details>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Context extension: {trained} to {longest} tokens</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _figure(figure: Figure, caption: str) -> str:
    """A figure in light and dark colours under its caption; the reader's theme chooses."""
    light, dark = _data(figure), _data(darkened(figure))
    return (
        f'<figure><figcaption>{escape(caption)}</figcaption><picture><source media="{DARK}" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(caption)}"></picture></figure>'
    )


def _data(figure: Figure) -> str:
    """A figure as the address of an SVG image that holds the image itself."""
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "hf_posext"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def _table(grid: Grid) -> str:
    """A grid as a table that scrolls where the page is narrow."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("arm", *grid.columns))
    rows = (
        f'<tr><th scope="row">{escape(arm)}</th>{"".join(map(_cell, cells))}</tr>' for arm, cells in grid.rows.items()
    )
    return (
        f'<div class="wide"><table><caption>{escape(grid.title)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    """A number over its interval."""
    interval = f"<small>{escape(cell.interval)}</small>" if cell.interval else ""
    return f"<td{CLASSES.get(cell.verdict or '', '')}>{escape(cell.value)}{interval}</td>"


def _list(lines: Iterable[str]) -> str:
    """Sentences as a list."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
