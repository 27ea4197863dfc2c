"""Dynamic NTK as transformers has it: the base grows with the length of the text."""

from __future__ import annotations

from hf_posext.contract import RotaryChange, Spectrum
from hf_posext.methods import ntk
from hf_posext.methods._wavelengths import Factor
from hf_posext.methods.registry import method

dynamic_ntk = method(
    "dynamic_ntk",
    aliases=("dynamic",),
    summary="the base grows with the text, by the formula of transformers; for s = l / N use ntk with dynamic=True",
    paper="emozilla 2023; YaRN, arXiv 2309.00071, sec. 3.3",
    follows_length=lambda options: True,
    is_bounded=False,
)


@dynamic_ntk.on("rotary")
def rotary(spectrum: Spectrum, factor: Factor, *, limit: float | None = None) -> RotaryChange:
    """`ntk` with alpha l / N - (alpha - 1), where alpha is the factor of the patch.

    It is 1 at N and alpha^2 - alpha + 1 at alpha N, beyond which it goes on growing.

    The paper's own dynamic form is `ntk` with l / N, which is this one for alpha 1. Equal to `rope_type="dynamic"` of
    transformers in a single pass, and to its single pass with a cache, where transformers itself is not.

    Args:
        spectrum: the live spectrum.
        factor: l / N at the present length, a number >= 1 or [B].
        limit: alpha; `factor` where None.

    Raises:
        ValueError: as `ntk`.

    Source: transformers `rope_type="dynamic"`, from emozilla 2023.
    """
    alpha = factor if limit is None else limit
    return ntk.rotary(spectrum, alpha * factor - (alpha - 1))
