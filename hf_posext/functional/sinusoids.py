"""Fixed tables of sines and cosines."""

from __future__ import annotations

from decimal import Context, Decimal
from functools import cache

import torch
from torch import Tensor

from hf_posext.arguments import check_choice, check_positive
from hf_posext.functional._checks import as_positions, check_whole

DIGITS = Context(prec=40)  # of a frequency, before it becomes the sum of two floating-point numbers


def sinusoidal_table(
    positions: int | Tensor,
    width: int,
    *,
    base: float = 10_000.0,
    layout: str = "interleaved",
    spacing: str = "paper",
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Rows of sin(p omega_i) and cos(p omega_i), right to about 1e-15 for p up to 1e6 and beyond.

    Args:
        positions: a count n for 0, ..., n - 1, or [P] whole or fractional positions p; p / s interpolates.
        width: W >= 1.
        base: b > 0.
        layout: "interleaved" for sin, cos, sin, cos, ... (XLM), "halves" for all sines and then all cosines (Marian).
        spacing: "paper" for omega_i = b^(-2i/W), where an odd width has one sine more than cosines; "tensor2tensor" for
            omega_i = b^(-i/(F-1)), F = W // 2 (fairseq, M2M100, XGLM), where it has a zero channel at the end.
        dtype: floating dtype of the result.

    Returns:
        [P, W] on the device of the positions; on the CPU for a count.

    Raises:
        TypeError, ValueError: a bad value.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), sec. 3.5; the published code of tensor2tensor.
    """
    width, base, places = check_whole("width", width), check_positive("base", base), as_positions(positions)
    check_choice("layout", layout, ("interleaved", "halves"))
    if places.dim() != 1:
        raise ValueError(f"`positions` must be a count or have the shape [P], got {list(places.shape)}. Flatten them.")
    if not dtype.is_floating_point:
        raise ValueError(f"`dtype` must be a floating dtype, got {dtype}. Take torch.float32.")
    half = width // 2
    sines, steps = width - half, Decimal(width) / 2
    if check_choice("spacing", spacing, ("paper", "tensor2tensor")) == "tensor2tensor":
        sines, steps = half, Decimal(half - 1)
    if steps <= 0:
        raise ValueError(f'`width` must be at least 4 with spacing="tensor2tensor", got {width}. Use spacing="paper".')
    sine, cosine = waves(places, base, sines, steps)
    rows = sine.new_zeros(len(places), width)
    if layout == "interleaved":
        rows[:, 0 : 2 * sines : 2], rows[:, 1 : 2 * half : 2] = sine, cosine[:, :half]
    else:
        rows[:, :sines], rows[:, sines : sines + half] = sine, cosine[:, :half]
    return rows.to(dtype).to(places.device)


def waves(positions: Tensor, base: float, count: int, steps: Decimal) -> tuple[Tensor, Tensor]:
    """sin and cos of p b^(-i / steps) for i < count, two tensors [P, count] float64 on the CPU.

    One float64 number for p omega would be off by 1e-16 of it, 1e-10 radians at a million tokens. So both p and omega
    are a float32 number plus a small rest: the product of the first two (24 + 24 bits) is exact in float64, and
    sin(a + b) = sin a cos b + cos a sin b adds what is left of the angle.
    """
    high, low = frequencies(base, count, steps)
    places = positions.cpu().double()[:, None]
    coarse = places.float().double()
    large, small = coarse * high, (places - coarse) * high + places * low
    sine = large.sin() * small.cos() + large.cos() * small.sin()
    cosine = large.cos() * small.cos() - large.sin() * small.sin()
    return sine, cosine


@cache
def frequencies(base: float, count: int, steps: Decimal) -> tuple[Tensor, Tensor]:
    """b^(-i / steps) for i < count as the sum of a float32 number and a rest, two tensors [count] float64."""
    exact = [DIGITS.power(Decimal(base), DIGITS.divide(Decimal(-i), steps)) for i in range(count)]
    high = torch.tensor([float(omega) for omega in exact], dtype=torch.float64, device="cpu").float().double()
    rests = [float(DIGITS.subtract(omega, Decimal(near))) for omega, near in zip(exact, high.tolist(), strict=True)]
    return high, torch.tensor(rests, dtype=torch.float64, device="cpu")
