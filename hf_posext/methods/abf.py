"""Adjusted base frequency: a new `rope_theta`."""

from __future__ import annotations

from hf_posext.arguments import check_positive
from hf_posext.contract import RotaryChange, Spectrum
from hf_posext.methods._wavelengths import Factor, rank
from hf_posext.methods.registry import method

abf = method(
    "abf",
    aliases=("rope_theta",),
    summary="replace the base by `rope_theta`; the factor only says what length is meant",
    paper="Xiong et al. 2023, arXiv 2309.16039, sec. 4.1",
)


@abf.on("rotary")
def rotary(spectrum: Spectrum, factor: Factor, *, rope_theta: float) -> RotaryChange:
    """theta_i (b / b')^(2i/d): what the checkpoint would have with `rope_theta` b' in place of its base b.

    Scaling that the checkpoint already has stays, since the live frequencies are changed and not rebuilt.

    Raises:
        ValueError: `rope_theta` is not a finite number > 0.

    Source: Xiong et al. 2023 (arXiv 2309.16039), sec. 4.1.
    """
    ratio = spectrum.base / check_positive("rope_theta", rope_theta)
    steps = rank(spectrum) / spectrum.inv_freq.numel()
    return RotaryChange(spectrum.inv_freq * ratio**steps, spectrum.attention_scaling)
