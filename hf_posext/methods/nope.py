"""NoPE: no position encoding at all."""

from __future__ import annotations

from hf_posext.contract import NoPosition, PositionTable, Spectrum
from hf_posext.methods.registry import method

nope = method(
    "nope",
    aliases=("none",),
    summary="position encoding off: an ablation, and where dropping the encoding and tuning starts",
    paper="Kazemnejad et al. 2023, arXiv 2305.19466",
)


@nope.on("rotary")
@nope.on("learned")
@nope.on("sinusoidal")
def anywhere(reading: Spectrum | PositionTable, factor: float) -> NoPosition:
    """Rotation by angle 0, or rows of zeros; the factor only says how long the text will be.

    Args:
        reading: what the site holds; not used any more.
        factor: s.

    Source: arXiv 2305.19466, sec. 2.
    """
    return NoPosition()
