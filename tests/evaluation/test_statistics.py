"""The bootstrap against what is known of normal data, and against arithmetic by hand."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from hf_posext.evaluation.statistics import beyond, mean_nll, nll_difference, outer_share, perplexity_of

STUDENT = {50: 2.009575, 100: 1.984217, 400: 1.965927}  # 97.5 % quantile of t with one degree of freedom less; R: qt


def normal(documents: int, spread: float, seed: int = 0) -> np.ndarray:
    """Mean NLL per document whose sample mean is exactly 3 and whose standard deviation is exactly `spread`."""
    draws = np.random.default_rng(seed).standard_normal(documents)
    return 3 + spread * (draws - draws.mean()) / draws.std()


@pytest.mark.parametrize("documents", [50, 400])
def test_interval_is_that_of_the_normal_mean(documents: int) -> None:
    tokens = [128] * documents
    found = mean_nll(128 * normal(documents, 0.5), tokens)
    half_width = STUDENT[documents] * 0.5 / math.sqrt(documents - 1)
    assert found.value == pytest.approx(3, abs=1e-12)
    assert found.low == pytest.approx(3 - half_width, abs=0.05 * half_width)
    assert found.high == pytest.approx(3 + half_width, abs=0.05 * half_width)


def test_pairing_removes_what_documents_have_in_common() -> None:
    one = normal(100, 1.0)
    noise = normal(100, 0.01, seed=1) - 3
    found = nll_difference(64 * (one + 0.05 + noise), [64] * 100, 64 * one, [64] * 100)
    half_width = STUDENT[100] * 0.01 / math.sqrt(99)
    assert found.value == pytest.approx(0.05, abs=1e-12)
    assert found.low == pytest.approx(0.05 - half_width, abs=0.06 * half_width)
    assert found.high == pytest.approx(0.05 + half_width, abs=0.06 * half_width)


def test_mean_is_weighted_by_tokens_not_by_documents() -> None:
    assert mean_nll([10.0, 300.0], [10, 100]).value == pytest.approx(310 / 110)


def test_two_documents_give_the_interval_worked_out_by_hand() -> None:
    # Resampling gives (a, a), (a, b), (b, a), (b, b) with equal chance: a quarter of the means is each end.
    found = mean_nll([10.0, 40.0], [10, 20])
    assert (found.low, found.high) == (1.0, 2.0)


def test_same_seed_same_interval() -> None:
    data = 10 * normal(20, 1.0), [10] * 20
    assert mean_nll(*data, seed=3) == mean_nll(*data, seed=3)
    assert mean_nll(*data, seed=3) != mean_nll(*data, seed=4)


def test_an_arm_against_itself_differs_by_nothing() -> None:
    sums, tokens = 10 * normal(20, 1.0), [10] * 20
    found = nll_difference(sums, tokens, sums, tokens)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_blocks_of_resamples_do_not_change_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_posext.evaluation.statistics.BLOCK", 64)
    half_width = STUDENT[50] * 0.5 / math.sqrt(49)
    found = mean_nll(normal(50, 0.5), [1] * 50, resamples=4001)
    assert found.high - found.low == pytest.approx(2 * half_width, rel=0.06)


def test_one_document_has_no_interval() -> None:
    found = mean_nll([10.0], [5])
    assert found.value == 2.0
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_an_infinite_nll_is_reported_without_a_warning() -> None:
    assert mean_nll([math.inf, 1.0], [1, 1]).value == math.inf
    assert math.isnan(nll_difference([math.inf, 1.0], [1, 1], [math.inf, 1.0], [1, 1]).value)


def test_other_documents_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="same documents, got 2 and 1"):
        nll_difference([1.0, 2.0], [1, 1], [1.0], [1])


@pytest.mark.parametrize(
    ("nll", "expected"), [(0.0, 1.0), (math.log(50), 50.0), (800.0, math.inf), (math.inf, math.inf)]
)
def test_perplexity_is_the_exponential(nll: float, expected: float) -> None:
    assert perplexity_of(nll) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("freedom", "t"),  # Fisher and Yates, table III
    [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (7, 2.364624),
        (10, 2.228139),
        (11, 2.200985),
        (31, 2.039513),
        (99, 1.984217),
    ],
)
def test_student_is_that_of_the_tables(freedom: int, t: float) -> None:
    assert beyond(t, freedom) == pytest.approx(0.025, rel=1e-5)
    assert beyond(0.0, freedom) == 0.5


@pytest.mark.parametrize(("documents", "t"), [(8, 2.364624), (12, 2.200985), (100, 1.984217)])
def test_ends_are_where_normal_resamples_have_the_quantile_of_student(documents: int, t: float) -> None:
    reach = -NormalDist().inv_cdf(outer_share(documents))  # in standard errors of the resamples
    assert reach * math.sqrt((documents - 1) / documents) == pytest.approx(t, rel=1e-6)
