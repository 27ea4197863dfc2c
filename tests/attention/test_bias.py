"""The general way of attention with a bias, and what all tests of biases share: the full matrix in double precision."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_posext.attention import bias

SCALE = 0.125
WIDTH = 16
ERROR = {torch.float32: 2e-6, torch.bfloat16: 0.012, torch.float16: 2e-3}  # against the largest number of a result
SLOPES = {
    6: 2.0 ** -torch.tensor([2.0, 4, 6, 8, 1, 3]),
    8: 2.0 ** -torch.arange(1.0, 9),
    12: 2.0 ** -torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
}
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def states(
    heads: int,
    groups: int,
    length: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    width: int = WIDTH,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, in the layout of a model, keys and values."""
    source = torch.Generator().manual_seed(length + size)
    query = torch.randn(batch, length, heads, width, generator=source).to(dtype).transpose(1, 2)
    key, value = (torch.randn(batch, groups, size, width, generator=source).to(dtype) for _ in range(2))
    return query, key, value


def distances(length: int, size: int) -> Tensor:
    """[L, S] float64, negative for later keys."""
    return (torch.arange(size - length, size)[:, None] - torch.arange(size)).double()


def causal_bias(slopes: Tensor, length: int, size: int) -> Tensor:
    distance = distances(length, size)
    return (-slopes.double()[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)


def symmetric_bias(before: Tensor, after: Tensor, length: int) -> Tensor:
    distance = distances(length, length)
    slopes = torch.where(distance >= 0, -before.double()[:, None, None], after.double()[:, None, None])
    return slopes * distance


def window_bias(width: int, sinks: int, causal: bool, length: int, size: int) -> Tensor:
    distance = distances(length, size)
    seen = (distance.abs() < width) | (torch.arange(size) < sinks)
    return torch.zeros(length, size).double().masked_fill(~seen | ((distance < 0) & causal), -torch.inf)


def exact(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float = SCALE) -> Tensor:
    """Attention in double precision."""
    share = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(share, 1) for part in (key, value))
    return (query.double() @ key.mT * scale + mask).softmax(-1) @ value


def check(way: Way, mask: Tensor, given: tuple[Tensor, Tensor, Tensor], error: float | None = None) -> None:
    """An output and its three gradients against the exact ones."""
    ours = [part.detach().requires_grad_() for part in given]
    theirs = [part.detach().double().requires_grad_() for part in given]
    result, expected = way(*ours), exact(*theirs, mask)
    upstream = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    assert result.dtype is given[0].dtype
    pairs = [(result, expected)]
    pairs += list(
        zip(
            torch.autograd.grad(result, ours, upstream),
            torch.autograd.grad(expected, theirs, upstream.double()),
            strict=True,
        )
    )
    for one, other in pairs:
        bound = (error or ERROR[result.dtype]) * max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(one.double(), other, rtol=0, atol=bound)
    with torch.no_grad():
        torch.testing.assert_close(way(*given), result.detach(), rtol=0, atol=0)


