"""Intervals: the paired bootstrap over documents of every perplexity and difference, and Wilson's of a share of trials.

The unit is the document: tokens of one document are not independent, and perplexity varies more between documents than
between methods. So arms are compared on the same resampled documents, never by whether two intervals overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95
QUANTILE = NormalDist().inv_cdf((1 + LEVEL) / 2)
BLOCK = 4_000_000  # drawn indices held at a time, which bounds the memory for any number of documents

Arm = tuple[NDArray[np.float64], NDArray[np.float64]]  # summed NLL and scored tokens, each [documents]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; the ends are NaN where there are fewer than two documents."""

    value: float
    low: float
    high: float


@np.errstate(invalid="ignore")  # an infinite NLL is reported as such, not warned about
def mean_nll(sums: Sequence[float], tokens: Sequence[int], *, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Token-weighted mean NLL, sum of all NLL over number of all tokens, in nats per token.

    Args:
        sums: summed NLL of each document in nats.
        tokens: scored tokens of each document, same order.
        resamples: bootstrap samples.
        seed: of the generator; the same seed draws the same documents for every arm.

    Source: Efron and Tibshirani 1993, percentile interval (section 13.3), for a ratio of sums.
    """
    arm = arm_of(sums, tokens)
    resampled = (mean_of(*(part[picks] for part in arm)) for picks in draws(arm[0].size, resamples, seed))
    return _estimate(mean_of(*arm), resampled)


@np.errstate(invalid="ignore")  # an infinite NLL is reported as such, not warned about
def nll_difference(
    sums: Sequence[float],
    tokens: Sequence[int],
    versus_sums: Sequence[float],
    versus_tokens: Sequence[int],
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """Difference of two arms' token-weighted mean NLL over the same documents, in nats per token; negative is better.

    Args:
        sums: summed NLL of each document in nats, first arm.
        tokens: scored tokens of each document, first arm.
        versus_sums: the same documents in the same order, second arm.
        versus_tokens: scored tokens, second arm.
        resamples: bootstrap samples.
        seed: of the generator.

    Raises:
        ValueError: arms over different numbers of documents.
    """
    arm, versus = arm_of(sums, tokens), arm_of(versus_sums, versus_tokens)
    return _estimate(mean_of(*arm) - mean_of(*versus), resampled_differences(arm, versus, resamples, seed))


def perplexity_of(nll: float) -> float:
    """exp(NLL), infinite where that does not fit a float."""
    return math.exp(nll) if not nll > 709.0 else math.inf


def wilson(correct: int, trials: int) -> tuple[float, float]:
    """95 % interval of a share of successes; it stays inside [0, 1] and has a width also where all trials agree.

    Args:
        correct: successes, 0 to `trials`.
        trials: at least 1.

    Returns:
        Lower and upper end.

    Raises:
        ValueError: no trials, or a count outside them.

    Source: Wilson 1927 (J. Am. Stat. Assoc. 22:209), the score interval.
    """
    if not 0 <= correct <= trials or trials < 1:
        raise ValueError(f"`correct` must be 0 to `trials`, and these at least 1; got {correct} of {trials}.")
    share, weight = correct / trials, QUANTILE**2 / trials
    centre = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + weight**2 / 4) / (1 + weight)
    return max(0.0, centre - half), min(1.0, centre + half)


def arm_of(sums: Sequence[float], tokens: Sequence[int]) -> Arm:
    """Both columns in float64, [documents]."""
    return np.asarray(sums, dtype=np.float64), np.asarray(tokens, dtype=np.float64)


def resampled_differences(arm: Arm, versus: Arm, resamples: int, seed: int) -> Iterator[NDArray[np.float64]]:
    """Differences of two arms' mean NLL, both over the same drawn documents, [block] at a time.

    Raises:
        ValueError: arms over different numbers of documents.
    """
    if arm[0].size != versus[0].size:
        raise ValueError(f"A paired difference needs the same documents, got {arm[0].size} and {versus[0].size}.")
    for picks in draws(arm[0].size, resamples, seed):
        yield mean_of(*(part[picks] for part in arm)) - mean_of(*(part[picks] for part in versus))


def mean_of(sums: NDArray[np.float64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ratio of sums over the last axis."""
    return sums.sum(-1) / tokens.sum(-1)


def draws(documents: int, resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Documents drawn with replacement, [block, documents] at a time; nothing for fewer than two documents."""
    generator = np.random.default_rng(seed)
    block = max(1, BLOCK // max(1, documents))
    for start in range(0, resamples if documents > 1 else 0, block):
        yield generator.integers(0, documents, size=(min(block, resamples - start), documents))


def _estimate(value: NDArray[np.float64], resampled: Iterator[NDArray[np.float64]]) -> Estimate:
    """The value and the percentiles of its resampled copies."""
    blocks = list(resampled)
    if not blocks:
        return Estimate(float(value), math.nan, math.nan)
    low, high = np.quantile(np.concatenate(blocks), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(value), float(low), float(high))
