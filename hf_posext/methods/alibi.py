"""ALiBi: no position at all but a penalty on the logits that grows with the distance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hf_posext.arguments import check_flag, check_positive
from hf_posext.contract import LinearBias, PositionTable, Spectrum
from hf_posext.functional import alibi_slopes
from hf_posext.methods.registry import method

alibi = method(
    "alibi",
    summary="position encoding off, logits minus slope x distance; a model trained with another encoding needs tuning",
    paper="Press et al. 2021, arXiv 2108.12409, sec. 3",
    needs_tuning=True,
)


@alibi.on("rotary")
@alibi.on("learned")
@alibi.on("sinusoidal")
def anywhere(
    reading: Spectrum | PositionTable,
    factor: float,
    *,
    slopes: Sequence[float] | None = None,
    bias_max: float = 8.0,
    asymmetric: bool | Sequence[float] = False,
    learned: bool = False,
) -> LinearBias:
    """Rotation or table off, and a bias of -m (i - j) in causal, -m |i - j| in bidirectional attention.

    The bias does not depend on the factor, which only says how long the text will be.

    Args:
        reading: what the site holds; not used any more.
        factor: s.
        slopes: m of each head, H numbers >= 0; the published ones if None.
        bias_max: exponent of the smallest published slope: 8, or 16 for a slower decay over very long text.
        asymmetric: bidirectional attention: H other slopes for keys behind the query, or True for those of the heads in
            reverse order, so that one half of the heads looks further back and the other half further ahead.
        learned: make the slopes a parameter `posext_slopes` of each attention module, [2, H] for keys before and behind
            the query, which training changes and which is saved with the weights. Such attention builds its bias for
            each block of queries, which costs time.

    Raises:
        TypeError, ValueError: a bad value; a wrong number of slopes is found when the model's heads are known.

    Source: ALiBi (arXiv 2108.12409), sec. 3; for encoders the authors' advice on symmetric and other forms.
    """
    exponent = check_positive("bias_max", bias_max)
    given = None if slopes is None else as_slopes("slopes", slopes)
    before = partial(slopes_of, given, exponent)
    if asymmetric is False:
        return LinearBias(before, before, check_flag("learned", learned))
    if asymmetric is True:
        return LinearBias(before, partial(reversed_slopes, before), check_flag("learned", learned))
    after = partial(slopes_of, as_slopes("asymmetric", asymmetric), exponent)
    return LinearBias(before, after, check_flag("learned", learned))


def as_slopes(name: str, slopes: Sequence[float]) -> tuple[float, ...]:
    """Finite numbers >= 0.

    Raises:
        TypeError: not a list of numbers.
        ValueError: a negative or infinite one.
    """
    if isinstance(slopes, str | bool) or not isinstance(slopes, Sequence):
        raise TypeError(f"`{name}` must be a list with one number for each head, got {slopes!r}.")
    numbers = tuple(
        0.0 if slope == 0 else check_positive(f"{name}[{index}]", slope) for index, slope in enumerate(slopes)
    )
    if not numbers:
        raise ValueError(f"`{name}` is empty. Give one number for each head.")
    return numbers


def slopes_of(given: tuple[float, ...] | None, bias_max: float, heads: int) -> Tensor:
    """The slopes of a layer with H heads, [H] float64.

    Raises:
        ValueError: another number of slopes was given.
    """
    if given is None:
        return alibi_slopes(heads, bias_max)
    if len(given) != heads:
        raise ValueError(f"The model has {heads} heads, so {heads} slopes are needed; got {len(given)}: {list(given)}.")
    return torch.tensor(given, dtype=torch.float64)


def reversed_slopes(slopes: Callable[[int], Tensor], heads: int) -> Tensor:
    """Those of the heads in reverse order."""
    return slopes(heads).flip(0)
