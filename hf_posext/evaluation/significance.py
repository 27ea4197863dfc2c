"""Whether differences between arms are more than chance: bootstrap p values, corrected for how many were looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hf_posext.evaluation.statistics import LEVEL, RESAMPLES, arm_of, resampled_differences

BETTER, WORSE, UNCLEAR = "better", "worse", "not clearly different"


@np.errstate(invalid="ignore")  # an infinite NLL is reported as such, not warned about
def p_value(
    sums: Sequence[float],
    tokens: Sequence[int],
    versus_sums: Sequence[float],
    versus_tokens: Sequence[int],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> float:
    """Two-sided p of no difference of two arms' mean NLL, from the resamples that `nll_difference` draws.

    Twice the share of resamples on the rarer side of zero, those at zero counted for both sides and one added to each.
    It is never below `smallest_p`: a bootstrap of very few documents that agree would find anything certain.

    Args:
        sums: summed NLL of each document in nats, first arm.
        tokens: scored tokens of each document, first arm.
        versus_sums: the same documents in the same order, second arm.
        versus_tokens: scored tokens, second arm.
        resamples: bootstrap samples.
        seed: of the generator.

    Returns:
        0 to 1; NaN for fewer than two documents, and where the difference is not a number.

    Raises:
        ValueError: arms over different numbers of documents.

    Source: Davison and Hinkley 1997, section 4.2.5 (one added), by inversion of the percentile interval.
    """
    arm, versus = arm_of(sums, tokens), arm_of(versus_sums, versus_tokens)
    below = above = drawn = 0
    for differences in resampled_differences(arm, versus, resamples, seed):
        if np.isnan(differences).any():
            return math.nan
        below += int((differences <= 0).sum())
        above += int((differences >= 0).sum())
        drawn += differences.size
    if not drawn:
        return math.nan
    return min(1.0, max(2 * (1 + min(below, above)) / (drawn + 1), smallest_p(arm[0].size, resamples)))


def smallest_p(documents: int, resamples: int) -> float:
    """The smallest p that there is reason for: that of a sign test over so many documents, and of so many resamples.

    Args:
        documents: at least 1.
        resamples: bootstrap samples.
    """
    return max(2.0 ** (1 - documents), 2 / (resamples + 1))


def holm(values: Sequence[float]) -> list[float]:
    """p values corrected for their number, in the same order: each at most as small as the chance of any false alarm.

    Args:
        values: p of each comparison, 0 to 1.

    Source: Holm 1979 (Scand. J. Stat. 6:65), step down.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = largest
    return corrected


def verdict(difference: float, p: float) -> str:
    """A difference of NLL in a word: better or worse where the corrected p leaves less than 5 % to chance."""
    if not p < 1 - LEVEL:
        return UNCLEAR
    return BETTER if difference < 0 else WORSE
