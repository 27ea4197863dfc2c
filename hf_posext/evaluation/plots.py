"""Figures of reports: each function takes a report and returns a matplotlib figure, without the state of pyplot."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posext.evaluation.perplexity_report import ALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hf_posext.evaluation.perplexity_report import PerplexityReport
    from hf_posext.evaluation.pseudo_report import PseudoPerplexityReport

# Okabe and Ito 2008, told apart with every common kind of colour blindness; its yellow is too faint on white.
FEW = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Tol 2021, "muted": the same for nine lines, not as strong.
MANY = ("#332288", "#CC6677", "#117733", "#88CCEE", "#882255", "#DDCC77", "#44AA99", "#AA4499", "#999933")
BAR_COLOURS = {"truncate": "#7f7f7f", "window": "#7f7f7f", "none": "#000000"}
BAR_LINES = {"truncate": "--", "window": ":", "none": "--"}
MARKERS = "osD^vPX"
SUFFIXES = (".png", ".svg", ".pdf")
DPI = 160
MOST_BANDS = 3  # with more arms their bands cover one another, and error bars side by side are drawn instead
DODGE = 0.03  # octaves between neighbouring arms then
MOST_DODGE = 0.24  # octaves between the first arm and the last


def plot_perplexity(report: PerplexityReport) -> Figure:
    """Perplexity against context length: one line per arm with its 95 % band, bars broken, N as a vertical line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 5.4 if _is_crowded(report) else 4.2), layout="constrained")
    draw_perplexity(figure.subplots(), report)
    figure.legend(loc="outside right upper", frameon=False, title="arm")
    return figure


def draw_perplexity(axes: Axes, report: PerplexityReport) -> None:
    """Perplexity against context length on axes that are there."""
    rows = [row for row in report.rows if row.get("positions", ALL) == ALL]
    _draw_arms(axes, report, rows, _is_crowded(report))
    what = f"of the {report.targets_text}" if report.protocol["targets"] else f"({report.targets_text})"
    _label_axes(axes, report, f"perplexity {what}")


def plot_pseudo_perplexity(report: PseudoPerplexityReport) -> Figure:
    """As `plot_perplexity`, with a panel for all tokens and, beyond N, one for the positions on each side of it."""
    from matplotlib.figure import Figure

    many, groups = _is_crowded(report), report.shown_positions
    figure = Figure(figsize=(3.6 + 3.6 * len(groups), 5.4 if many else 4.2), layout="constrained")
    panels = figure.subplots(1, len(groups), sharex=True, sharey=True, squeeze=False)[0]
    for axes, positions in zip(panels, groups, strict=True):
        _draw_arms(axes, report, [row for row in report.rows if row["positions"] == positions], many)
    for axes, positions in zip(panels, groups, strict=True):
        _label_axes(axes, report, "pseudo-perplexity of masked tokens" if axes is panels[0] else "")
        axes.set_title("all positions" if positions == ALL else f"positions {positions}", fontsize=10, pad=16)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, title="arm")
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str], *, dark: bool = False) -> None:
    """Writes a figure as PNG, SVG or PDF, whichever the suffix says; equal figures give equal bytes of SVG.

    Args:
        figure: it stays as it is.
        path: of the file.
        dark: for pages with a dark background: the same lines and words in light colours on nearly black.

    Raises:
        ValueError: another suffix.
    """
    import matplotlib

    from hf_posext.evaluation.dark import darkened

    metadata = {"Date": None} if check_suffix(path) == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "hf_posext"}):
        (darkened(figure) if dark else figure).savefig(path, dpi=DPI, metadata=metadata)


def check_suffix(path: str | os.PathLike[str]) -> str:
    """The suffix of a file that a figure can be written to.

    Raises:
        ValueError: another one.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"A figure is written as one of {', '.join(SUFFIXES)}, got {str(path)!r}.")
    return suffix


def mark_length(axes: Axes, tokens: float, words: str) -> None:
    """A length in tokens as a vertical line with its words above it."""
    axes.axvline(tokens, color="#999999", linewidth=1, linestyle=":", zorder=1)
    axes.annotate(
        words,
        (tokens, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color="#666666",
    )


def tidy(axes: Axes, grid: str = "y") -> None:
    """Faint lines for reading values off, and no frame at the top and right."""
    axes.grid(axis=grid, color="#dddddd", linewidth=0.6)  # type: ignore[arg-type]
    axes.spines[["top", "right"]].set_visible(False)


def _is_crowded(report: PerplexityReport) -> bool:
    """Whether there are more arms than the strong colours tell apart."""
    return len(report.arms) > len(FEW) + len(BAR_COLOURS)


def _draw_arms(axes: Axes, report: PerplexityReport, rows: list[dict[str, Any]], many: bool) -> None:
    """A line with its intervals for each arm, and N as a vertical line."""
    methods = [arm for arm in report.arms if bar_of(arm) is None]
    for position, arm in enumerate(report.arms):
        own = [row for row in rows if row["arm"] == arm]
        style = line_style(arm, methods)
        crowded = len(report.arms) > MOST_BANDS
        step = min(DODGE, MOST_DODGE / len(report.arms))
        shift = 2 ** ((position - (len(report.arms) - 1) / 2) * step) if crowded else 1.0
        places = [row["context_length"] * shift for row in own]
        axes.plot(
            places,
            [row["perplexity"] for row in own],
            label=arm,
            linewidth=1.4 if many else 1.8,
            markersize=5,
            **style,
        )
        _draw_intervals(axes, places, own, style["color"], band=not crowded)
    if report.trained_length is not None:
        mark_length(axes, report.trained_length, f"trained length {report.trained_length}")


def bar_of(arm: str) -> str | None:
    """The bar that an arm is, also where it was renamed to `truncate (arm)`; None for a method."""
    name = arm.partition(" (")[0]
    return name if name in BAR_COLOURS else None


def line_style(arm: str, methods: list[str]) -> dict[str, Any]:
    """Colour, marker and order of a line: bars broken and behind, the methods told apart by colour and by marker."""
    bar = bar_of(arm)
    if bar is not None:
        return {"color": BAR_COLOURS[bar], "linestyle": BAR_LINES[bar], "marker": ".", "zorder": 2}
    index, palette = methods.index(arm), FEW if len(methods) <= len(FEW) else MANY
    return {"color": palette[index % len(palette)], "marker": MARKERS[index % len(MARKERS)], "zorder": 3}


def _draw_intervals(axes: Axes, places: list[float], rows: list[dict[str, Any]], colour: str, *, band: bool) -> None:
    """The 95 % intervals, as a band or as thin vertical lines; nothing where there are none."""
    known = [
        (place, row["low"], row["high"]) for place, row in zip(places, rows, strict=True) if row["low"] is not None
    ]
    if not known:
        return
    where, lows, highs = zip(*known, strict=True)
    if band:
        axes.fill_between(where, lows, highs, color=colour, alpha=0.15, linewidth=0, zorder=1)
    else:
        axes.vlines(where, lows, highs, colors=colour, linewidth=1, alpha=0.5, zorder=1)


def _label_axes(axes: Axes, report: PerplexityReport, title: str) -> None:
    """Scales, ticks at the measured lengths, axis titles with units."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    lengths = report.protocol["context_lengths"]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("context length (tokens)")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = math.log10(high / low) if 0 < low < high < math.inf else 0
    if decades < 1:  # less than a decade has hardly a tick at 1, 2 and 5
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3 else (1,)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel(title)
    tidy(axes)
