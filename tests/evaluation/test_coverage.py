"""How often a 95 % interval holds the truth, where the truth is known; and how often nothing is taken for something.

The data are like those of an evaluation: documents of 1 to 4 endpoints with 128 targets each, 0.5 nats apart in their
level, and two arms that differ by a known 0.02 nats, give or take 0.03 from one document to the next.
"""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from hf_posext.evaluation.significance import holm, p_value
from hf_posext.evaluation.statistics import mean_nll, nll_difference, wilson

LEVEL, EFFECT = 3.0, -0.02  # nats per token
TRIALS, RESAMPLES = 1000, 1000

Floats = NDArray[np.float64]


def evaluation(documents: int, generator: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """Summed NLL of one arm and of the other, and the tokens of each document."""
    tokens = 128.0 * generator.integers(1, 5, documents)
    levels = generator.normal(LEVEL, 0.5, documents)
    differences = generator.normal(EFFECT, 0.03, documents)
    return tokens * (levels + differences), tokens * levels, tokens


def share_of_differences_covered(documents: int) -> float:
    """In how many of the trials the paired interval holds the true difference."""
    generator, held = np.random.default_rng(1), 0
    for seed in range(TRIALS):
        one, other, tokens = evaluation(documents, generator)
        found = nll_difference(one, tokens, other, tokens, resamples=RESAMPLES, seed=seed)
        held += found.low <= EFFECT <= found.high
    return held / TRIALS


def share_of_levels_covered(documents: int) -> float:
    """In how many of the trials the interval of a single arm holds the true level."""
    generator, held = np.random.default_rng(2), 0
    for seed in range(TRIALS):
        _, sums, tokens = evaluation(documents, generator)
        found = mean_nll(sums, tokens, resamples=RESAMPLES, seed=seed)
        held += found.low <= LEVEL <= found.high
    return held / TRIALS


def false_alarms(documents: int, *, arms: int, trials: int) -> float:
    """How often Holm's correction calls any of several arms different that differ from a bar by nothing but chance."""
    generator, alarms = np.random.default_rng(3), 0
    for _ in range(trials):
        _, bar, tokens = evaluation(documents, generator)
        chance = generator.normal(0, 0.03, (arms, documents)) + generator.normal(0, 0.03, documents)  # of arms, of bar
        found = [p_value(bar + tokens * own, tokens, bar, tokens) for own in chance]
        alarms += min(holm(found)) < 0.05
    return alarms / trials


@pytest.mark.parametrize("documents", [8, 12, 32, 100])
def test_the_paired_interval_covers_the_true_difference(documents: int) -> None:
    assert 0.93 <= share_of_differences_covered(documents) <= 0.97


@pytest.mark.parametrize("documents", [12, 100])
def test_the_interval_of_one_arm_covers_its_level(documents: int) -> None:
    assert 0.93 <= share_of_levels_covered(documents) <= 0.97


@pytest.mark.parametrize("trials", [20, 100])
def test_wilson_covers_the_true_share_on_average_over_shares(trials: int) -> None:
    shares = np.linspace(0.02, 0.98, 193)
    counts = np.arange(trials + 1)
    chances = [math.comb(trials, k) * shares**k * (1 - shares) ** (trials - k) for k in counts]
    held = [(low <= shares) & (shares <= high) for low, high in (wilson(int(k), trials) for k in counts)]
    covered = sum(chance * inside for chance, inside in zip(chances, held, strict=True))
    assert 0.94 <= covered.mean() <= 0.97
    assert covered.min() >= 0.82


def test_holm_keeps_the_chance_of_any_false_alarm_where_p_values_are_right() -> None:
    drawn = np.random.default_rng(4).uniform(size=(4000, 10))
    alarms = np.mean([min(holm(row)) < 0.05 for row in drawn.tolist()])
    assert alarms == pytest.approx(1 - (1 - 0.05 / 10) ** 10, abs=0.01)  # 0.049: independent, all true


def test_a_bootstrapped_p_value_of_no_difference_is_below_five_percent_in_one_of_twenty() -> None:
    assert 0.03 <= false_alarms(100, arms=1, trials=TRIALS) <= 0.07


@pytest.mark.parametrize("documents", [12, 100])
def test_holm_over_these_p_values_keeps_it(documents: int) -> None:
    assert false_alarms(documents, arms=5, trials=200) <= 0.08  # 0.05 and two standard errors
