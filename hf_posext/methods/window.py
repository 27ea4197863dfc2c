"""Sliding-window attention: the honest bar for every extension, since it reads text of any length by forgetting it."""

from __future__ import annotations

from numbers import Integral

from hf_posext.arguments import check_length, check_within
from hf_posext.contract import Host, Window
from hf_posext.methods.registry import method

window = method(
    "window",
    aliases=("sliding_window",),
    summary="each token sees only the last `width` tokens, and the first `sinks` if wanted",
    paper="Beltagy et al. 2020, arXiv 2004.05150; sinks: Xiao et al. 2023, arXiv 2309.17453",
)


@window.on("attention")
def attention(host: Host, factor: float, *, width: int | None = None, sinks: int = 0) -> Window:
    """Keys at a distance of `width` or more are masked; positions stay as they are.

    Args:
        host: the model's attention.
        factor: s, which only says how long the text will be.
        width: tokens that a query sees, itself included (in bidirectional attention: on either side); N if None.
        sinks: first tokens of a text that every query sees, at the distance that they have.

    Raises:
        TypeError, ValueError: not whole numbers, or out of range.

    Source: Longformer (arXiv 2004.05150), sec. 3.1; attention sinks (arXiv 2309.17453), without its new positions.
    """
    if isinstance(sinks, bool) or not isinstance(sinks, Integral):
        raise TypeError(f"`sinks` must be a whole number of tokens, got {sinks!r} of type {type(sinks).__name__}.")
    if sinks < 0:
        raise ValueError(f"`sinks` must be 0 or more tokens, got {sinks!r}.")
    tokens = host.trained_length if width is None else check_length("width", width)
    return Window(check_within("width", tokens, host.trained_length, factor), int(sinks))
