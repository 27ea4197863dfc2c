"""The picture of sinusoids: a heat map of position x channel, and the waves of some channels below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from hf_posext.evaluation.plots import FEW, MARKERS, mark_length, tidy
from hf_posext.evaluation.waves import Waves, waves_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = "cividis"  # Nunez et al. 2018: of even lightness, the same for every common kind of colour blindness
SHOWN = 4  # channels of which the waves are drawn
LINES = ("-", "--", "-.", ":")
WIDTHS = (0.7, 1.4, 1.4, 1.4)  # the first turns so fast that its line would fill the panel
MARKED = 12  # markers on a line


def plot_sinusoids(
    model: nn.Module | Waves | tuple[int, int],
    method: str | None = None,
    factor: float | None = None,
    **arguments: Any,
) -> Figure:
    """Heat map of what is said at each position in each channel, and below it the waves of four channels.

    It is the model's table of positions, learned or sinusoidal, else the cosines of its rotation.

    Args:
        model: a transformers model, which is left as it was; (P, W) for the published sinusoids at P positions in W
            channels; or what `waves_of` gave.
        method: as for `waves_of`.
        factor: s.
        arguments: `positions`, and others of `patch_model`.

    Raises:
        TypeError, ValueError, NoSiteError, PatchError: as by `waves_of`.
    """
    from matplotlib.figure import Figure

    waves = model if isinstance(model, Waves) else waves_of(model, method, factor, **arguments)
    values = waves.values.numpy()
    figure = Figure(figsize=(7.2, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reach = float(np.abs(values).max()) or 1.0
    extent = (-0.5, values.shape[0] - 0.5, values.shape[1] - 0.5, -0.5)
    image = above.imshow(
        values.T, cmap=COLOURS, vmin=-reach, vmax=reach, aspect="auto", interpolation="nearest", extent=extent
    )
    above.set_ylabel(waves.channel)
    figure.colorbar(image, ax=above, label=waves.unit)
    for index, channel in enumerate(chosen(values.shape[1])):
        below.plot(
            values[:, channel],
            label=f"{waves.channel} {channel}",
            color=FEW[index],
            linestyle=LINES[index],
            linewidth=WIDTHS[index],
            marker=MARKERS[index],
            markersize=4,
            markevery=(index * len(values) // (MARKED * SHOWN), max(1, len(values) // MARKED)),
        )
    below.set_xlabel("position (tokens)")
    below.set_ylabel(waves.unit)
    tidy(below)
    if waves.trained_length is not None and waves.trained_length < len(values):
        mark_length(above, waves.trained_length, f"trained length {waves.trained_length}")
        below.axvline(waves.trained_length, color="#999999", linewidth=1, linestyle=":", zorder=1)
    figure.legend(loc="outside lower center", frameon=False, ncols=SHOWN, title=waves.name)
    return figure


def chosen(width: int) -> list[int]:
    """Channels from the first to the last quarter, evenly spread."""
    return sorted({index * width // SHOWN for index in range(SHOWN)})
