# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_posext"]
# ///
"""The same tiny model trained six times from the same start, with nothing but the position encoding swapped.

    python recipes/compare_encodings.py --out runs/encodings
    python recipes/compare_encodings.py --out runs/encodings --seeds 0 1 2
    python recipes/compare_encodings.py --out runs/encodings_quick --quick

Blocks, initial values, order of the data and hyper-parameters are the same for all: a GPT-2 of 3 layers reads eight
books of the demo's training text twice, in windows of N = 128 tokens. Then all read the same tokens of twelve held-out
books with N, 2N and 4N tokens of context; a learned table has no rows beyond N. One learning rate serves all; none was
chosen for an encoding.

It prints a table and what it says in sentences, and writes `encodings.json` with all numbers, and `encodings.png` and
`.svg` with validation loss and perplexity, for light and for dark pages. An encoding that is done is not done again.
The first command takes 11 minutes on one core, the last 2. Seen from seed 0: RoPE and ALiBi learn fastest; with 4N
tokens ALiBi reads as with N, and NoPE, relative bias, sinusoids and RoPE lose 0.04, 0.12, 0.13 and 0.20 nats per token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from encodings_models import ENCODINGS, Settings, run_cell
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_posext import PerplexityReport
from hf_posext.evaluation.plots import draw_perplexity, line_style, save_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL = 8  # points
GAP = 0.055  # of an axis between the middles of two labels
LEADER = {"arrowstyle": "-", "linewidth": 0.8, "shrinkA": 1, "shrinkB": 4}


def averaged(cells: Sequence[dict[str, Any]]) -> PerplexityReport:
    """The report of one encoding: of each document the NLL summed over the seeds, and so the mean of these."""
    reports = [PerplexityReport.from_dict(cell["report"]) for cell in cells]
    summed = [
        replace(
            same[0],
            nll=tuple(map(sum, zip(*(each.nll for each in same), strict=True))),
            tokens=tuple(map(sum, zip(*(each.tokens for each in same), strict=True))),
        )
        for same in zip(*(report.measurements for report in reports), strict=True)
    ]
    return replace(reports[0], measurements=summed)


def mean_curve(cells: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Mean validation loss of the seeds at each step, and their extremes."""
    points = zip(*(cell["curve"] for cell in cells), strict=True)
    return [
        {"step": seeds[0]["step"], "loss": fmean(losses), "low": min(losses), "high": max(losses)}
        for seeds in points
        for losses in [[each["loss"] for each in seeds]]
    ]


def gains(report: PerplexityReport, encoding: str) -> list[dict[str, Any]]:
    """NLL at each longer length minus that at N, in nats per token, paired over the documents; negative is a gain."""
    own = [each for each in report.measurements if each.arm == encoding]
    found = []
    for longer in own[1:]:
        short = replace(own[0], arm=f"{encoding} at {own[0].context_length}", context_length=longer.context_length)
        pair = replace(report, measurements=[longer, short])
        found.append(pair.difference(encoding, short.arm, longer.context_length))
    return found


def interval(found: dict[str, Any]) -> str:
    """A difference in nats per token with its interval."""
    return f"{found['difference']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def ranking(report: PerplexityReport, length: int) -> str:
    """Which encoding reads best at a length, and how far the others are behind."""
    reached = {row["arm"]: row for row in report.rows if row["context_length"] == length}
    best, *others = sorted(reached, key=lambda arm: reached[arm]["nll"])
    behind = ", ".join(f"{arm} {interval(report.difference(arm, best, length))}" for arm in others)
    return (
        f"With {length} tokens of context {best} has the lowest perplexity, {reached[best]['perplexity']:.2f}; behind "
        f"it, in nats per token and paired over {reached[best]['documents']} documents: {behind or 'none'}."
    )


