"""Arithmetic on wavelengths that several methods share. All tensors are float64; F is the number of frequencies."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hf_posext.contract import Spectrum

Factor = float | Tensor


def as_tensor(factor: Any) -> Tensor:
    """A factor as a float64 tensor, [] or [B].

    Dynamic scaling traces methods with a symbol for the factor, so they may not ask whether it is a tensor.
    """
    return torch.tensor(float(factor), dtype=torch.float64) if isinstance(factor, Real) else factor.double()


def per_channel(factor: Factor) -> Tensor:
    """A factor, or [B] factors, as a float64 tensor that broadcasts over [F]: shape [1] or [B, 1]."""
    return as_tensor(factor).unsqueeze(-1)


def rank(spectrum: Spectrum) -> Tensor:
    """Place of each channel from the fastest to the slowest, [F] float64; modules need not keep them in this order."""
    return spectrum.inv_freq.argsort(descending=True, stable=True).argsort().double()


def rotations(spectrum: Spectrum) -> Tensor:
    """Full turns that each channel makes within the trained length: r = N theta / 2 pi, [F].

    Source: YaRN (arXiv 2309.00071), eq. 17.
    """
    return spectrum.trained_length * spectrum.inv_freq / (2 * math.pi)


def crossing(spectrum: Spectrum, turns: float) -> float:
    """The (fractional) channel index at which a channel makes `turns` turns within N.

    Log-linear interpolation on the live frequencies, extended past both ends with the slope found there. On a geometric
    spectrum this is the published d ln(N / (2 pi turns)) / (2 ln b); on any other it is what that formula means.
    Channels that do not rotate (frequency 0) have no wavelength and are left out.
    """
    live = spectrum.inv_freq[spectrum.inv_freq > 0]
    if live.numel() < 2:
        raise ValueError(f"A ramp needs at least two rotating channels, this spectrum has {live.numel()}. Use `pi`.")
    heights = live.log().sort().values
    height = math.log(2 * math.pi * turns / spectrum.trained_length)
    above = int(torch.searchsorted(heights, height).clamp(1, live.numel() - 1))
    low, high = float(heights[above - 1]), float(heights[above])
    return live.numel() - 1 - (above - 1 + (height - low) / (high - low))


def index_ramp(spectrum: Spectrum, beta_fast: float, beta_slow: float, truncate: bool) -> Tensor:
    """gamma, [F]: 1 where a channel is kept, 0 where it is interpolated, linear in the channel index between.

    Source: YaRN eq. 18 in the form of its published code and checkpoints (linear in ln r, bounds rounded outwards when
    `truncate`, clamped to [0, d - 1]), which is also what transformers computes.
    """
    low, high = crossing(spectrum, beta_fast), crossing(spectrum, beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    bounds = max(low, 0), min(high, spectrum.rotated_width - 1)
    if bounds[0] <= bounds[1]:  # else the whole ramp lies beside the spectrum, and clamping would turn it round
        low, high = bounds
    if low == high:
        high += 0.001  # as published: a ramp of no width becomes a step
    return 1 - ((rank(spectrum) - low) / (high - low)).clamp(0, 1)


def rotation_ramp(spectrum: Spectrum, beta_fast: float, beta_slow: float) -> Tensor:
    """gamma, [F], linear in the number of rotations: (r - beta_slow) / (beta_fast - beta_slow), clamped to [0, 1].

    Source: YaRN eq. 18 as printed; Llama 3.1 uses it with 4 and 1.
    """
    return ((rotations(spectrum) - beta_slow) / (beta_fast - beta_slow)).clamp(0, 1)


def blend(spectrum: Spectrum, factor: Factor, gamma: Tensor) -> Tensor:
    """(1 - gamma) theta / s + gamma theta, [F] or [B, F].

    Source: YaRN eq. 19 and 20 (NTK-by-parts).
    """
    theta = spectrum.inv_freq
    return (1 - gamma) * theta / per_channel(factor) + gamma * theta
