"""Attention with remapped distances, against pairs rotated one by one in double precision, each by its own distance."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_posext.attention import merged, remap
from tests.remapping import (
    CASES,
    DOUBLE,
    METHODS,
    SCALE,
    SINGLE,
    WIDTH,
    attended,
    build,
    causal,
    check_gradients,
    draw,
    leaves,
    scores,
)


@pytest.fixture
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts have all kinds of blocks too."""
    monkeypatch.setattr(merged, "BLOCK", 8)


short_blocks = pytest.mark.usefixtures("_short_blocks")


@short_blocks
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_two_regions_are_pairs_at_their_mapped_distance(case: str, method: str) -> None:
    views = build(method, *CASES[case])
    torch.testing.assert_close(remap.two_regions(*views.two()), views.expected(causal(views)), **DOUBLE)


@short_blocks
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", ["whole", "ragged", "window_not_in_length", "window_1", "window_2", "one_far_key"])
def test_three_regions_are_pairs_at_their_mapped_distance(case: str, method: str) -> None:
    views = build(method, *CASES[case])
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    torch.testing.assert_close(remap.three_regions(*views.three()), views.expected(everything), **DOUBLE)


@pytest.mark.parametrize("length", [191, 192, 193, 500])
@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (6, 2), (3, 1)])
def test_blocks_of_true_size(length: int, heads: int, groups: int) -> None:
    views = build("self_extend", length, length, 50, heads=heads, groups=groups)
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    torch.testing.assert_close(remap.two_regions(*views.two()), views.expected(causal(views)), **DOUBLE)
    torch.testing.assert_close(remap.three_regions(*views.three()), views.expected(everything), **DOUBLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [40, 41])
def test_up_to_the_window_it_is_plain_attention(window: int, dtype: torch.dtype) -> None:
    query, key, value = (draw(2, heads, 40, WIDTH, seed=heads).to(dtype) for heads in (4, 2, 2))
    unused = torch.full_like(query, torch.nan), torch.full_like(key, torch.nan)
    options = {"scale": SCALE, "enable_gqa": True}
    found = remap.two_regions(query, key, *unused, value, window, SCALE)
    assert torch.equal(found, scaled_dot_product_attention(query, key, value, is_causal=True, **options))
    found = remap.two_regions(query[:, :, -1:], key, unused[0][:, :, -1:], unused[1], value, window, SCALE)
    assert torch.equal(found, scaled_dot_product_attention(query[:, :, -1:], key, value, **options))
    found = remap.three_regions(query, key, unused[0], *unused, value, window, SCALE)
    assert torch.equal(found, scaled_dot_product_attention(query, key, value, **options))


@short_blocks
@pytest.mark.parametrize("window", [5, 16, 100])
@pytest.mark.parametrize("chunk", [1, 7, 24])
def test_chunks_over_a_cache_equal_one_pass(chunk: int, window: int) -> None:
    query, key, far_query, far_key, value = (draw(1, 2, 48, WIDTH, seed=seed).float() for seed in range(5))
    whole = remap.two_regions(query, key, far_query, far_key, value, window, SCALE)
    for begin in range(0, 48, chunk):
        end = min(begin + chunk, 48)
        far_keys = far_key[:, :, : max(end - window, 0)]
        asking = query[:, :, begin:end], far_query[:, :, begin:end]
        part = remap.two_regions(asking[0], key[:, :, :end], asking[1], far_keys, value[:, :, :end], window, SCALE)
        torch.testing.assert_close(part, whole[:, :, begin:end], **SINGLE)


@short_blocks
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_two_regions(case: str, batch: int) -> None:
    length, keys, window = CASES[case]
    query, far_query, _, key, far_key, value = leaves(length, keys, batch=batch)
    inputs = [query, key, far_query, far_key, value]
    found = remap.two_regions(*inputs, window, SCALE)
    expected = attended(scores(*inputs[:4], window), value)
    check_gradients(found, expected, inputs)


@short_blocks
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("case", ["whole", "ragged", "window_not_in_length", "window_1", "window_2", "one_far_key"])
def test_gradients_of_three_regions(case: str, batch: int) -> None:
    length, keys, window = CASES[case]
    query, far_query, right_query, key, far_key, value = leaves(length, keys, batch=batch)
    found = remap.three_regions(query, key, far_query, right_query, far_key, value, window, SCALE)
    expected = attended(scores(query, key, far_query, far_key, window, right_query), value)
    check_gradients(found, expected, [query, key, far_query, right_query, far_key, value])


@short_blocks
def test_states_and_gradients_in_any_layout() -> None:
    query, far_query, _, key, far_key, value = (each.detach() for each in leaves(40, 40))
    inputs = [each.mT.contiguous().mT.requires_grad_() for each in (query, key, far_query, far_key, value)]
    found = remap.two_regions(*inputs, 6, SCALE)
    expected = attended(scores(*inputs[:4], 6), inputs[4])
    torch.testing.assert_close(found, expected, **DOUBLE)
    ours, theirs = (torch.autograd.grad(each.sum(), inputs) for each in (found, expected))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, **DOUBLE)


def errors(found: Tensor, exact: Tensor, inputs: list[Tensor], doubles: list[Tensor]) -> list[float]:
    """Root mean square errors of the output and of the gradients."""
    weight = draw(*found.shape, seed=9).to(found.dtype)
    ours = [found, *torch.autograd.grad(found, inputs, weight)]
    theirs = [exact, *torch.autograd.grad(exact, doubles, weight.double())]
    pairs = zip(ours, theirs, strict=True)
    return [float((our.detach().double() - their.detach()).square().mean().sqrt()) for our, their in pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [64, 200])
def test_errors_are_those_of_plain_attention_in_the_same_dtype(window: int, dtype: torch.dtype) -> None:
    query, far_query, _, key, far_key, value = leaves(400, 400, dtype)
    inputs = [query, key, value, far_query, far_key]
    doubles = [each.detach().double().requires_grad_() for each in inputs]
    options = {"is_causal": True, "scale": SCALE, "enable_gqa": True}
    plain = scaled_dot_product_attention(*inputs[:3], **options)
    exact = attended(scores(doubles[0], doubles[1], doubles[0], doubles[1], window), doubles[2])
    allowed = errors(plain, exact, inputs[:3], doubles[:3])
    found = remap.two_regions(query, key, far_query, far_key, value, window, SCALE)
    assert found.dtype is dtype
    exact = attended(scores(doubles[0], doubles[1], doubles[3], doubles[4], window), doubles[2])
    got = errors(found, exact, inputs, doubles)
    allowed += allowed[1:3]  # far queries and keys as the near ones
    assert all(our <= 1.5 * their for our, their in zip(got, allowed, strict=True)), (got, allowed)
