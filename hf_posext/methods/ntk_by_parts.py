"""NTK-by-parts: fast channels are kept, slow ones interpolated, with a ramp between; YaRN without the temperature."""

from __future__ import annotations

from torch import Tensor

from hf_posext.arguments import check_choice, check_positive
from hf_posext.contract import RotaryChange, Spectrum
from hf_posext.methods._wavelengths import Factor, blend, index_ramp, rotation_ramp
from hf_posext.methods.registry import method

RAMPS = ("index", "rotations")
AUTO_WAVELENGTH = 32.0  # tokens; channels up to this wavelength are kept by beta_fast="auto"

ntk_by_parts = method(
    "ntk_by_parts",
    summary="keep fast channels, interpolate slow ones, one ramp between, no temperature",
    paper="YaRN, arXiv 2309.00071, eq. 17 to 20",
)


def ramp_weights(spectrum: Spectrum, beta_fast: float | str, beta_slow: float, truncate: bool, ramp: str) -> Tensor:
    """gamma of NTK-by-parts and YaRN from their options, [F] in [0, 1].

    Args:
        spectrum: the live spectrum.
        beta_fast: turns within N from which a channel is kept, or "auto" for a wavelength of 32 tokens (N / 32 turns).
        beta_slow: turns within N up to which a channel is interpolated.
        truncate: round the ends of the index ramp outwards to whole channels.
        ramp: "index" (published code) or "rotations" (the paper as printed).

    Raises:
        TypeError, ValueError: a value outside of these, or beta_fast not above beta_slow.
    """
    check_choice("ramp", ramp, RAMPS)
    if not isinstance(truncate, bool):
        raise TypeError(f"`truncate` must be True or False, got {truncate!r}.")
    if isinstance(beta_fast, str):
        check_choice("beta_fast", beta_fast, ("auto",))
        beta_fast = spectrum.trained_length / AUTO_WAVELENGTH
    fast, slow = check_positive("beta_fast", beta_fast), check_positive("beta_slow", beta_slow)
    if fast <= slow:
        raise ValueError(f"`beta_fast` must be above `beta_slow`, got {fast:g} and {slow:g}. Published: 32 and 1.")
    return rotation_ramp(spectrum, fast, slow) if ramp == "rotations" else index_ramp(spectrum, fast, slow, truncate)


@ntk_by_parts.on("rotary")
def rotary(
    spectrum: Spectrum,
    factor: Factor,
    *,
    beta_fast: float | str = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    ramp: str = "index",
) -> RotaryChange:
    """(1 - gamma) theta / s + gamma theta with one ramp, as in the paper (the first repository had two).

    Source: YaRN (arXiv 2309.00071), eq. 17 to 20.
    """
    gamma = ramp_weights(spectrum, beta_fast, beta_slow, truncate, ramp)
    return RotaryChange(blend(spectrum, factor, gamma), spectrum.attention_scaling)
