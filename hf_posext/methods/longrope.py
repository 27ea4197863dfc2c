"""LongRoPE: a rescale factor for each channel, found by search and given as a list."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_posext.arguments import check_positive
from hf_posext.contract import RotaryChange, Spectrum
from hf_posext.methods._wavelengths import Factor
from hf_posext.methods.registry import method

longrope = method(
    "longrope",
    aliases=("su",),
    summary="divide each channel by its own factor from a given list",
    paper="Ding et al. 2024, arXiv 2402.13753, eq. 2",
)


def default_attention_factor(factor: Factor, trained_length: int) -> Factor:
    """sqrt(1 + ln s / ln N), and 1 for s <= 1.

    Source: Phi-3 model code (2024), `su` scaling; the form that transformers uses.
    """
    scale = (1 + torch.as_tensor(factor, dtype=torch.float64).clamp(min=1).log() / math.log(trained_length)).sqrt()
    return scale if isinstance(factor, Tensor) else float(scale)


@longrope.on("rotary")
def rotary(
    spectrum: Spectrum,
    factor: Factor,
    *,
    long_factor: Sequence[float],
    short_factor: Sequence[float] | None = None,
    attention_factor: float | None = None,
) -> RotaryChange:
    """theta_i / long_factor_i at every length.

    Args:
        spectrum: the live spectrum.
        factor: s; it sets the length fields and the default attention factor.
        long_factor: F = R / 2 numbers > 0.
        short_factor: only the same list again, as in a config whose two lists are equal.
        attention_factor: multiplier of cos and sin in place of sqrt(1 + ln s / ln N).

    Raises:
        ValueError: a list of another length, a value that is not > 0, or a short list that differs from the long one.

    Source: LongRoPE (arXiv 2402.13753), eq. 2.
    """
    ratios = check_list("long_factor", long_factor, spectrum.inv_freq.numel())
    if short_factor is not None and not torch.equal(check_list("short_factor", short_factor, len(ratios)), ratios):
        raise ValueError("`short_factor` must equal `long_factor`: this method uses one list at every length.")
    if attention_factor is None:
        scale = default_attention_factor(factor, spectrum.trained_length)
    else:
        scale = check_positive("attention_factor", attention_factor)
    return RotaryChange(spectrum.inv_freq / ratios, spectrum.attention_scaling * scale)


def check_list(name: str, values: Sequence[float], length: int) -> Tensor:
    """A factor list as [F] float64.

    Raises:
        ValueError: wrong length (the message gives F = R / 2) or a value that is not a finite number > 0.
    """
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise TypeError(f"`{name}` must be a list of {length} numbers > 0, got {values!r}.")
    if len(values) != length:
        raise ValueError(
            f"`{name}` must have {length} values, half of the {2 * length} channels that rotate, got {len(values)}."
        )
    return torch.tensor([check_positive(name, value) for value in values], dtype=torch.float64)
