"""The figure of a run: how the loss fell, and perplexity against context length before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_posext.evaluation.plots import FEW, draw_perplexity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hf_posext.training.result import FinetuneResult


def plot_finetuning(result: FinetuneResult) -> Figure:
    """Training loss against steps, and beside it perplexity against context length where it was measured."""
    from matplotlib.figure import Figure

    panels = 1 if result.evaluation is None else 2
    figure = Figure(figsize=(3.6 + 3.6 * panels, 4.2), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    draw_loss(axes[0], result)
    if result.evaluation is not None:
        draw_perplexity(axes[1], result.evaluation)
        handles, labels = axes[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False, title="arm")
    return figure


def draw_loss(axes: Axes, result: FinetuneResult) -> None:
    """The loss that was logged, in nats per token."""
    logged = [(each["step"], each["loss"]) for each in result.history if "loss" in each]
    if logged:
        axes.plot(*zip(*logged, strict=True), color=FEW[0], linewidth=1.8, marker="o", markersize=3)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per token)")
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
