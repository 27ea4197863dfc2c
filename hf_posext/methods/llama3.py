"""Llama 3.1 scaling: NTK-by-parts with a ramp in rotations between 1 and 4 turns."""

from __future__ import annotations

from hf_posext.arguments import check_positive
from hf_posext.contract import RotaryChange, Spectrum
from hf_posext.methods._wavelengths import Factor, blend, rotation_ramp
from hf_posext.methods.registry import method

llama3 = method(
    "llama3",
    summary="interpolate channels of less than one turn within N, keep those of more than four",
    paper="Llama 3.1 model code, 2024; equals YaRN eq. 17 to 20 with alpha 1, beta 4",
)


@llama3.on("rotary")
def rotary(
    spectrum: Spectrum, factor: Factor, *, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0
) -> RotaryChange:
    """theta / s below `low_freq_factor` turns, theta above `high_freq_factor`, linear in the turns between.

    Raises:
        ValueError: high_freq_factor not above low_freq_factor.

    Source: Llama 3.1 model code (2024), `apply_scaling`; equal to `rope_type="llama3"` of transformers.
    """
    low = check_positive("low_freq_factor", low_freq_factor)
    high = check_positive("high_freq_factor", high_freq_factor)
    if high <= low:
        raise ValueError(f"`high_freq_factor` must be above `low_freq_factor`, got {high:g} and {low:g}.")
    return RotaryChange(blend(spectrum, factor, rotation_ramp(spectrum, high, low)), spectrum.attention_scaling)
