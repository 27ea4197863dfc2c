"""ReRoPE: distances beyond a window are clipped, or grow more slowly (leaky)."""

from __future__ import annotations

from numbers import Real

from hf_posext.arguments import check_flag
from hf_posext.contract import Remap, Spectrum
from hf_posext.methods.registry import method
from hf_posext.methods.self_extend import ROOM, near_window

rerope = method(
    "rerope",
    summary="distances as they are up to a window, and the window itself beyond it",
    paper="Su 2023, kexue.fm/archives/9708 (Rectified RoPE)",
)
leaky_rerope = method(
    "leaky_rerope",
    summary="distances as they are up to a window, and growing more slowly beyond it",
    paper="Su 2023, kexue.fm/archives/9708 (Leaky ReRoPE)",
)


@rerope.on("rotary")
def clipped(spectrum: Spectrum, factor: float, *, window: int | None = None, logn: bool = False) -> Remap:
    """Distance min(d, W), whatever the length of the text.

    Args:
        spectrum: the live spectrum.
        factor: s, which only says how long the text will be.
        window: W in tokens; N / 2 if None.
        logn: multiply logits by max(1, ln(p + 1) / ln N) at query p.

    Raises:
        TypeError, ValueError: a bad value.

    Source: Su 2023, kexue.fm/archives/9708.
    """
    near = near_window(spectrum, factor, window, 2)
    return Remap(near, 0, 0.0, spectrum.trained_length, logn=check_flag("logn", logn))


@leaky_rerope.on("rotary")
def slowed(
    spectrum: Spectrum,
    factor: float,
    *,
    window: int | None = None,
    slope: float | None = None,
    logn: bool = False,
) -> Remap:
    """Distance W + slope (d - W) beyond W, where slope is 1 / k of the source.

    Args:
        spectrum: the live spectrum.
        factor: s = T / N.
        window: W in tokens; N / 2 if None.
        slope: 0 (`rerope`) or more, below 1 (no change); if None that with which T tokens fit into 2 N / 3.
        logn: multiply logits by max(1, ln(p + 1) / ln N) at query p.

    Raises:
        TypeError, ValueError: a bad value, or a window from which no slope follows.

    Source: Su 2023, kexue.fm/archives/9708.
    """
    length = spectrum.trained_length
    near = near_window(spectrum, factor, window, 2)
    return Remap(near, 0, slope_for(slope, near, length, factor), length, logn=check_flag("logn", logn))


def slope_for(slope: object, window: int, trained_length: int, factor: float) -> float:
    """The slope that was given, or (2 N / 3 - W) / (T - W).

    Raises:
        TypeError, ValueError: not a number from 0 to 1, or a window that leaves no room.
    """
    if slope is None:
        room = float(ROOM * trained_length)
        if window >= room:
            raise ValueError(
                f"`window` must be less than {room:g} tokens for a slope to follow from it, got {window}. Lower it, or "
                "give `slope`."
            )
        return (room - window) / (trained_length * factor - window)
    if isinstance(slope, bool) or not isinstance(slope, Real):
        raise TypeError(f"`slope` must be a number from 0 to 1, got {slope!r} of type {type(slope).__name__}.")
    if not 0 <= float(slope) < 1:
        raise ValueError(f"`slope` must be a number >= 0 and below 1 (1 / k of the source), got {slope!r}.")
    return float(slope)
