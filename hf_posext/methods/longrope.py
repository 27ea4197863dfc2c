"""LongRoPE: a rescale factor for each channel, found by search and given as a list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hf_posext.arguments import check_positive
from hf_posext.contract import RotaryChange, Spectrum
from hf_posext.methods._wavelengths import Factor, as_tensor
from hf_posext.methods.registry import method


def has_two_lists(long_factor: Sequence[float], short_factor: Sequence[float] | None = None, **_: Any) -> bool:
    """Whether short text has a list of its own, not the long one again as in configs for one list at every length."""
    return short_factor is not None and list(short_factor) != list(long_factor)


longrope = method(
    "longrope",
    aliases=("su",),
    summary="divide each channel by its own factor; with a second list for short text, switched at N",
    paper="Ding et al. 2024, arXiv 2402.13753, eq. 2",
    follows_length=lambda options: has_two_lists(**options),
)


def default_attention_factor(factor: Factor, trained_length: int) -> Factor:
    """sqrt(1 + ln s / ln N), and 1 for s <= 1.

    Source: Phi-3 model code (2024), `su` scaling; the form that transformers uses.
    """
    scale = (1 + as_tensor(factor).clamp(min=1).log() / math.log(trained_length)).sqrt()
    return float(scale) if isinstance(factor, Real) else scale


@longrope.on("rotary")
def rotary(
    spectrum: Spectrum,
    factor: Factor,
    *,
    limit: float | None = None,
    long_factor: Sequence[float],
    short_factor: Sequence[float] | None = None,
    attention_factor: float | None = None,
) -> RotaryChange:
    """theta_i / long_factor_i; with a short list theta_i / short_factor_i up to N tokens, N included.

    The temperature belongs to the long list: text of at most N tokens has none, so a short list of ones leaves it as it
    is. (transformers has it at every length; the two agree for attention_factor=1.0 and beyond N.)

    Args:
        spectrum: the live spectrum.
        factor: s at the present length.
        limit: s of the patch, which sets the default attention factor; `factor` where None.
        long_factor: F = R / 2 numbers > 0.
        short_factor: F numbers > 0 for text of at most N tokens; None for one list at every length.
        attention_factor: multiplier of cos and sin in place of sqrt(1 + ln s / ln N).

    Raises:
        ValueError: a list of another length, or a value that is not > 0.

    Source: LongRoPE (arXiv 2402.13753), eq. 2; the switch as in Phi-3's model code and transformers.
    """
    channels = spectrum.inv_freq.numel()
    long = spectrum.inv_freq / check_list("long_factor", long_factor, channels)
    if attention_factor is None:
        scale = default_attention_factor(factor if limit is None else limit, spectrum.trained_length)
    else:
        scale = check_positive("attention_factor", attention_factor)
    if short_factor is not None:
        short = spectrum.inv_freq / check_list("short_factor", short_factor, channels)
        if isinstance(factor, Real) and factor <= 1:
            return RotaryChange(short, spectrum.attention_scaling)
    return RotaryChange(long, spectrum.attention_scaling * scale)


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
