"""Figures for pages with a dark background: every colour of a finished figure is replaced, whoever drew it."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

BACKGROUND, TEXT = 0.08, 0.92  # grey values of what was white and what was black
CONTRAST = 4.5  # of lines to the background at least, as WCAG 2.2 asks of text
TINT = 0.05  # difference between the channels below which a colour is a grey
COLOURED: dict[str, tuple[str, ...]] = {
    "Text": ("color",),
    "Line2D": ("color", "markerfacecolor", "markeredgecolor"),
    "Patch": ("facecolor", "edgecolor"),
    "Collection": ("facecolor", "edgecolor"),
}
"""Class of what is drawn -> its properties that are colours."""


def darkened(figure: Figure) -> Figure:
    """A copy of a figure in colours for a dark background; what shows data by a colour map stays as it is.

    Black on white becomes light grey on nearly black, and other colours keep their hue and become light enough.
    """
    copy: Figure = pickle.loads(pickle.dumps(figure))  # the way that matplotlib documents for copying a figure
    copy.draw_without_rendering()  # ticks and their numbers are there only then
    for artist in copy.findobj(_has_plain_colours):
        names = [name for kind in type(artist).__mro__ for name in COLOURED.get(kind.__name__, ())]
        colours = {name: getattr(artist, f"get_{name}")() for name in names}  # all before one of them follows another
        for name, colour in colours.items():
            _replace(artist, name, colour)
    return copy


def light_on_dark(colour: tuple[float, ...]) -> tuple[float, ...]:
    """The colour, (R, G, B, opacity) from 0 to 1, that on a dark background does what this one does on white."""
    channels, opacity = np.array(colour[:3]), colour[3]
    if channels.max() - channels.min() < TINT:
        return (*(TEXT - channels * (TEXT - BACKGROUND)), opacity)
    shares = np.linspace(0, 1, 101)
    whitened = next(mixed for mixed in (channels + share * (1 - channels) for share in shares) if _is_light(mixed))
    return (*whitened, opacity)


def _is_light(channels: np.ndarray) -> bool:
    """Whether a colour stands out from the background.

    Source: WCAG 2.2, contrast ratio.
    """
    return bool((_luminance(channels) + 0.05) / (_luminance(np.full(3, BACKGROUND)) + 0.05) >= CONTRAST)


def _luminance(channels: np.ndarray) -> float:
    """Relative luminance of sRGB channels.

    Source: WCAG 2.2, relative luminance.
    """
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def _has_plain_colours(artist: Artist) -> bool:
    """Whether the colours are no data: not those of a colour map, nor of a number that stands on one."""
    from matplotlib.axes import Axes

    if getattr(artist, "get_array", lambda: None)() is not None:
        return False
    axes: Any = artist.axes  # of a figure, all of its axes
    stands_on_data = isinstance(axes, Axes) and bool(axes.images)
    return not stands_on_data or not artist.get_transform().contains_branch(axes.transData)


def _replace(artist: Artist, name: str, present: Any) -> None:
    """Gives an artist another colour, or other ones, in place of what it has; one that is not seen stays."""
    from matplotlib.colors import to_rgba_array

    colours = [tuple(each) for each in to_rgba_array(present)]
    if any(colour[3] for colour in colours):
        changed = [light_on_dark(colour) for colour in colours]
        getattr(artist, f"set_{name}")(changed if len(changed) > 1 else changed[0])