def verdict(report: PerplexityReport, encoding: str) -> str:
    """What an encoding makes of the longest context, by its interval."""
    found = gains(report, encoding)
    if not found:
        return f"{encoding} has no rows beyond {report.trained_length} tokens and cannot read more"
    last = found[-1]
    word = "loses" if last["low"] > 0 else "gains" if last["high"] < 0 else "neither loses nor gains for sure"
    return f"{encoding} {word}, {interval(last)}"


def reading(cells: dict[str, list[dict[str, Any]]], report: PerplexityReport) -> list[str]:
    """The numbers in sentences."""
    lengths = report.protocol["context_lengths"]
    final = {name: mean_curve(own)[-1] for name, own in cells.items()}
    order = sorted(final, key=lambda name: final[name]["loss"])
    losses = ", ".join(f"{name} {final[name]['loss']:.3f}" for name in order)
    one = next(iter(cells.values()))
    seeds = (
        "One start only: the intervals are over documents and say nothing of another start; `--seeds 0 1 2` does."
        if len(one) == 1
        else f"Means of {len(one)} starts, with intervals over documents; the final loss of one encoding differs by up "
        f"to {max(each['high'] - each['low'] for each in final.values()):.3f} nats between starts."
    )
    return [
        f"Validation loss after {final[order[0]]['step']} steps, {one[0]['epochs']:.1f} epochs, from the lowest, in "
        f"nats per token: {losses}.",
        ranking(report, lengths[0]),
        f"With {lengths[-1]} in place of {lengths[0]} tokens of context, on the same tokens, in nats per token: "
        f"{'; '.join(verdict(report, name) for name in cells)}.",
        ranking(report, lengths[-1]),
        seeds,
    ]


def table(cells: dict[str, list[dict[str, Any]]], report: PerplexityReport) -> Table:
    """One row per encoding: the final validation loss, perplexity at each length, and what the longest context adds."""
    lengths = report.protocol["context_lengths"]
    shown = Table(caption=f"loss: on validation; by length: perplexity of the {report.targets_text}")
    shown.add_column("encoding", no_wrap=True)
    for title in ("loss", *map(str, lengths), f"{lengths[-1]} - {lengths[0]} (nats)"):
        shown.add_column(title, justify="right")
    for name, own in cells.items():
        reached = {row["context_length"]: f"{row['perplexity']:.2f}" for row in report.rows if row["arm"] == name}
        longest = gains(report, name)[-1:]
        added = interval(longest[0]) if longest else f"ends at {lengths[0]}"
        perplexities = (reached.get(length, "-") for length in lengths)
        shown.add_row(name, f"{mean_curve(own)[-1]['loss']:.3f}", *perplexities, escape(added))
    return shown


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """The nearest places, in the same order, of which no two are closer than `gap`."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    groups: list[list[float]] = []  # of neighbours that touch: their heights less what those below need
    for rank, index in enumerate(order):
        groups.append([heights[index] - rank * gap])
        while len(groups) > 1 and fmean(groups[-2]) >= fmean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    bases = [fmean(group) for group in groups for _ in group]
    places = {index: base + rank * gap for rank, (index, base) in enumerate(zip(order, bases, strict=True))}
    return [places[index] for index in range(len(heights))]


def label_ends(axes: Axes, names: Sequence[str]) -> None:
    """The name of each line beside its end, joined to it in its colour; light colours are no colours for words."""
    lines = [line for line in axes.get_lines() if line.get_label() in names]
    ends = [(line.get_xdata()[-1], line.get_ydata()[-1]) for line in lines]
    shares = [(axes.transScale + axes.transLimits).transform(end)[1] for end in ends]
    for line, end, height in zip(lines, ends, spread(shares, GAP), strict=True):
        axes.annotate(
            line.get_label(),
            end,
            xytext=(1.05, height),
            textcoords="axes fraction",
            fontsize=LABEL,
            va="center",
            arrowprops={**LEADER, "color": line.get_color(), "relpos": (0, 0.5)},
        )


def draw_curves(axes: Axes, cells: dict[str, list[dict[str, Any]]]) -> None:
    """Validation loss against step, with the extremes of several seeds as a band."""
    for name, own in cells.items():
        curve = mean_curve(own)
        steps, losses, lows, highs = ([point[key] for point in curve] for key in ("step", "loss", "low", "high"))
        style = line_style(name, list(cells))
        axes.plot(steps, losses, label=name, linewidth=1.6, markersize=4, **style)
        axes.fill_between(steps, lows, highs, color=style["color"], alpha=0.15, linewidth=0)
    settings = next(iter(cells.values()))[0]["settings"]
    axes.set_xlabel(f"step ({settings['batch'] * settings['length']} tokens each)")
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_title("while training", fontsize=10, pad=16)
    tidy(axes)
    label_ends(axes, list(cells))


def draw_lengths(axes: Axes, report: PerplexityReport) -> None:
    """Perplexity against context length; an encoding that ends at N is named at its only point."""
    draw_perplexity(axes, report)
    axes.set_title("reading beyond the trained length, 95 % intervals over documents", fontsize=10, pad=16)
    beyond = [arm for arm in report.arms if gains(report, arm)]
    label_ends(axes, beyond)
    for line in axes.get_lines():
        if line.get_label() in report.arms and line.get_label() not in beyond:
            axes.annotate(
                f"{line.get_label()} ends here",
                (line.get_xdata()[-1], line.get_ydata()[-1]),
                xytext=(0.1, 0.9),  # free, since lines begin low at the left
                textcoords="axes fraction",
                fontsize=LABEL,
                arrowprops={**LEADER, "color": line.get_color(), "linestyle": "--", "relpos": (0, 0)},
            )


def plot(cells: dict[str, list[dict[str, Any]]], report: PerplexityReport) -> Figure:
    """Both panels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.4, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_curves(left, cells)
    draw_lengths(right, report)
    return figure


