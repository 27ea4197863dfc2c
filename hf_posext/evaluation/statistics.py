"""Intervals: the paired bootstrap over documents of every perplexity and difference, and Wilson's of a share of trials.

The unit is the document: tokens of one document are not independent, and perplexity varies more between documents than
between methods. So arms are compared on the same resampled documents, never by whether two intervals overlap. Plain
percentiles are too narrow for few documents (of 12 they cover 90 %, not 95), so they are taken further out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
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

    Source: Efron and Tibshirani 1993, percentile interval (section 13.3), for a ratio of sums; expanded as in
    Hesterberg 2015 (The American Statistician 69:371).
    """
    arm = arm_of(sums, tokens)
    resampled = (mean_of(*(part[picks] for part in arm)) for picks in draws(arm[0].size, resamples, seed))
    return _estimate(mean_of(*arm), resampled, arm[0].size)


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
    documents = paired_documents(arm, versus)
    resampled = (
        mean_of(*(part[picks] for part in arm)) - mean_of(*(part[picks] for part in versus))
        for picks in draws(documents, resamples, seed)
    )
    return _estimate(mean_of(*arm) - mean_of(*versus), resampled, documents)


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


def paired_documents(arm: Arm, versus: Arm) -> int:
    """How many documents two arms have in common.

    Raises:
        ValueError: arms over different numbers of documents.
    """
    if arm[0].size != versus[0].size:
        raise ValueError(f"A paired difference needs the same documents, got {arm[0].size} and {versus[0].size}.")
    return arm[0].size


def mean_of(sums: NDArray[np.float64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ratio of sums over the last axis."""
    return sums.sum(-1) / tokens.sum(-1)


def draws(documents: int, resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Documents drawn with replacement, [block, documents] at a time; nothing for fewer than two documents."""
    generator = np.random.default_rng(seed)
    block = max(1, BLOCK // max(1, documents))
    for start in range(0, resamples if documents > 1 else 0, block):
        yield generator.integers(0, documents, size=(min(block, resamples - start), documents))


def beyond(t: float, freedom: int) -> float:
    """Chance that Student's t of some degrees of freedom (>= 1) is above `t` >= 0.

    Source: Abramowitz and Stegun 1964, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(freedom))
    is_odd = freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0 if freedom == 1 else term
    for step in range(2 + is_odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (step - 1) / step
        total += term
    inside = math.sin(angle) * total
    return (1 - (2 / math.pi * (angle + inside) if is_odd else inside)) / 2


@cache
def outer_share(documents: int) -> float:
    """Share of the resamples that lies beyond each end of the interval: that of Student's t, not of the normal.

    Resampled means are also sqrt((n - 1) / n) too close together.
    """
    low, high = 0.0, 1e3  # of the quantile of t, by bisection
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle, documents - 1) > (1 - LEVEL) / 2 else (low, middle)
    return NormalDist().cdf(-low * math.sqrt(documents / (documents - 1)))


def _estimate(value: NDArray[np.float64], resampled: Iterator[NDArray[np.float64]], documents: int) -> Estimate:
    """The value and the percentiles of its resampled copies."""
    blocks = list(resampled)
    if not blocks:
        return Estimate(float(value), math.nan, math.nan)
    share = outer_share(documents)
    low, high = np.quantile(np.concatenate(blocks), [share, 1 - share])
    return Estimate(float(value), float(low), float(high))
