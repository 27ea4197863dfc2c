"""Attention with remapped distances, against pairs rotated one by one in double precision, each by its own distance."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from hf_posext.attention import merged, remap

WIDTH, SCALE, GROUP, SLOPE = 8, 0.35, 3, 0.25
FREQUENCIES = 100.0 ** -(torch.arange(WIDTH // 2).double() / (WIDTH // 2))
DOUBLE = {"rtol": 0, "atol": 1e-11}
SINGLE = {"rtol": 0, "atol": 5e-6}
SEEN_NONE = -torch.inf
METHODS = ("self_extend", "rerope", "leaky_rerope")


@pytest.fixture
def _short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts have all kinds of blocks too."""
    monkeypatch.setattr(merged, "BLOCK", 8)


short_blocks = pytest.mark.usefixtures("_short_blocks")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def as_pairs(states: Tensor) -> Tensor:
    """[..., D] -> [..., D / 2] complex: channel c and channel c + D / 2."""
    return torch.complex(*states.chunk(2, dim=-1))


def rotated(states: Tensor, positions: Tensor) -> Tensor:
    """[B, H, L, D] at positions [B or 1, L]."""
    angles = positions.double()[:, None, :, None] * FREQUENCIES
    turned = as_pairs(states) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def mapped(method: str, query: Tensor, key: Tensor, window: int) -> Tensor:
    """The relative position at which a pair is read, by the papers, from int64 positions that broadcast."""
    apart = (query - key).abs()
    sign = torch.where(query >= key, 1, -1)
    if method == "self_extend":
        far = (query // GROUP - key // GROUP) * sign + window - window // GROUP
    elif method == "rerope":
        far = torch.full_like(apart, window)
    else:
        far = window + (apart - window) * SLOPE
    return sign * torch.where(apart < window, apart, far).double()


@dataclass
class Views:
    """What the caller of the kernels gives, and what it comes from."""

    unrotated: tuple[Tensor, Tensor]
    near: tuple[Tensor, Tensor]
    far: tuple[Tensor, Tensor]
    right: Tensor
    value: Tensor
    positions: tuple[Tensor, Tensor]
    method: str
    window: int

    def pairs(self) -> Tensor:
        """Logits [B, H, L, S]: each pair of vectors at its own relative position."""
        query, key = map(as_pairs, self.unrotated)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        at, of = self.positions[0][:, :, None], self.positions[1][:, None, :]
        angles = mapped(self.method, at, of, self.window)[:, None, :, :, None] * FREQUENCIES
        turn = torch.polar(torch.ones_like(angles), angles)
        return SCALE * (query[:, :, :, None] * key[:, :, None].conj() * turn).real.sum(-1)

    def expected(self, seen: Tensor) -> Tensor:
        """Attention of these logits to the keys that are seen, bool that broadcasts to [B, H, L, S]."""
        weights = self.pairs().masked_fill(~seen, -torch.inf).softmax(-1)
        return weights @ self.value.repeat_interleave(weights.shape[1] // self.value.shape[1], 1)

    def two(self) -> tuple:
        """Arguments of `two_regions`; of the far keys no more than are needed."""
        query, key = self.near
        far_query, far_key = self.far
        needed = max(key.shape[2] - self.window, 0)
        return query, key, far_query, far_key[:, :, :needed], self.value, self.window, SCALE

    def three(self) -> tuple:
        """Arguments of `three_regions`."""
        return *self.near, self.far[0], self.right, self.far[1], self.value, self.window, SCALE

    def all(self) -> tuple:
        """First arguments of `selected`."""
        return *self.near, *self.far, self.value, SCALE


def build(
    method: str,
    length: int,
    keys: int,
    window: int,
    *,
    heads: int = 4,
    groups: int = 2,
    positions: tuple[Tensor, Tensor] | None = None,
) -> Views:
    """Random states of two rows, the last query on the last key, or both at these positions, [B or 1, L or S]."""
    query, key = draw(2, heads, length, WIDTH, seed=1), draw(2, groups, keys, WIDTH, seed=2)
    at, of = positions or (torch.arange(keys - length, keys)[None], torch.arange(keys)[None])
    if method == "self_extend":
        shift, far_at, far_of = window - window // GROUP, at // GROUP, of // GROUP
    elif method == "rerope":
        shift, far_at, far_of = window, at * 0, of * 0
    else:
        shift, far_at, far_of = window - window * SLOPE, at * SLOPE, of * SLOPE
    return Views(
        (query, key),
        (rotated(query, at), rotated(key, of)),
        (rotated(query, far_at + shift), rotated(key, far_of)),
        rotated(query, far_at - shift),
        draw(2, groups, keys, WIDTH, seed=3),
        (at, of),
        method,
        window,
    )


def causal(views: Views) -> Tensor:
    at, of = views.positions
    return (at[:, :, None] >= of[:, None, :])[:, None]


CASES = {
    "whole": (64, 64, 16),
    "ragged": (61, 61, 16),
    "window_not_in_length": (61, 61, 7),
    "window_1": (33, 33, 1),
    "window_2": (33, 33, 2),
    "one_far_key": (33, 33, 32),
    "chunk": (16, 61, 16),
    "short_chunk": (3, 61, 16),
    "chunk_at_the_window": (9, 20, 16),
    "chunk_inside_the_window": (9, 14, 16),
    "one_token": (1, 61, 16),
    "one_token_one_far_key": (1, 17, 16),
}


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


def scores(
    query: Tensor, key: Tensor, far_query: Tensor, far_key: Tensor, window: int, right_query: Tensor | None = None
) -> Tensor:
    """Logits from two (or three) whole score matrices, [B, H, L, S]; the last query is the last key."""
    copies, length, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, far_key = key.repeat_interleave(copies, 1), far_key.repeat_interleave(copies, 1)
    apart = torch.arange(keys - length, keys)[:, None] - torch.arange(keys)
    chosen = torch.where(apart.abs() < window, query @ key.mT, far_query @ far_key.mT)
    if right_query is None:
        return (chosen * SCALE).masked_fill(apart < 0, -torch.inf)
    return torch.where(apart <= -window, right_query @ far_key.mT, chosen) * SCALE


def attended(logits: Tensor, value: Tensor) -> Tensor:
    return logits.softmax(-1) @ value.repeat_interleave(logits.shape[1] // value.shape[1], 1)


def leaves(length: int, keys: int, dtype: torch.dtype = torch.float64, batch: int = 2) -> list[Tensor]:
    """query, far_query, right_query, key, far_key, value; the kernels read them through a transposed layout."""
    shapes = [(batch, length, 4, WIDTH)] * 3 + [(batch, keys, 2, WIDTH)] * 3
    return [draw(*shape, seed=seed).to(dtype).transpose(1, 2).requires_grad_() for seed, shape in enumerate(shapes)]


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


def check_gradients(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Same output and same gradients of a random weighting; None counts as zero."""
    torch.testing.assert_close(found, expected, **DOUBLE)
    weight = draw(*found.shape, seed=9)
    ours = torch.autograd.grad(found, inputs, weight, allow_unused=True)
    theirs = torch.autograd.grad(expected, inputs, weight)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.zeros_like(their) if our is None else our, their, **DOUBLE)


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


@pytest.fixture
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before; and pytest does not collect the compiler's own trace, which takes most of the time."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
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