def write(cells: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Table and reading on the screen; all numbers and the picture in the folder."""
    report = PerplexityReport.join(averaged(own) for own in cells.values())
    sentences = reading(cells, report)
    found = {
        "encodings": {name: {"how": own[0]["how"], "curve": mean_curve(own)} for name, own in cells.items()},
        "rows": report.rows,
        "longer": [each for name in cells for each in gains(report, name)],
        "reading": sentences,
        "cells": [cell for own in cells.values() for cell in own],
    }
    (out / "encodings.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    figure = plot(cells, report)
    for suffix in ("png", "svg"):
        save_figure(figure, out / f"encodings.{suffix}")
        save_figure(figure, out / f"encodings_dark.{suffix}", dark=True)
    console = Console()
    console.print(table(cells, report))
    for sentence in sentences:
        console.print(sentence, markup=False, highlight=False)


def main() -> None:
    """Trains and measures what is not done yet, then shows it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; what is done there stays")
    parser.add_argument("--encodings", nargs="+", choices=list(ENCODINGS), default=list(ENCODINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--quick", action="store_true", help="a first look, of 60 steps")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = Settings(steps=arguments.steps)
    arguments.out.mkdir(parents=True, exist_ok=True)
    run(settings.short() if arguments.quick else settings, arguments.encodings, arguments.seeds, arguments.out)


def run(settings: Settings, encodings: Sequence[str], seeds: Sequence[int], out: Path) -> None:
    """All encodings from all seeds, then what they show."""
    cells: dict[str, list[dict[str, Any]]] = {encoding: [] for encoding in encodings}
    for seed in seeds:
        for encoding in encodings:
            cells[encoding].append(run_cell(encoding, settings, seed, out))
            done = cells[encoding][-1]
            print(f"{encoding}, seed {seed}: loss {done['curve'][-1]['loss']:.3f}, {done['seconds']} s", flush=True)
    write(cells, out)


if __name__ == "__main__":
    main()
