"""Pictures beside those of reports: loss by position, spectra, sinusoids, and what attention makes of distances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_posext.evaluation.plots import FEW, MARKERS, bar_of, line_style, mark_length, save_figure, tidy
from hf_posext.evaluation.profile_plot import plot_bias_profile
from hf_posext.evaluation.spectra import SpectrumReading, Wavelengths, spectrum_of
from hf_posext.evaluation.waves_plot import plot_sinusoids

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hf_posext.evaluation.perplexity_report import PerplexityReport

__all__ = ["plot_bias_profile", "plot_position_loss", "plot_sinusoids", "plot_spectrum", "save_figure", "spectrum_of"]

MOST_MARKERS = 16  # on a line
LINES = ("-", "--", "-.", ":")


def plot_position_loss(report: PerplexityReport) -> Figure:
    """Mean NLL of a token against the tokens read before it: one line per arm, bars broken, N as a vertical line.

    Each point is a bucket of positions, of which there are two per doubling, and stands at its geometric middle.

    Args:
        report: of `perplexity` with protocol "full".

    Raises:
        ValueError: another protocol, which keeps no curve.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, StrMethodFormatter

    if not report.curve:
        raise ValueError(
            f"The report has no loss by position, only that of the {report.targets_text}. Measure with "
            'protocol="full", which a causal model is needed for.'
        )
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    methods = [arm for arm in report.arms if bar_of(arm) is None]
    for arm in report.arms:
        own = [bucket for bucket in report.curve if bucket["arm"] == arm]
        places = [math.sqrt(bucket["first"] * bucket["last"]) for bucket in own]
        axes.plot(
            places,
            [bucket["nll"] for bucket in own],
            label=arm,
            linewidth=1.8,
            markersize=5,
            **line_style(arm, methods),
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("context before the token (tokens)")
    axes.set_ylabel("loss (nats per token)")
    if report.trained_length is not None:
        mark_length(axes, report.trained_length, f"trained length {report.trained_length}")
    tidy(axes)
    figure.legend(loc="outside right upper", frameon=False, title="arm")
    return figure


def plot_spectrum(
    model: nn.Module | Sequence[SpectrumReading],
    method: str | None = None,
    factor: float | None = None,
    **arguments: Any,
) -> Figure:
    """Wavelength of each rotary channel pair before and after one or more methods, N and T as horizontal lines.

    One panel for each layer type. Shaded are the pairs that, as the model was given, would meet angles at T that they
    have not met within N; open markers are pairs for which that is so with the method as well.

    Args:
        model: a transformers model, which is left as it was; or what `spectrum_of` gave, several times for several
            methods on one model.
        method: as for `spectrum_of`.
        factor: s.
        arguments: others of `patch_model`.

    Raises:
        TypeError, ValueError, NoSiteError, PatchError: as by `spectrum_of`; spectra of different models.

    Source: YaRN (arXiv 2309.00071), sec. 3.1 and 3.2, for wavelengths and what is beyond training.
    """
    from matplotlib.figure import Figure

    readings = [spectrum_of(model, method, factor, **arguments)] if isinstance(model, nn.Module) else list(model)
    check_alike(readings)
    count = len(readings[0].sites)
    figure = Figure(figsize=(3 + 3.6 * count, 4.8), layout="constrained")
    panels = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for place, axes in enumerate(panels):
        draw_spectrum(axes, readings, place)
    panels[0].set_ylabel("wavelength (tokens)")
    name_lengths(panels[-1], readings)
    handles = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", frameon=False, ncols=2)
    return figure


def check_alike(readings: Sequence[SpectrumReading]) -> None:
    """Spectra of one model.

    Raises:
        ValueError: none, or spectra that begin differently.
    """
    if not readings:
        raise ValueError("There is no spectrum to draw. Give at least one.")
    first = readings[0]
    for other in readings[1:]:
        same = [site.before for site in other.sites] == [site.before for site in first.sites]
        if not same or other.trained_length != first.trained_length:
            raise ValueError(
                f"`{first.name}` and `{other.name}` are of models with other spectra. Draw each model by itself."
            )


def draw_spectrum(axes: Axes, readings: Sequence[SpectrumReading], place: int) -> None:
    """The panel of one site, given by its place among those of a model."""
    first = readings[0].sites[place]
    longest = max(readings, key=lambda reading: reading.target_length)
    shade(axes, longest, first)
    draw_wavelengths(axes, first.before, [False] * len(first.before), "as given", 0)
    for index, reading in enumerate(readings, 1):
        site = reading.sites[place]
        if site.after != site.before:
            draw_wavelengths(axes, site.after, reading.beyond(site), reading.name, index)
    axes.set_yscale("log")
    axes.set_xlabel("channel pair" + (f", {first.label}" if first.label else ""))
    tidy(axes)
    for tokens in lengths_of(readings):
        axes.axhline(tokens, color="#666666", linewidth=1, linestyle=":", zorder=1)


def lengths_of(readings: Sequence[SpectrumReading]) -> dict[int, str]:
    """N and every T in tokens -> the letter."""
    trained = readings[0].trained_length
    lengths = {reading.target_length: "T" for reading in readings}
    return lengths if trained is None else {**lengths, trained: "N"}


def name_lengths(axes: Axes, readings: Sequence[SpectrumReading]) -> None:
    """N and T in words, to the right of their lines."""
    for tokens, letter in lengths_of(readings).items():
        axes.annotate(
            f"{letter} = {tokens}",
            (1.0, tokens),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="top" if letter == "N" else "bottom",  # so that neighbours have room
            fontsize=8,
            color="#666666",
        )


def draw_wavelengths(axes: Axes, wavelengths: Sequence[float], is_open: Sequence[bool], name: str, index: int) -> None:
    """One line; pairs that do not turn have no point."""
    colour = FEW[(index - 1) % len(FEW)] if index else "#000000"
    pairs, every = range(len(wavelengths)), max(1, len(wavelengths) // MOST_MARKERS)
    values = [length if math.isfinite(length) else math.nan for length in wavelengths]
    marker = MARKERS[index % len(MARKERS)]
    axes.plot(
        pairs,
        values,
        label=name,
        color=colour,
        linestyle=LINES[index % len(LINES)],
        linewidth=1.6,
        marker=marker,
        markersize=5,
        markevery=[pair for pair in pairs if pair % every == 0 and not is_open[pair]],
    )
    opened = [pair for pair in pairs if pair % every == 0 and is_open[pair]]
    if opened:
        axes.plot(
            opened,
            [values[pair] for pair in opened],
            marker,
            color=colour,
            markersize=5,
            markerfacecolor="#ffffff",
            label=f"{name}, beyond its trained range",
            zorder=3,
        )


def shade(axes: Axes, reading: SpectrumReading, site: Wavelengths) -> None:
    """Shades the pairs that would be beyond their trained range at T without the method."""
    unchanged = Wavelengths(site.label, site.before, site.before)
    label = f"beyond the trained range at {reading.target_length} as given"
    for pair, is_beyond in enumerate(reading.beyond(unchanged)):
        if is_beyond:
            axes.axvspan(pair - 0.5, pair + 0.5, color="#e4e4e4", linewidth=0, zorder=0, label=label)
            label = ""
