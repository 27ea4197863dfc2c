"""The picture of what attention makes of distances: a panel each for rotations, mapped distances and biases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from hf_posext.evaluation.plots import FEW, MARKERS, mark_length, tidy
from hf_posext.evaluation.profiles import BIAS, ROTATION, SEEN, Profile, ProfileReading, profiles_of
from hf_posext.evaluation.standing import AS_GIVEN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_HEADS = 6  # that are drawn, evenly spread over all
LINES = ("-", "--", "-.", ":")
MARKED = 9  # markers on a line
WORDS = {
    ROTATION: "mean cosine over channel pairs",
    SEEN: "distance that is seen (tokens)",
    BIAS: "added to the logit (nats)",
}


def plot_bias_profile(
    model: nn.Module | Sequence[ProfileReading],
    method: str | None = None,
    factor: float | None = None,
    **arguments: Any,
) -> Figure:
    """What attention makes of the distance between query and key, before and after one or more methods.

    A panel for each kind that there is: the mean cosine of a rotation, the distance that is seen where a method maps
    it, and what is added to the logit, with a line for each of up to six heads. It says which were measured, by asking
    attention itself, and which were computed from the numbers in force.

    Args:
        model: a transformers model, which is left as it was; or what `profiles_of` gave, several times for several
            methods on one model.
        method: as for `profiles_of`.
        factor: s.
        arguments: `reach`, and others of `patch_model`.

    Raises:
        TypeError, ValueError, NoSiteError, PatchError: as by `profiles_of`.
    """
    from matplotlib.figure import Figure

    readings = [profiles_of(model, method, factor, **arguments)] if isinstance(model, nn.Module) else list(model)
    if not readings:
        raise ValueError("There is no profile to draw. Give at least one.")
    lines = list(named(readings))
    panels = list(dict.fromkeys((profile.kind, profile.part) for _, profile in lines))
    figure = Figure(figsize=(7.2, 0.8 + 2.8 * len(panels)), layout="constrained")
    names = list(dict.fromkeys(name for name, _ in lines))
    columns = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    ends = [int(profile.distances[end]) for _, profile in lines for end in (0, -1)]
    columns[0].set_xlim(min(ends), max(ends) + 1)  # also where the last keys are not seen
    for axes, panel in zip(columns, panels, strict=True):
        for name, profile in lines:
            if (profile.kind, profile.part) == panel:
                draw_profile(axes, profile, name, names.index(name) if AS_GIVEN in names else names.index(name) + 1)
        how = "measured" if all(p.is_measured for _, p in lines if (p.kind, p.part) == panel) else "computed"
        label_panel(axes, panel[0], ", ".join(filter(None, (panel[1], how))), readings[0].trained_length)
    figure.axes[-1].set_xlabel("distance, query - key (tokens)")
    return figure


def named(readings: Sequence[ProfileReading]) -> Iterator[tuple[str, Profile]]:
    """All profiles with their names, that of the model as it was given once."""
    for profile in readings[0].before:
        yield AS_GIVEN, profile
    for reading in readings:
        for profile in reading.after:
            yield reading.name, profile


def draw_profile(axes: Axes, profile: Profile, name: str, index: int) -> None:
    """A line for each head, or the one for all of them; keys that are not seen have no point."""
    values = np.where(np.isfinite(profile.values.numpy()), profile.values.numpy(), np.nan)
    heads = sorted({round(head) for head in np.linspace(0, len(values) - 1, min(MOST_HEADS, len(values)))})
    is_one = len(values) == 1
    for place, head in enumerate(heads):
        which = index if is_one else place + 1
        every = max(1, values.shape[1] // MARKED)
        axes.plot(
            profile.distances.numpy(),
            values[head],
            label=name if is_one else f"{name}, head {head}",
            color=FEW[(which - 1) % len(FEW)] if which else "#000000",
            linestyle=LINES[(0 if is_one and index else 1) if index == 0 else (index - 1) % len(LINES)],
            linewidth=1.6 if index else 1.2,
            marker=MARKERS[which % len(MARKERS)],
            markersize=4,
            markevery=(which * every // (MOST_HEADS + 1), every),
        )


def label_panel(axes: Axes, kind: str, origin: str, trained_length: int | None) -> None:
    """Axis titles, N as a line, and the legend beside the panel."""
    axes.set_ylabel(f"{WORDS[kind]}\n{origin}")
    if trained_length is not None and trained_length < axes.get_xlim()[1]:
        mark_length(axes, trained_length, f"trained length {trained_length}")
    tidy(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
