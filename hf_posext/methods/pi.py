"""Position interpolation: positions are divided by the factor, so that none exceeds those seen in training."""

from __future__ import annotations

from hf_posext.contract import RotaryChange, Spectrum
from hf_posext.methods._wavelengths import Factor, per_channel
from hf_posext.methods.registry import method

pi = method(
    "pi",
    aliases=("linear",),
    summary="divide every position by the factor",
    paper="Chen et al. 2023, arXiv 2306.15595, eq. 4",
)


@pi.on("rotary")
def rotary(spectrum: Spectrum, factor: Factor) -> RotaryChange:
    """theta / s: position s p turns as p did. Equal to `rope_type="linear"` of transformers.

    Source: Chen et al. 2023 (arXiv 2306.15595), eq. 4.
    """
    return RotaryChange(spectrum.inv_freq / per_channel(factor), spectrum.attention_scaling)
