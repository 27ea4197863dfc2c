"""The heat map of a retrieval probe: depth against context length, one panel for each arm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from hf_posext.evaluation.passkey_report import PasskeyReport

COLOURS = "cividis"  # Nunez et al. 2018: of even lightness, the same for every common kind of colour blindness
MIDDLE = 0.55  # accuracy above which a cell is so light that its number is black
COLUMNS = 3  # panels side by side
CELL = 0.62  # inches


def plot_passkey(report: PasskeyReport) -> Figure:
    """One panel for each arm: accuracy as colour and as a number in each cell, N as a line between context lengths."""
    from matplotlib.figure import Figure

    arms = report.arms
    columns = min(COLUMNS, len(arms))
    lines = math.ceil(len(arms) / columns)
    width = 1.2 + CELL * len(report.protocol["context_lengths"])
    height = 1.3 + CELL * len(report.protocol["depths"])
    figure = Figure(figsize=(max(4.5, columns * width + 1), lines * height + 0.5), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, arm in zip(panels, arms, strict=False):
        image = draw_arm(axes, report, arm)
    for axes in panels[len(arms) :]:
        axes.set_axis_off()
    figure.colorbar(image, ax=panels, label=f"answers retrieved ({report.protocol['probe']})", shrink=0.8)
    if report.vacuous:
        figure.suptitle(f"vacuous: below {report.protocol['gate']:g} within the trained length", color="#B03000")
    return figure


def draw_arm(axes: Axes, report: PasskeyReport, arm: str) -> AxesImage:
    """The heat map of one arm on axes that are there; a cell that was not measured is blank."""
    lengths, depths = report.protocol["context_lengths"], report.protocol["depths"]
    grid = np.full((len(depths), len(lengths)), np.nan)
    for row in report.rows:
        if row["arm"] == arm:
            grid[depths.index(row["depth"]), lengths.index(row["context_length"])] = row["accuracy"]
    image = axes.imshow(grid, cmap=COLOURS, vmin=0, vmax=1, aspect="auto")
    for (down, right), accuracy in np.ndenumerate(grid):
        if not np.isnan(accuracy):
            colour = "black" if accuracy > MIDDLE else "white"
            axes.text(right, down, f"{accuracy:.2f}", ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel("depth of the answer (0: start)")
    axes.set_title(arm, fontsize=10, pad=16)
    mark_trained_length(axes, report.trained_length, lengths)
    return image


def mark_trained_length(axes: Axes, trained: int | None, lengths: list[int]) -> None:
    """A line between the context lengths up to N and those beyond it."""
    if trained is None:
        return
    place = sum(length <= trained for length in lengths) - 0.5
    axes.axvline(place, color="#D55E00", linewidth=2)
    axes.annotate(
        f"trained length {trained}",
        (place, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color="#666666",
    )
