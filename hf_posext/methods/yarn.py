"""YaRN: NTK-by-parts and a temperature on the attention logits."""

from __future__ import annotations

from numbers import Real

from hf_posext.arguments import check_choice, check_positive
from hf_posext.contract import RotaryChange, Spectrum
from hf_posext.methods._wavelengths import Factor, as_tensor, blend
from hf_posext.methods.ntk_by_parts import ramp_weights
from hf_posext.methods.registry import method

TEMPERATURES = ("cos_sin", "logits")

yarn = method(
    "yarn",
    summary="NTK-by-parts and a softmax temperature of (0.1 ln s + 1)^2",
    paper="Peng et al. 2023, arXiv 2309.00071, eq. 17 to 22",
)


def default_attention_factor(factor: Factor) -> Factor:
    """0.1 ln s + 1, and 1 for s <= 1.

    Source: YaRN (arXiv 2309.00071), eq. 22: sqrt(1/t).
    """
    scale = 0.1 * as_tensor(factor).clamp(min=1).log() + 1
    return float(scale) if isinstance(factor, Real) else scale


@yarn.on("rotary")
def rotary(
    spectrum: Spectrum,
    factor: Factor,
    *,
    beta_fast: float | str = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    ramp: str = "index",
    attention_factor: float | None = None,
    temperature: str = "cos_sin",
) -> RotaryChange:
    """Frequencies of NTK-by-parts; q and k are each scaled by `attention_factor`, so the logit by its square.

    `temperature="cos_sin"` scales cos and sin, as transformers and all published checkpoints do: on partial-rotary
    models it misses the channels that do not rotate. `"logits"` scales the whole logit, as the paper's eq. 21 says.

    Args:
        spectrum: the live spectrum.
        factor: s, a number or [B].
        beta_fast: turns within N from which a channel is kept, or "auto" (N / 32, a wavelength of 32 tokens).
        beta_slow: turns within N up to which a channel is interpolated.
        truncate: round the ends of the index ramp outwards.
        ramp: "index" (published code) or "rotations" (the paper as printed).
        attention_factor: sqrt(1/t) in place of 0.1 ln s + 1; 1.0 for none.
        temperature: where it acts, "cos_sin" or "logits".

    Source: YaRN (arXiv 2309.00071), eq. 17 to 22; the index ramp as in its code.
    """
    check_choice("temperature", temperature, TEMPERATURES)
    if attention_factor is None:
        scale = default_attention_factor(factor)
    else:
        scale = check_positive("attention_factor", attention_factor)
    inv_freq = blend(spectrum, factor, ramp_weights(spectrum, beta_fast, beta_slow, truncate, ramp))
    if temperature == "logits":
        return RotaryChange(inv_freq, spectrum.attention_scaling, scale * scale)
    return RotaryChange(inv_freq, spectrum.attention_scaling * scale)
