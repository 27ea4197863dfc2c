"""Rotation of queries and keys that already carry one, at the cost of about one copy."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posext.attention.layout import Layout

CHUNK = 1 << 18  # numbers turned at once on a CPU: a megabyte of float32 stays in the core's own cache


def table(positions: Tensor, difference: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency.

    Args:
        positions: [A, B or 1, S] of any number type.
        difference: [B or 1, S or 1, F], radians per token; angles are computed in its dtype.
        layout: which frequency and which axis each of P pairs takes.

    Returns:
        Two tensors [B or 1, 1, S, P] float32.
    """
    if layout.frequencies is not None:
        difference = difference.index_select(-1, layout.frequencies.to(difference.device))
    if layout.axes is None or len(positions) == 1:
        places = positions[0, :, :, None]
    else:
        places = positions[layout.axes].permute(1, 2, 0)
    angles = places.to(difference.dtype) * difference
    return angles.cos().float()[:, None], angles.sin().float()[:, None]


def turn(states: Tensor, cosine: Tensor, sine: Tensor, layout: Layout, out: Tensor | None = None) -> Tensor:
    """Each pair (x, y) becomes (x cos - y sin, y cos + x sin), computed in float32 and rounded once.

    Args:
        states: [B, H, L, D], any floating dtype.
        cosine: [B or 1, 1, L, P] float32, times any amplitude.
        sine: the same shape.
        layout: where the P pairs are.
        out: a tensor like `states` whose memory may be used; only where no gradient is wanted.

    Returns:
        [B, H, L, D] of the dtype of `states`. Angle 0 with amplitude 1 gives every value back to the last bit.
    """
    if out is None or not isinstance(layout.first, slice) or not isinstance(layout.second, slice):
        return turned(states, cosine, sine, layout)
    heads = max(1, CHUNK // max(1, states[:, 0].numel())) if states.device.type == "cpu" else states.shape[1]
    room = None if states.dtype == torch.float32 else torch.empty_like(states[:, :heads], dtype=torch.float32)
    for begin in range(0, states.shape[1], heads):
        part, place = states[:, begin : begin + heads], out[:, begin : begin + heads]
        if room is None:
            turn_into(place, part, cosine, sine, layout)
        else:
            result = room[:, : part.shape[1]]
            turn_into(result, part.float(), cosine, sine, layout)
            place.copy_(result)
    return out


def turned(states: Tensor, cosine: Tensor, sine: Tensor, layout: Layout) -> Tensor:
    """`turn` as a differentiable expression."""
    exact = states.float()
    x, y = exact[..., layout.first], exact[..., layout.second]
    result = exact.clone()
    result[..., layout.first] = x * cosine - y * sine
    result[..., layout.second] = y * cosine + x * sine
    return result.to(states.dtype)


def turn_into(out: Tensor, states: Tensor, cosine: Tensor, sine: Tensor, layout: Layout) -> None:
    """`turn` of float32 states into memory that is there already."""
    if layout.rotated < layout.width:
        out.copy_(states)
    x, y = states[..., layout.first], states[..., layout.second]
    first, second = out[..., layout.first], out[..., layout.second]
    torch.mul(x, cosine, out=first)
    first.addcmul_(y, sine, value=-1)
    torch.mul(y, cosine, out=second)
    second.addcmul_(x, sine)
