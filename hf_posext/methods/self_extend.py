"""SelfExtend: distances beyond a window are read in groups."""

from __future__ import annotations

import math
from fractions import Fraction

from hf_posext.arguments import check_flag, check_length, check_within
from hf_posext.contract import Remap, Spectrum
from hf_posext.errors import unknown
from hf_posext.methods.registry import method

DYNAMIC = "dynamic"
ROOM = Fraction(2, 3)  # of N; the authors advise 1/2 to 1, and README has what was measured

self_extend = method(
    "self_extend",
    aliases=("selfextend",),
    summary="distances as they are up to a window, beyond it in groups of tokens that share a position",
    paper="Jin et al. 2024, arXiv 2401.01325, sec. 3",
)


@self_extend.on("rotary")
def rotary(
    spectrum: Spectrum,
    factor: float,
    *,
    group_size: int | str | None = None,
    window: int | None = None,
    logn: bool = False,
) -> Remap:
    """A key at least W tokens before its query is met at floor(q / G) + W - floor(W / G) - floor(k / G).

    Args:
        spectrum: the live spectrum.
        factor: s = T / N.
        group_size: G in tokens; "dynamic" for the smallest with which the text up to each query fits into N, which
            leaves text of at most N tokens as it is; if None the smallest with which T tokens fit into 2 N / 3, since
            models read their last trained distances worse.
        window: W in tokens, less than N; N / 4 if None.
        logn: multiply logits by max(1, ln(p + 1) / ln N) at query p.

    Raises:
        TypeError, ValueError: a bad value, or a window that leaves no room for groups.

    Source: SelfExtend (arXiv 2401.01325), sec. 3, eq. 3 and 4.
    """
    length = spectrum.trained_length
    near = near_window(spectrum, factor, window, 4)
    if group_size is not None and group_size != DYNAMIC:
        if isinstance(group_size, str):
            raise ValueError(unknown("value of `group_size`:", group_size, [DYNAMIC, "a whole number"]))
        if check_length("group_size", group_size) == 1:
            raise ValueError("`group_size` must be at least 2 tokens, got 1, which leaves every distance as it is.")
        return Remap(near, int(group_size), 0.0, length, logn=check_flag("logn", logn))
    room = length if group_size == DYNAMIC else ROOM * length
    if near >= room:
        raise ValueError(
            f"`window` must be less than {float(room):g} tokens for a group size to follow from it, got {near}. Lower "
            "it, or give `group_size`."
        )
    group = group_for(length * factor, near, room)
    return Remap(near, group, 0.0, length, group_size == DYNAMIC, check_flag("logn", logn))


def group_for(tokens: float, window: int, room: Fraction | int) -> int:
    """The smallest G with which so many tokens stand within some room: window + (tokens - window) / G <= room.

    Source: SelfExtend (arXiv 2401.01325), sec. 3: with N as room the longest text is (N - W) G + W.
    """
    return max(1, math.ceil(Fraction(tokens - window) / (room - window)))


def near_window(spectrum: Spectrum, factor: float, window: object, share: int) -> int:
    """The window that was given, else N / share, in tokens.

    Raises:
        TypeError, ValueError: not a whole number of tokens, or no distance in the text is as long.
    """
    length = spectrum.trained_length
    near = max(1, length // share) if window is None else check_length("window", window)
    return check_within("window", near, length, factor)
