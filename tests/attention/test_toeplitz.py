"""Attention with a bias linear in the distance, against the full matrix of biases in double precision."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_posext.attention import bias
from tests.attention.test_bias import SCALE, SLOPES, Largest, causal_bias, check, exact, states, symmetric_bias

CASES = [(6, 3, 4, 4), (8, 2, 255, 255), (6, 6, 257, 257), (12, 12, 1, 50), (8, 2, 16, 900), (6, 3, 2, 2)]
CASES += [(12, 12, 700, 700), (8, 2, 1300, 1300), (6, 3, 300, 1111), (6, 1, 40, 2000)]


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize(("heads", "groups", "length", "size"), CASES)
def test_causal(heads: int, groups: int, length: int, size: int, prune: bool) -> None:
    slopes = SLOPES[heads]
    given = states(heads, groups, length, size)
    mask = causal_bias(slopes, length, size)
    check(lambda *parts: bias.causal_linear(*parts, slopes, SCALE, prune=prune), mask, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("length", "size"), [(7, 7), (600, 600), (300, 900), (1, 300)])
def test_causal_in_half_precision(length: int, size: int, dtype: torch.dtype) -> None:
    slopes = SLOPES[6]
    given = states(6, 2, length, size, dtype, batch=2)
    check(lambda *parts: bias.causal_linear(*parts, slopes, SCALE), causal_bias(slopes, length, size), given)


@pytest.mark.parametrize("prune", [True, False])
def test_causal_with_wide_blocks(prune: bool) -> None:
    """Queries that meet more than 4096 keys go in blocks of 1024."""
    slopes = torch.tensor([2.0**-7, 0.5])
    given = states(2, 1, 1100, 9000)
    mask = causal_bias(slopes, 1100, 9000)
    check(lambda *parts: bias.causal_linear(*parts, slopes, SCALE, prune=prune), mask, given)


def test_a_head_without_slope_has_no_bias() -> None:
    slopes = torch.tensor([0.0, 0.5, 0.0, 2.0])
    given = states(4, 4, 600, 600, batch=2)
    check(lambda *parts: bias.causal_linear(*parts, slopes, SCALE), causal_bias(slopes, 600, 600), given)


@pytest.mark.parametrize("heads", [6, 12])
@pytest.mark.parametrize("kind", ["causal", "symmetric"])
def test_weights_of_zero_queries_are_those_of_the_bias(heads: int, kind: str) -> None:
    """Read with values that are an identity; biases of 0 to -150 against exp of whole multiples of the slopes."""
    length, slopes = 300, SLOPES[heads]
    query, key = torch.zeros(1, heads, length, length), torch.randn(1, heads, length, length)
    value = torch.eye(length).expand(1, heads, -1, -1)
    if kind == "causal":
        mask, weights = causal_bias(slopes, length, length), bias.causal_linear(query, key, value, slopes, 1.0)
    else:
        after = slopes.flip(0)
        mask, weights = (
            symmetric_bias(slopes, after, length),
            bias.symmetric_linear(query, key, value, slopes, after, 1.0),
        )
    torch.testing.assert_close(weights[0].double(), mask.softmax(-1), rtol=0, atol=5e-7)


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize(("heads", "groups", "length"), [(6, 3, 5), (12, 12, 300), (8, 2, 1025), (6, 6, 1300)])
def test_symmetric(heads: int, groups: int, length: int, prune: bool) -> None:
    before, after = SLOPES[heads], SLOPES[heads].flip(0) / 2
    mask = symmetric_bias(before, after, length)
    given = states(heads, groups, length, length)
    check(lambda *parts: bias.symmetric_linear(*parts, before, after, SCALE, prune=prune), mask, given)


def test_symmetric_in_half_precision() -> None:
    slopes = SLOPES[6]
    given = states(6, 2, 520, 520, torch.bfloat16)
    mask = symmetric_bias(slopes, slopes, 520)
    check(lambda *parts: bias.symmetric_linear(*parts, slopes, slopes, SCALE), mask, given)


@pytest.mark.parametrize("kind", ["one_far_key", "alternating", "large", "opposed"])
def test_pruning_keeps_what_weighs(kind: str) -> None:
    """Keys that overcome their distance, with logits up to several hundred."""
    length, slopes = 1100, torch.tensor([1.0, 0.5, 0.25, 2.0])
    query, key, value = states(4, 4, length, length)
    if kind == "one_far_key":  # the first key wins for the last query of head 1, 1000 tokens away
        key[:, 1, 70] = query[:, 1, -1] * 600 / SCALE / query[:, 1, -1].square().sum()
    elif kind == "alternating":
        key[:, :, ::5] *= 40
    elif kind == "large":
        query, key = query * 12, key * 12
    else:  # the own key is the worst, so that far ones count
        key[:] = -query * 10
        key[:, :, :64] = query.mean(2, keepdim=True) * 20
    mask = causal_bias(slopes, length, length)
    logits = float((query.double() @ key.double().mT).abs().max()) * SCALE
    error = 2e-6 * max(1.0, logits / 4)  # the products themselves are rounded to float32
    check(lambda *parts: bias.causal_linear(*parts, slopes, SCALE), mask, (query, key, value), error)
    both = symmetric_bias(slopes, slopes, length)
    check(lambda *parts: bias.symmetric_linear(*parts, slopes, slopes, SCALE), both, (query, key, value), error)


def test_pruning_leaves_out_what_it_can() -> None:
    """Small keys and a steep slope: changing far values to NaN changes nothing; without pruning it does."""
    query, key, value = states(2, 2, 1024, 1024)
    slopes = torch.tensor([1.0, 0.5])
    expected = bias.causal_linear(query, key, value, slopes, SCALE)
    value[:, :, :256] = torch.nan
    assert torch.equal(bias.causal_linear(query, key, value, slopes, SCALE)[:, :, 512:], expected[:, :, 512:])
    assert bias.causal_linear(query, key, value, slopes, SCALE, prune=False)[:, :, 512:].isnan().all()


def test_a_key_that_is_no_number_is_not_pruned_away() -> None:
    query, key, value = states(2, 2, 600, 600)
    key[:, 0, 3] = torch.nan
    result = bias.causal_linear(query, key, value, torch.tensor([4.0, 4.0]), SCALE)
    assert result[:, 0, 3:].isnan().all()
    assert not result[:, 1].isnan().any()


@pytest.mark.parametrize("prune", [True, False])
def test_precision_at_32768_positions(prune: bool) -> None:
    """The last 64 queries at once and the last one alone, of steep and gentle heads."""
    slopes = SLOPES[12][:4].clone()
    slopes[3] = 2.0**-8
    query, key, value = states(4, 1, 64, 32768)
    expected = exact(query, key, value, causal_bias(slopes, 64, 32768))
    result = bias.causal_linear(query, key, value, slopes, SCALE, prune=prune)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-6)
    one = bias.causal_linear(query[:, :, -1:], key, value, slopes, SCALE, prune=prune)
    torch.testing.assert_close(one.double(), expected[:, :, -1:], rtol=0, atol=1e-6)


def test_precision_of_a_full_pass_at_32768_positions() -> None:
    """Some rows of one steep head, whose keys are few, in closed form."""
    length, slopes = 32768, torch.tensor([0.5])
    query, key, value = states(1, 1, length, length)
    result = bias.causal_linear(query, key, value, slopes, SCALE)
    for row in (0, 1, 255, 256, 1000, 20001, 32767):
        mask = causal_bias(slopes, 1, row + 1)
        expected = exact(query[:, :, row : row + 1], key[:, :, : row + 1], value[:, :, : row + 1], mask)
        torch.testing.assert_close(result[:, :, row : row + 1].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", ["causal", "unpruned", "symmetric", "windowed", "masked"])
def test_memory_is_linear(way: str) -> None:
    """Forward and backward of 2048 tokens; the states have 2^16 numbers, blocks of rows 2^20, the matrix 2^23."""
    length, slopes = 2048, torch.tensor([0.5, 2.0**-8])
    given = [part.requires_grad_() for part in states(2, 2, length, length)]
    places = torch.arange(length)[None]
    ways: dict[str, Callable[[], Tensor]] = {
        "causal": lambda: bias.causal_linear(*given, slopes, SCALE),
        "unpruned": lambda: bias.causal_linear(*given, slopes, SCALE, prune=False),
        "symmetric": lambda: bias.symmetric_linear(*given, slopes, slopes, SCALE),
        "windowed": lambda: bias.windowed(*given, 100, 4, SCALE),
        "masked": lambda: bias.masked(
            *given, SCALE, lambda first, last: bias.distance_bias(slopes, None, places[:, first:last], places)
        )[0],
    }
    with Largest() as seen:
        torch.autograd.grad(ways[way]().sum(), given)
    assert seen.numbers <= (2 * 256 * length if way in ("masked",) else 4 * 2 * 16 * length)
