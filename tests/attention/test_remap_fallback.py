"""Remapped attention for any mask and position, where no kernel helps; traced; and the memory that both ways take."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from hf_posext.attention import remap
from tests.remapping import CASES, DOUBLE, METHODS, SCALE, SEEN_NONE, SINGLE, Views, build, causal, draw, leaves


def additive(seen: Tensor) -> Callable[[int, int], Tensor]:
    """`seen` of the fallback from bool [B or 1, 1, L, S]."""
    mask = torch.zeros(seen.shape).masked_fill(~seen, SEEN_NONE)
    return lambda begin, end: mask[:, :, begin:end]


def apart(views: Views) -> Callable[[int, int], Tensor]:
    """`distance` of the fallback."""
    at, of = views.positions
    return lambda begin, end: at[:, begin:end, None] - of[:, None, :]


@pytest.fixture(params=["one_block", "blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "blocks":
        monkeypatch.setattr(remap, "LOGITS", 7 * 2 * 4 * 40)  # seven rows


blocks = pytest.mark.usefixtures("_blocks")


def left_padded() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Positions and what is seen, for rows of 40 tokens of which 0 and 9 are padding."""
    positions = (torch.arange(40) - torch.tensor([[0], [9]])).clamp(min=0)
    real = torch.arange(40) >= torch.tensor([[0], [9]])
    return (positions, positions), (torch.ones(40, 40).tril().bool() & real[:, None, :])[:, None]


