"""Slopes against BLOOM's and MPT's, buckets against T5's."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posext.functional import alibi_slopes, relative_buckets
from hf_posext.methods import alibi

HEADS = [*range(1, 34), 40, 71, 96, 112]
SIZES = [(32, 128), (32, 256), (32, 20), (64, 512), (16, 64), (8, 9), (320, 800), (12, 100), (4, 2), (6, 1_000)]
CAUSAL_ONLY = [(2, 2), (3, 50), (5, 9), (31, 128)]


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_are_those_of_bloom_and_mpt(heads: int) -> None:
    """Both are float32; the bias of one token's distance is the slope."""
    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(heads).float(), bloom, rtol=2e-6, atol=0)
    for bias_max in (8, 16, 6):
        mpt = -build_mpt_alibi_tensor(heads, 2, bias_max)[:, 0, 0]
        torch.testing.assert_close(alibi_slopes(heads, bias_max).float(), mpt, rtol=2e-6, atol=0)


def test_slopes_as_the_field_reports_give_them() -> None:
    assert alibi_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    torch.testing.assert_close(alibi_slopes(6), 2.0 ** -torch.tensor([2, 4, 6, 8, 1, 3]).double(), rtol=1e-15, atol=0)
    torch.testing.assert_close(
        alibi_slopes(12)[8:], 2.0 ** -torch.tensor([0.5, 1.5, 2.5, 3.5]).double(), rtol=1e-15, atol=0
    )
    assert alibi_slopes(8).dtype == torch.float64


def test_the_method_uses_these_slopes() -> None:
    assert alibi.alibi_slopes is alibi_slopes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "`heads` must be a whole number >= 1, got 0"),
        ((2.0,), "`heads` must be a whole number >= 1, got 2.0 of type float"),
        ((8, 0), "`bias_max` must be a finite number > 0, got 0"),
    ],
)
def test_bad_arguments_of_slopes_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        alibi_slopes(*arguments)


def of_t5(distances: Tensor, bidirectional: bool, buckets: int, max_distance: int) -> Tensor:
    return T5Attention._relative_position_bucket(distances, bidirectional, buckets, max_distance)


@pytest.mark.parametrize(
    ("bidirectional", "sizes"),
    [
        *((True, sizes) for sizes in SIZES),
        *((False, sizes) for sizes in SIZES + CAUSAL_ONLY if sizes[1] > sizes[0] // 2),
    ],
)
def test_buckets_are_those_of_t5(bidirectional: bool, sizes: tuple[int, int]) -> None:
    buckets, max_distance = sizes
    distances = torch.cat((torch.arange(-3_000, 3_001), torch.tensor([-(10**6), 10**6])))
    ours = relative_buckets(distances, bidirectional=bidirectional, buckets=buckets, max_distance=max_distance)
    assert ours.dtype == torch.int64
    assert torch.equal(ours, of_t5(distances, bidirectional, buckets, max_distance))


def test_buckets_keep_the_shape_and_take_any_whole_dtype() -> None:
    grid = torch.arange(40)[None, :] - torch.arange(40)[:, None]
    expected = of_t5(grid, True, 32, 128)
    for dtype in (torch.int64, torch.int32, torch.int8, torch.float32, torch.float64):
        assert torch.equal(relative_buckets(grid.to(dtype), bidirectional=True), expected)
    assert int(relative_buckets(torch.tensor(-128, dtype=torch.int8), bidirectional=False)) == 31


@pytest.mark.parametrize("bucket", range(1, 16))
def test_fractional_distances_have_the_bucket_of_the_formula(bucket: int) -> None:
    """16 buckets for each side, 8 of them exact: the k-th wide one begins at 8 x 16^(k / 8)."""
    begin = bucket if bucket < 8 else 8 * 16 ** ((bucket - 8) / 8)
    around = torch.tensor([begin - 1e-3, begin + 1e-3])
    assert relative_buckets(-around, bidirectional=True).tolist() == [bucket - 1, bucket]
    assert relative_buckets(around, bidirectional=True).tolist() == [bucket + 15, bucket + 16]


def test_a_distance_divided_by_the_factor_has_the_bucket_of_the_shorter_one() -> None:
    distances = torch.arange(-500, 501)
    stretched = relative_buckets(4 * distances / 4, bidirectional=True)
    assert torch.equal(stretched, relative_buckets(distances, bidirectional=True))
    causal = relative_buckets(-torch.arange(400) / 3, bidirectional=False)
    assert torch.equal(causal[::3], relative_buckets(-torch.arange(134), bidirectional=False))
    assert bool((causal.diff() >= 0).all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": 31}, "`buckets` must be even in bidirectional attention, got 31. Take 32"),
        ({"buckets": 2}, "`buckets` must be a whole number >= 4, got 2"),
        ({"buckets": 1, "bidirectional": False}, "`buckets` must be a whole number >= 2, got 1"),
        ({"max_distance": 8}, "`max_distance` must be more than 8 tokens, which 32 buckets hold one by one, got 8"),
        ({"max_distance": 16, "bidirectional": False}, "`max_distance` must be more than 16 tokens"),
        ({"max_distance": 0}, "`max_distance` must be a whole number >= 1, got 0"),
        ({"max_distance": math.inf}, "`max_distance` must be a whole number"),
        ({"bidirectional": 1}, "`bidirectional` must be True or False, got 1"),
    ],
)
def test_bad_sizes_of_buckets_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        relative_buckets(torch.arange(4), **{"bidirectional": True, **options})


def test_distances_in_half_precision_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`distances` must be .*got torch.bfloat16"):
        relative_buckets(torch.arange(4).bfloat16(), bidirectional=True)
