"""Whether differences between arms are more than chance: p values, corrected for how many were looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_posext.evaluation.statistics import LEVEL, arm_of, beyond, mean_of, paired_documents

BETTER, WORSE, UNCLEAR = "better", "worse", "not clearly different"


@np.errstate(invalid="ignore")  # an infinite NLL is reported as such, not warned about
def p_value(
    sums: Sequence[float],
    tokens: Sequence[int],
    versus_sums: Sequence[float],
    versus_tokens: Sequence[int],
) -> float:
    """Two-sided p of no difference of two arms' mean NLL: Student's t of a difference of two ratios.

    It is never below `smallest_p`: very few documents that agree would make anything certain.

    Args:
        sums: summed NLL of each document in nats, first arm.
        tokens: scored tokens of each document, first arm.
        versus_sums: the same documents in the same order, second arm.
        versus_tokens: scored tokens, second arm.

    Returns:
        0 to 1; NaN for fewer than two documents, and where the difference is not a number.

    Raises:
        ValueError: arms over different numbers of documents.

    Source: Cochran 1977, section 6.4 (standard error of a ratio, linearised); where all documents weigh alike it is
    Student's own paired test.
    """
    arm, versus = arm_of(sums, tokens), arm_of(versus_sums, versus_tokens)
    documents = paired_documents(arm, versus)
    difference = float(mean_of(*arm) - mean_of(*versus))
    if documents < 2 or not math.isfinite(difference):
        return math.nan
    parts = _influence(*arm) - _influence(*versus)
    error = float(parts.std(ddof=1)) / math.sqrt(documents)
    if error == 0:
        return smallest_p(documents) if difference else 1.0
    return max(2 * beyond(abs(difference) / error, documents - 1), smallest_p(documents))


def _influence(sums: NDArray[np.float64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """What each document adds to the mean NLL beside an average one, in nats per token, [documents]."""
    return (sums - mean_of(sums, tokens) * tokens) / tokens.mean()


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