def packed() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Two documents in each row, of different lengths."""
    ends = torch.tensor([[15], [28]])
    document = (torch.arange(40) >= ends).long()
    positions = torch.arange(40) - document * ends
    same = document[:, :, None] == document[:, None, :]
    return (positions, positions), (torch.ones(40, 40).tril().bool() & same)[:, None]


@blocks
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [left_padded, packed])
def test_fallback_with_positions_and_masks_of_rows(kind: Callable, method: str) -> None:
    positions, seen = kind()
    views = build(method, 40, 40, 6, positions=positions)
    found, weights = remap.selected(*views.all(), apart(views), additive(seen), 6, weights=True)
    has_any = seen.any(-1)[..., None]
    expected = torch.where(has_any, views.expected(seen | ~has_any), 0)
    torch.testing.assert_close(found, expected, **SINGLE)
    assert weights.shape == (2, 4, 40, 40)
    assert weights.dtype is torch.float64
    assert not weights.masked_select(~seen).any()
    torch.testing.assert_close(weights.sum(-1, keepdim=True), has_any.expand(2, 4, 40, 1).double(), **SINGLE)
    copies = views.value.repeat_interleave(2, 1)
    torch.testing.assert_close(weights @ copies, found, **DOUBLE)


@blocks
@pytest.mark.parametrize("method", METHODS)
def test_fallback_in_both_directions_without_a_mask(method: str) -> None:
    views = build(method, 40, 40, 6)
    found, weights = remap.selected(*views.all(), apart(views), remap.everything, 6, right_query=views.right)
    torch.testing.assert_close(found, views.expected(torch.ones(1, 1, 1, 1, dtype=torch.bool)), **SINGLE)
    assert weights is None


@blocks
@pytest.mark.parametrize("kind", [left_padded, packed])
def test_gradients_of_the_fallback(kind: Callable) -> None:
    positions, seen = kind()
    query, far_query, _, key, far_key, value = leaves(40, 40)
    inputs = [query, key, far_query, far_key, value]
    views = build("rerope", 40, 40, 6, positions=positions)
    found, _ = remap.selected(*inputs, SCALE, apart(views), additive(seen), 6)
    near = (apart(views)(0, 40).abs() < 6)[:, None]
    copies = [each.repeat_interleave(2, 1) for each in (key, far_key, value)]
    logits = SCALE * torch.where(near, query @ copies[0].mT, far_query @ copies[1].mT)
    logits = logits.masked_fill(~seen, torch.finfo(torch.float64).min)
    expected = torch.where(seen.any(-1)[..., None], logits.softmax(-1) @ copies[2], 0)
    weight = draw(*found.shape, seed=9)
    ours, theirs = (torch.autograd.grad(each, inputs, weight) for each in (found, expected))
    for our, their in zip(ours, theirs, strict=True):
        assert our.isfinite().all()
        torch.testing.assert_close(our, their, rtol=0, atol=2e-5)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    states = leaves(5, 5, torch.bfloat16)
    query, far_query, _, key, far_key, value = states
    views = build("rerope", 5, 5, 2)
    seen = torch.ones(5, 5).tril().bool()[None, None].clone()
    seen[:, :, 2] = False
    found, weights = remap.selected(
        query, key, far_query, far_key, value, SCALE, apart(views), additive(seen), 2, weights=True
    )
    assert found.dtype is weights.dtype is torch.bfloat16
    assert not found[:, :, 2].any()
    assert not weights[:, :, 2].any()
    found.sum().backward()
    assert all(each.grad.isfinite().all() for each in (query, far_query, key, far_key, value))
    assert not query.grad[:, :, 2].any()


def test_dropout_drops_weights_and_keeps_their_mean() -> None:
    views = build("self_extend", 40, 40, 6)
    arguments = (*views.all(), apart(views), additive(causal(views)), 6)
    _, whole = remap.selected(*arguments, weights=True)
    torch.manual_seed(0)
    found, kept = remap.selected(*arguments, dropout=0.25, weights=True)
    dropped = kept == 0
    assert abs(float(dropped[whole > 0].double().mean()) - 0.25) < 0.03
    torch.testing.assert_close(kept, torch.where(dropped, 0, whole / 0.75))
    torch.testing.assert_close(kept @ views.value.repeat_interleave(2, 1), found, **DOUBLE)


@pytest.mark.parametrize("case", ["ragged", "chunk", "chunk_inside_the_window", "one_token"])
def test_values_of_another_width_take_the_fallback(case: str) -> None:
    length, keys, window = CASES[case]
    views = build("self_extend", length, keys, window)
    views.value = draw(2, 2, keys, 5, seed=3)
    found = remap.two_regions(*views.two())
    assert found.shape == (2, 4, length, 5)
    torch.testing.assert_close(found, views.expected(causal(views)), **SINGLE)
    if length == keys:
        everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        torch.testing.assert_close(remap.three_regions(*views.three()), views.expected(everything), **SINGLE)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_in_one_graph_and_not_again_for_every_length() -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(remap.two_regions, fullgraph=True, backend=counter)
    for length in (61, 64, 50, 37):
        views = build("leaky_rerope", length, length, 16, heads=2)
        torch.testing.assert_close(compiled(*views.two()), views.expected(causal(views)), **SINGLE)
    assert counter.frame_count == 2  # the second length makes it a variable
    compiled = torch.compile(remap.three_regions, fullgraph=True, backend="eager")
    views = build("leaky_rerope", *CASES["ragged"])
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    torch.testing.assert_close(compiled(*views.three()), views.expected(everything), **SINGLE)


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        given = result if isinstance(result, (tuple, list)) else [result]
        self.numbers = max([self.numbers, *(each.numel() for each in given if torch.is_tensor(each))])
        return result


@pytest.mark.parametrize("kernel", ["two", "three"])
def test_memory_grows_with_the_length_only(kernel: str) -> None:
    largest = []
    for length in (1024, 2048):
        query, far_query, right_query, key, far_key, value = leaves(length, length, torch.float32, batch=1)
        with Largest() as record:
            if kernel == "two":
                found = remap.two_regions(query, key, far_query, far_key, value, 128, SCALE)
            else:
                found = remap.three_regions(query, key, far_query, right_query, far_key, value, 128, SCALE)
            found.sum().backward()
        largest.append(record.numbers)
    assert largest[1] <= 2.1 * largest[0]
    assert largest[1] < 2048 * 2048 / 8


def test_the_fallback_holds_a_bounded_number_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remap, "LOGITS", 1 << 14)
    query, far_query, _, key, far_key, value = (each.detach() for each in leaves(512, 512, torch.float32, batch=1))
    with Largest() as record:
        remap.two_regions(query, key, far_query, far_key, value[..., :5], 32, SCALE)
    assert record.numbers <= 1 << 14


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_the_fallback_caps_logits_and_has_sinks_as_gemma_2_and_gpt_oss_do(cap: float | None, has_sinks: bool) -> None:
    """Caps come before the mask; a sink takes its share of the weights and gives no value."""
    generator = torch.Generator().manual_seed(0)
    query, far_query = (torch.randn(1, 2, 9, 4, generator=generator) * 3 for _ in range(2))
    key, far_key, value = (torch.randn(1, 1, 9, 4, generator=generator) for _ in range(3))
    distance = torch.arange(9)[:, None] - torch.arange(9)
    mask = torch.zeros(9, 9).masked_fill(distance < 0, -torch.inf)
    sinks = torch.tensor([0.5, -1.0]) if has_sinks else None
    output, weights = remap.selected(
        query, key, far_query, far_key, value, 0.5,
        lambda begin, end: distance[None, begin:end], lambda begin, end: mask[None, None, begin:end], 3,
        cap=cap, sinks=sinks, weights=True,
    )  # fmt: skip
    logits = torch.where(distance < 3, query.double() @ key.double().mT, far_query.double() @ far_key.double().mT) / 2
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    parts = (logits + mask).exp()
    total = parts.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[None, :, None, None])
    torch.testing.assert_close(weights.double(), parts / total, rtol=0, atol=1e-6)
    torch.testing.assert_close(output.double(), parts / total @ value.double(), rtol=0, atol=1e-5)