class Largest(TorchDispatchMode):
    """The largest number of elements that any result of an operation takes in memory."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, Tensor):
                self.numbers = max(self.numbers, result.untyped_storage().nbytes() // result.element_size())
        return results


@pytest.mark.parametrize("way", ["causal", "symmetric", "windowed"])
def test_other_dtypes_and_widths_take_the_general_way(way: str) -> None:
    """Double precision, and values wider than keys, have no kernel."""
    slopes = SLOPES[6]
    query, key, value = states(6, 3, 300, 300, torch.float64)
    wide = torch.cat([value, value[..., :5]], dim=-1)
    ways: dict[str, tuple[Way, Tensor]] = {
        "causal": (lambda *parts: bias.causal_linear(*parts, slopes, SCALE), causal_bias(slopes, 300, 300)),
        "symmetric": (
            lambda *parts: bias.symmetric_linear(*parts, slopes, slopes, SCALE), symmetric_bias(slopes, slopes, 300),
        ),
        "windowed": (lambda *parts: bias.windowed(*parts, 50, 2, SCALE), window_bias(50, 2, True, 300, 300)),
    }  # fmt: skip
    run, mask = ways[way]
    check(run, mask, (query, key, wide), 1e-9)
    check(run, mask, (query.float(), key.float(), wide.float()))


def test_saved_memory_is_linear_in_the_general_way() -> None:
    """A slope that learns: nothing of the size of the weights is kept for the backward pass."""
    length, slopes = 1024, torch.tensor([0.5, 0.1], requires_grad=True)
    query, key, value = states(2, 2, length, length)
    places = torch.arange(length)[None]
    kept = 0

    def pack(saved: Tensor) -> Tensor:
        nonlocal kept
        kept = max(kept, saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        result, _ = bias.masked(
            query,
            key,
            value,
            SCALE,
            lambda first, last: bias.distance_bias(slopes, None, places[:, first:last], places),
        )
    assert kept <= query.numel()
    (gradient,) = torch.autograd.grad(result.square().sum(), slopes)
    reference = slopes.detach().double().requires_grad_()
    distance = distances(length, length).abs()
    expected = exact(query, key, value, -reference[:, None, None] * distance).square().sum()
    torch.testing.assert_close(gradient.double(), torch.autograd.grad(expected, reference)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [True, False])
def test_masked(weights: bool, dtype: torch.dtype) -> None:
    """Any mask, per row of a batch; some queries see nothing, in a whole block of queries and between others."""
    length, size = 530, 600
    query, key, value = states(4, 2, length, size, dtype, batch=2)
    mask = torch.randn(2, 4, length, size, generator=torch.Generator().manual_seed(2))
    mask[torch.rand(2, 1, length, size, generator=torch.Generator().manual_seed(3)).expand_as(mask) < 0.3] = -torch.inf
    blind = torch.zeros(length, dtype=torch.bool)
    blind[[3, 300, 529]] = blind[256:280] = True
    mask[0, :, blind] = -torch.inf
    ours = [part.detach().requires_grad_() for part in (query, key, value)]
    result, shares = bias.masked(*ours, SCALE, lambda first, last: mask[:, :, first:last], weights=weights)
    gradients = torch.autograd.grad(result.float().square().sum(), ours)
    assert torch.equal(result[0, :, blind], torch.zeros_like(result[0, :, blind]))
    assert torch.equal(gradients[0][0, :, blind], torch.zeros_like(gradients[0][0, :, blind]))
    assert all(gradient.isfinite().all() for gradient in gradients)

    theirs = [part.detach().double().requires_grad_() for part in (query, key, value)]
    open_mask = mask.double().clone()
    open_mask[0, :, blind] = 0
    sees = torch.ones(2, 1, length, 1).double()
    sees[0, :, blind] = 0
    expected = exact(*theirs, open_mask) * sees
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=ERROR[dtype])
    wanted = torch.autograd.grad(expected.square().sum(), theirs)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2 * ERROR[dtype] * float(other.abs().max()))
    if weights:
        assert shares is not None
        assert shares.dtype is dtype
        repeated = key.double().repeat_interleave(2, 1)
        exactly = (query.double() @ repeated.mT * SCALE + open_mask).softmax(-1) * sees
        torch.testing.assert_close(shares.double(), exactly, rtol=0, atol=ERROR[dtype] / 2)
    else:
        assert shares is None


def test_dropout_of_the_general_way() -> None:
    """Weights are left out with the probability asked for, and the others grow so that the mean stays."""
    query, key, value = states(2, 2, 400, 400)
    torch.manual_seed(0)
    rows = lambda first, last: torch.zeros(1, 1, last - first, 400)  # noqa: E731
    result, shares = bias.masked(query, key, value, SCALE, rows, dropout=0.25, weights=True)
    _, whole = bias.masked(query, key, value, SCALE, rows, weights=True)
    assert shares is not None
    assert whole is not None
    kept = shares != 0
    assert float(kept.double().mean()) == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(shares[kept], whole[kept] / 0.75)
    torch.testing.assert_close(result, shares @ value)


def test_the_general_way_can_be_traced() -> None:
    slopes = SLOPES[6]

    def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        places = torch.arange(300)[None]

        def rows(first: int, last: int) -> Tensor:
            mask = bias.distance_bias(slopes, slopes, places[:, first:last], places)
            return mask.masked_fill(~seen[:, None, first:last], -torch.inf)

        wide = torch.cat([value, value], dim=-1)
        parts = bias.masked(query, key, value, SCALE, rows)[0], bias.masked(query, key, wide, SCALE, rows)[0]
        return torch.cat([*parts, bias.causal_linear(query, key, value, slopes, SCALE)], dim=-1)

    given = states(6, 3, 300, 300)
    seen = torch.rand(1, 300, 300, generator=torch.Generator().manual_seed(0)) < 0.5
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given, seen), attend(*given, seen), rtol=0, atol=2e-6)


def test_distance_bias() -> None:
    before, after = torch.tensor([0.5, 1 / 3], requires_grad=True), torch.tensor([0.25, 1.0], requires_grad=True)
    slopes = before.tolist(), after.tolist()
    queries, keys = torch.tensor([[32767, 5], [3, 4]]), torch.tensor([[0, 32766, 7, 40000]])
    result = bias.distance_bias(before, after, queries, keys)
    assert result.shape == (2, 2, 2, 4)
    assert result.dtype is torch.float32
    for row in range(2):
        for head in range(2):
            for one in range(2):
                for other in range(4):
                    apart = int(queries[row, one] - keys[0, other])
                    expected = -slopes[0][head] * apart if apart >= 0 else slopes[1][head] * apart
                    assert float(result.detach()[row, head, one, other]) == pytest.approx(expected, rel=1e-7)
    result.sum().backward()
    distance = (queries[:, :, None] - keys[:, None]).double()
    assert before.grad is not None
    assert after.grad is not None
    torch.testing.assert_close(before.grad.double(), -distance.clamp(min=0).sum().expand(2))
    torch.testing.assert_close(after.grad.double(), distance.clamp(max=0).sum().expand(2))
    alike = bias.distance_bias(before, None, queries, keys)
    torch.testing.assert_close(alike, bias.distance_bias(before, before, queries, keys))
