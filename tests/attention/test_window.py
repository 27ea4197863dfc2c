"""Sliding windows with sinks, against the full matrix of what is seen, in double precision."""

import pytest
import torch

from hf_posext.attention import bias
from tests.attention.test_bias import SCALE, check, states, window_bias

WINDOWS = [(1, 0, True), (100, 0, True), (100, 4, True), (256, 300, True), (600, 2, True), (5000, 3, True)]
WINDOWS += [(100, 4, False), (77, 0, False), (1, 1, False), (700, 0, True)]


@pytest.mark.parametrize(("width", "sinks", "causal"), WINDOWS)
@pytest.mark.parametrize(("length", "size"), [(4, 4), (800, 800), (300, 1111), (1, 500)])
def test_windowed(length: int, size: int, width: int, sinks: int, causal: bool) -> None:
    given = states(2, 1, length, size)
    mask = window_bias(width, sinks, causal, length, size)
    check(lambda *parts: bias.windowed(*parts, width, sinks, SCALE, causal=causal), mask, given)


def test_windowed_in_half_precision() -> None:
    given = states(4, 2, 700, 700, torch.bfloat16)
    check(lambda *parts: bias.windowed(*parts, 130, 4, SCALE), window_bias(130, 4, True, 700, 700), given)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_outside_a_window_are_not_read(dtype: torch.dtype, sinks: int) -> None:
    """What is no number would spread from them: 0 times NaN is NaN. So the work is linear in the length."""
    query, key, value = states(2, 1, 2048, 2048, dtype)
    expected = bias.windowed(query, key, value, 100, sinks, SCALE)
    key[:, :, sinks:1436] = value[:, :, sinks:1436] = torch.nan
    result = bias.windowed(query, key, value, 100, sinks, SCALE)
    assert torch.equal(result[:, :, 1536:], expected[:, :, 1536:])
