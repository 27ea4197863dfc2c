"""NoPE: no position encoding at all."""

from __future__ import annotations

from hf_posext.contract import NoPosition, Reading
from hf_posext.methods.registry import method

nope = method(
    "nope",
    aliases=("none",),
    summary="position encoding off: an ablation, and where dropping the encoding and tuning starts",
    paper="Kazemnejad et al. 2023, arXiv 2305.19466",
    needs_tuning=True,
)


@nope.on("rotary")
@nope.on("learned")
@nope.on("sinusoidal")
@nope.on("alibi")
def anywhere(reading: Reading, factor: float) -> NoPosition:
    """Rotation by angle 0, rows of zeros, or a bias of zeros; the factor only says how long the text will be.

    Args:
        reading: what the site holds; not used any more.
        factor: s.

    Source: arXiv 2305.19466, sec. 2.
    """
    return NoPosition()
