"""The figure of a LongPPL report: a line for each arm, with the perplexity of its key tokens and of all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_posext.evaluation.perplexity_report import ALL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_posext.evaluation.longppl_report import LongPplReport

STYLES = (("#0072B2", "o", "LongPPL"), ("#7f7f7f", "s", "perplexity of all tokens"))
APART = 0.12  # of a line, between the two of an arm


def plot_longppl(report: LongPplReport) -> Figure:
    """Both perplexities of each arm as points with their 95 % intervals, from the first arm at the top."""
    from matplotlib.figure import Figure

    arms = report.arms
    figure = Figure(figsize=(6.4, 1.8 + 0.45 * len(arms)), layout="constrained")
    axes = figure.subplots()
    for row in report.rows:
        is_all = row["positions"] == ALL
        colour, marker, label = STYLES[is_all]
        place = arms.index(row["arm"]) + (APART if is_all else -APART)
        if row["low"] is not None:
            axes.hlines(place, row["low"], row["high"], colors=colour, linewidth=1.6)
        axes.plot(row["perplexity"], place, marker, color=colour, label=label if row["arm"] == arms[0] else None)
    axes.set_yticks(range(len(arms)), arms)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlabel(f"perplexity, context of {report.protocol['context_lengths'][-1]} tokens at most")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper right", frameon=False, ncols=2)
    return figure
