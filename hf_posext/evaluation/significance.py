"""Whether differences between arms are more than chance: p values, corrected for how many were looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hf_posext.evaluation.statistics import LEVEL, RESAMPLES, arm_of, beyond, mean_of, resampled_differences

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
    """Two-sided p of no difference of two arms' mean NLL: Student's t by the spread of what `nll_difference` draws.

    It is never below `smallest_p`: very few documents that agree would make anything certain.

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

    Source: Efron and Tibshirani 1993, standard error by the bootstrap (chapter 6) and t interval (section 12.2), the
    error times sqrt(n / (n - 1)), which makes it that of Student's own test where all documents weigh alike.
    """
    arm, versus = arm_of(sums, tokens), arm_of(versus_sums, versus_tokens)
    documents, difference = arm[0].size, float(mean_of(*arm) - mean_of(*versus))
    drawn = [*resampled_differences(arm, versus, resamples, seed)]
    if not drawn or not math.isfinite(difference):
        return math.nan
    error = float(np.concatenate(drawn).std()) * math.sqrt(documents / (documents - 1))
    if error == 0:
        return smallest_p(documents) if difference else 1.0
    return max(2 * beyond(abs(difference) / error, documents - 1), smallest_p(documents))


def smallest_p(documents: int) -> float:
    """The smallest p that there is reason for: that of a sign test over so many documents, at least one."""
    return 2.0 ** (1 - documents)


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
