"""Rotary position embedding: angles, and the rotation of queries and keys by them."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posext.arguments import check_choice, check_positive
from hf_posext.functional._checks import EXACT, as_positions, check_precision, check_whole


def rotary_angles(
    positions: int | Tensor,
    width: int,
    *,
    base: float = 10_000.0,
    inv_freq: Tensor | None = None,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """p theta_i / s in radians, with theta_i = b^(-2i/R).

    Positions on the CPU are multiplied in float64 and rounded once; those on another device in `dtype`, so that none
    has to be fetched. float32 is right to 6e-8 of the angle, 0.004 radians at 65,536 tokens; float64 is there for more.

    Args:
        positions: a count n for 0, ..., n - 1, or [...] whole or fractional positions p, not in half precision.
        width: R = 2F, channels of a head that rotate.
        base: b > 0, not used where `inv_freq` is given.
        inv_freq: [F] frequencies theta to use instead, radians per token.
        factor: s > 0, by which positions are divided (position interpolation).
        dtype: float32 or float64.

    Returns:
        [..., F] on the device of the positions; on the CPU for a count.

    Raises:
        TypeError, ValueError: a bad value.

    Source: RoFormer (arXiv 2104.09864), eq. 15; Position Interpolation (arXiv 2306.15595), eq. 4.
    """
    width, base, scale = check_whole("width", width), check_positive("base", base), check_positive("factor", factor)
    if width % 2:
        raise ValueError(f"`width` must be even, as channels rotate in pairs, got {width}. Leave one channel out.")
    if dtype not in EXACT:
        raise ValueError(f"`dtype` must be torch.float32 or torch.float64, got {dtype}. Round cos and sin instead.")
    if inv_freq is None:
        theta = base ** (torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / -width)
    elif check_precision("inv_freq", inv_freq).shape == (width // 2,):
        theta = widened(inv_freq, dtype)
    else:
        raise ValueError(
            f"`inv_freq` must have the shape [{width // 2}] for a `width` of {width}, got {list(inv_freq.shape)}. "
            "`width` counts the channels that rotate, two for each frequency."
        )
    places = widened(as_positions(positions), dtype)
    return (places[..., None] * (theta / scale).to(places.dtype).to(places.device)).to(dtype)


def widened(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers in float64 on the CPU, and in `dtype` where a device may have none."""
    return values.to(torch.float64 if values.device.type == "cpu" else dtype)


def apply_rotary(states: Tensor, angles: Tensor, *, layout: str = "halves", scaling: float = 1.0) -> Tensor:
    """Queries or keys turned by their angles: each pair (x, y) becomes a (x cos - y sin, y cos + x sin).

    Args:
        states: [..., L, D], any floating dtype.
        angles: [..., L, F] with 2F <= D that broadcast to the states; for states [B, H, L, D] and positions of each row
            of a batch [B, 1, L, F]. Channels from 2F on pass through.
        layout: pairs are channels (i, i + F) for "halves" (Llama, GPT-NeoX), (2i, 2i + 1) for "interleaved" (GPT-J).
        scaling: a > 0, the attention factor of YaRN and LongRoPE.

    Returns:
        A new tensor like `states`, computed in float32 or better and rounded once.

    Raises:
        TypeError, ValueError: a bad value.

    Source: RoFormer (arXiv 2104.09864), eq. 34; YaRN (arXiv 2309.00071), sec. 3.4, for the scaling.
    """
    check_choice("layout", layout, ("halves", "interleaved"))
    check_fit(states, check_precision("angles", angles))
    working = torch.promote_types(states.dtype, torch.float32)
    angles = angles.to(torch.promote_types(working, angles.dtype))
    scale = check_positive("scaling", scaling)
    cosine, sine = (angles.cos() * scale).to(working), (angles.sin() * scale).to(working)
    width = 2 * angles.shape[-1]
    turning = states[..., :width].to(working)
    if layout == "halves":
        x, y = turning.chunk(2, dim=-1)
        turned = torch.cat((x * cosine - y * sine, y * cosine + x * sine), dim=-1)
    else:
        x, y = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack((x * cosine - y * sine, y * cosine + x * sine), dim=-1).flatten(-2)
    return torch.cat((turned.to(states.dtype), states[..., width:]), dim=-1)


def check_fit(states: Tensor, angles: Tensor) -> None:
    """Angles [..., L, F] that broadcast to states [..., L, D], 2F <= D.

    Raises:
        TypeError: states that are no floating tensor.
        ValueError: other shapes, and angles of a batch that broadcasting would take for those of heads.
    """
    if not isinstance(states, Tensor) or not states.is_floating_point():
        given = states.dtype if isinstance(states, Tensor) else type(states).__name__
        raise TypeError(f"`states` must be a floating tensor, got {given}. Give the queries or the keys.")
    have, want = list(angles.shape), list(states.shape)
    missing = len(want) - len(have)
    if min(len(have), len(want)) < 2 or 2 * have[-1] > want[-1]:
        raise ValueError(
            f"`angles` must have the shape [..., L, F] with 2F <= D for `states` [..., L, D], got {have} for {want}. "
            "Give F = D / 2 frequencies, or fewer for partial rotation."
        )
    fits = missing >= 0 and all(size in (1, other) for size, other in zip(have[:-1], want[missing:-1], strict=True))
    if not fits or (missing and any(size > 1 for size in have[:-2])):
        raise ValueError(
            f"`angles` of the shape {have} do not fit `states` of the shape {want}. Give every dimension, of size 1 "
            "where angles are shared: `angles[:, None]` for all heads of a row."
        )
