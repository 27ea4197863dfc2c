"""The figure of the trade-off: what each method reaches on long text against what it costs on short text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hf_posext.evaluation.plots import BAR_COLOURS, BAR_LINES, bar_of, line_style, tidy
from hf_posext.evaluation.protocols import HONEST

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hf_posext.evaluation.comparison_report import ComparisonReport

LINEAR = 0.02  # nats: up to it both axes are about linear, since most methods differ by less and some by far more
TICKS = (-3, -1, -0.3, -0.1, -0.03, 0, 0.03, 0.1, 0.3, 1, 3, 10)  # nats
MARGIN = 1.15  # of the range that is shown to that of the points, on the scale of an axis
FONT = 8  # points
WIDE = 0.58  # of the font size, mean width of a letter
RINGS = 24  # tries to place a label, each farther from its point
LEADER = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}

Box = tuple[float, float, float, float]  # left, bottom, right, top, in points


def plot_tradeoff(report: ComparisonReport) -> Figure:
    """NLL at the longest context against the change of NLL at N: a labelled point per arm, the bars as lines.

    Raises:
        ValueError: no price was measured.
    """
    from matplotlib.figure import Figure

    points = report.tradeoff
    if not points:
        raise ValueError("There is no price in this report to draw. Measure it with `compare`.")
    figure = Figure(figsize=(7.6, 5.2), layout="constrained")
    axes = figure.subplots()
    reference = _reference(report)
    methods = [point["arm"] for point in points if bar_of(point["arm"]) is None]
    for point in points:
        _draw_point(axes, point, methods)
    _draw_bars(axes, report)
    if any(bar in report.arms for bar in HONEST):
        figure.legend(loc="outside lower left", frameon=False, ncols=2, fontsize=FONT)
    _scale(axes, points, reference)
    _title_axes(axes, report, reference)
    _label_points(axes, [(point["arm"], point["short"], point["long"]) for point in points])
    return figure


def _reference(report: ComparisonReport) -> float:
    """NLL from which heights are told apart: of the first honest bar that there is, else the lowest."""
    longest = report.protocol["context_lengths"][-1]
    reached = {row["arm"]: row["nll"] for row in report.rows if row["context_length"] == longest}
    return next((reached[bar] for bar in HONEST if bar in reached), min(reached.values()))


def _draw_point(axes: Axes, point: dict[str, Any], methods: list[str]) -> None:
    """One arm with its paired 95 % intervals, in the colours of `plot_perplexity`."""
    style = {name: value for name, value in line_style(point["arm"], methods).items() if name != "linestyle"}
    colour = style["color"]
    if point["short_low"] is not None:
        axes.hlines(point["long"], point["short_low"], point["short_high"], colors=colour, linewidth=1, alpha=0.6)
    if point["long_low"] is not None:
        axes.vlines(point["short"], point["long_low"], point["long_high"], colors=colour, linewidth=1, alpha=0.6)
    axes.plot([point["short"]], [point["long"]], linestyle="", markersize=6, **style)


def _draw_bars(axes: Axes, report: ComparisonReport) -> None:
    """The honest bars as lines across, since they cost nothing at N."""
    longest = report.protocol["context_lengths"][-1]
    for row in report.rows:
        if row["arm"] in HONEST and row["context_length"] == longest:
            colour, line = BAR_COLOURS[row["arm"]], BAR_LINES[row["arm"]]
            axes.axhline(row["nll"], color=colour, linestyle=line, linewidth=1.4, zorder=1, label=row["arm"])


def _stretched(values: Any) -> NDArray[np.float64]:
    """The scale of both axes: linear near zero, logarithmic far from it."""
    return np.arcsinh(np.asarray(values, dtype=np.float64) / LINEAR)


def _scale(axes: Axes, points: Sequence[dict[str, Any]], reference: float) -> None:
    """Both axes around their zero, which the points fill; intervals may end outside, where nothing is finite too."""
    for name, zero, values in (("x", 0.0, "short"), ("y", reference, "long")):
        scale = Stretch(zero)
        found = _stretched([0.0, LINEAR, *(point[values] - zero for point in points)])
        found = found[np.isfinite(found)]
        middle, half = (found.max() + found.min()) / 2, MARGIN * (found.max() - found.min()) / 2
        low, high = scale.inverse(middle - half), scale.inverse(middle + half)
        getattr(axes, f"set_{name}scale")("function", functions=(scale.forward, scale.inverse))
        getattr(axes, f"set_{name}lim")(low, high)


class Stretch:
    """A scale of matplotlib that is stretched around a value; a class, since a figure is copied with its scales.

    Args:
        zero: the value, in nats per token.
    """

    def __init__(self, zero: float) -> None:
        self.zero = zero

    def forward(self, values: Any) -> NDArray[np.float64]:
        """From nats per token to places."""
        return _stretched(np.asarray(values, dtype=np.float64) - self.zero)

    def inverse(self, places: Any) -> NDArray[np.float64]:
        """From places to nats per token."""
        return np.sinh(np.asarray(places, dtype=np.float64)) * LINEAR + self.zero


def _title_axes(axes: Axes, report: ComparisonReport, reference: float) -> None:
    """Ticks, and titles with units."""
    longest, trained = report.protocol["context_lengths"][-1], report.trained_length
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    across = [tick for tick in TICKS if left <= tick <= right]
    up = [tick for tick in TICKS if low <= reference + tick <= high]
    axes.set_xticks(across, [f"{tick:+g}" if tick else "0" for tick in across])
    axes.set_yticks([reference + tick for tick in up], [f"{reference + tick:.2f}" for tick in up])
    axes.set_xticks([], minor=True)
    axes.set_yticks([], minor=True)
    axes.set_xlabel(f"price: change of NLL at {trained} tokens, patched for {longest} (nats per token)")
    axes.set_ylabel(f"NLL at {longest} tokens (nats per token)")
    tidy(axes, "both")


def _label_points(axes: Axes, labels: Sequence[tuple[str, float, float]]) -> None:
    """Each name as near to its point as it finds room, with a thin line to it where that is not beside it."""
    figure: Any = axes.figure
    figure.draw_without_rendering()  # only then it is known where a point lies on the page
    per_point = figure.dpi / 72
    bounds = [edge / per_point for edge in axes.get_window_extent().extents]
    places = [tuple(axes.transData.transform(label[1:]) / per_point) for label in labels]
    taken: list[Box] = [(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    for (name, price, height), (x, y) in zip(labels, places, strict=True):
        size = WIDE * FONT * len(name), 1.25 * FONT
        box = next((box for box in _around(x, y, *size) if _is_free(box, taken, bounds)), None)
        left, bottom = (x + 6, y - size[1] / 2) if box is None else box[:2]
        taken.append((left, bottom, left + size[0], bottom + size[1]))
        axes.annotate(
            name,
            (price, height),
            xytext=(left - x, bottom + size[1] / 2 - y),
            textcoords="offset points",
            fontsize=FONT,
            va="center",
            parse_math=False,
            arrowprops={"relpos": (0.0 if left > x else 1.0, 0.5), **LEADER},
        )


def _around(x: float, y: float, width: float, height: float) -> Iterator[Box]:
    """Boxes for a label, from just above or below the interval of its point to farther and farther away."""
    for ring in range(RINGS):
        up = (0.6 + 0.5 * ring) * height
        for left, middle in ((x + 6, y + up), (x + 6, y - up), (x - 6 - width, y + up), (x - 6 - width, y - up)):
            yield left, middle - height / 2, left + width, middle + height / 2


def _is_free(box: Box, taken: Sequence[Box], bounds: Sequence[float]) -> bool:
    """Whether a box lies inside the axes and touches no other."""
    inside = box[0] >= bounds[0] and box[1] >= bounds[1] and box[2] <= bounds[2] and box[3] <= bounds[3]
    return inside and not any(
        box[0] < right and left < box[2] and box[1] < top and bottom < box[3] for left, bottom, right, top in taken
    )
