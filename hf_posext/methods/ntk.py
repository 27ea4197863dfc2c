"""NTK-aware scaling: a larger base, so that the slowest channel is stretched by the factor, the fastest not at all."""

from __future__ import annotations

import torch

from hf_posext.contract import RotaryChange, Spectrum
from hf_posext.methods._wavelengths import Factor, per_channel, rank
from hf_posext.methods.registry import method

ntk = method(
    "ntk",
    aliases=("ntk_aware",),
    summary="raise the base to b s^(d/(d-2)); reaches less than s N untuned",
    paper="bloc97 2023; YaRN, arXiv 2309.00071, eq. 16",
)


@ntk.on("rotary")
def rotary(spectrum: Spectrum, factor: Factor) -> RotaryChange:
    """theta_i s^(-2i/(d-2)): channel 0 is kept, channel d/2 - 1 becomes theta / s exactly.

    The middle channels are stretched by less than s, so quality breaks before s N: ask for
    about 4/3 of the length you need.

    Raises:
        ValueError: d = 2, where the first channel is the last and the exponent is 0 / 0.

    Source: YaRN (arXiv 2309.00071), eq. 16, b' = b s^(d/(d-2)).
    """
    turning = int(torch.count_nonzero(spectrum.inv_freq))
    if turning < 2:
        raise ValueError(f"`ntk` needs at least 4 rotated channels, this model has {2 * turning}. Use `pi`.")
    steps = rank(spectrum) / (turning - 1)
    return RotaryChange(spectrum.inv_freq * per_channel(factor) ** -steps, spectrum.attention_scaling)
