"""Attention with additive biases by distance (ALiBi, arXiv:2108.12409) and with sliding windows.

On CPU these run in torch's flash kernel, on strided views of one vector per head; elsewhere, when traced, and for any
other mask, they run through `masked`. Memory is linear in the lengths: no tensor of all queries by all keys is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import dropout as dropped
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hf_posext.attention import cover, toeplitz
from hf_posext.attention.kernel import takes
from hf_posext.attention.toeplitz import Bias
from hf_posext.attention.weights import Rows, mixed, normalised, products

FAST = (torch.float32, torch.bfloat16, torch.float16)
FEW = 16  # for fewer queries, looking for keys to leave out costs as much as it saves


def is_fast(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a plan for torch's CPU kernel serves these."""
    return takes(query, key, value) and query.dtype in FAST


def causal_linear(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, scale: float, *, prune: bool = True
) -> Tensor:
    """Causal attention with the bias -slope times distance (ALiBi), without a mask.

    Args:
        query: [B, H, L, D].
        key: [B, G, S, D], H a multiple of G; the last query stands on the last key, S >= L.
        value: [B, G, S, D of values].
        slopes: [H] float32, none negative; they get no gradient.
        scale: multiplier of the logits.
        prune: on CPU, leave out keys that provably weigh together less than 2^-26 of the query's own key.

    Returns:
        [B, H, L, D of values], differentiable in query, key and value.
    """
    fast = is_fast(query, key, value)
    if fast and query.shape[2] == 1:
        past = _past(tuple(slopes.tolist()), key.shape[2])
        return scaled_dot_product_attention(query, key, value, past, scale=scale, enable_gqa=True)
    (heads, length), (groups, size) = query.shape[1:3], key.shape[1:3]
    if not fast:
        slopes = slopes.detach()
        places = torch.arange(size, device=query.device)[None]

        def rows(first: int, last: int) -> Tensor:
            own = places[:, size - length + first : size - length + last]
            return distance_bias(slopes, None, own, places).where(
                own[:, None, :, None] >= places[:, None, None], -torch.inf
            )

        return masked(query, key, value, scale, rows)[0]
    listed = tuple(slopes.tolist())
    slopes = slopes.detach().float()
    ramp = torch.outer(slopes, torch.arange(1.0 - size, min(cover.FAR, length)))
    ramp[:, size:] = -torch.inf
    starts, ends = cover.everything(heads, length, size, True)
    steep = cover.steep(listed, size, heads // groups) if prune and length >= FEW else range(0)
    if steep:
        some, few = slice(steep[0], steep[-1] + 1), slice(steep[0] * groups // heads, (steep[-1] + 1) * groups // heads)
        starts[some], ends[some] = cover.needed(query[:, some], key[:, few], slopes[some], None, scale)
    whole = cover.undivided(starts, listed, length, size)
    plan = cover.plan(starts, ends, length, size, groups, True, whole)
    columns = torch.outer(slopes, torch.arange(size) - size // 2.0)
    return toeplitz.run(query, key, value, Bias(ramp, size - 1, size - length, columns=columns), plan, scale)


@lru_cache(maxsize=4)  # all layers of a step ask for the same
def _past(slopes: tuple[float, ...], size: int) -> Tensor:
    """[1, H, 1, size]: the bias of the last query for the last `size` keys."""
    with torch.inference_mode(False):  # so that it can be trained with later
        return _long_past(slopes, 1 << (size - 1).bit_length())[..., -size:]


@lru_cache(maxsize=4)  # all steps of a generation ask for the same
def _long_past(slopes: tuple[float, ...], size: int) -> Tensor:
    """`_past` for some keys more."""
    with torch.inference_mode(False):
        return torch.outer(torch.tensor(slopes), torch.arange(1.0 - size, 1.0))[None, :, None]


def symmetric_linear(
    query: Tensor, key: Tensor, value: Tensor, before: Tensor, after: Tensor, scale: float, *, prune: bool = True
) -> Tensor:
    """Attention in both directions with a bias linear in the distance, without a mask.

    Args:
        query: [B, H, L, D].
        key: [B, G, L, D], H a multiple of G.
        value: [B, G, L, D of values].
        before: [H] float32, none negative: the bias of a key d tokens before its query is -before d; no gradient.
        after: [H] float32, none negative: the same for keys after it.
        scale: multiplier of the logits.
        prune: on CPU, leave out keys that on their side weigh together less than 2^-26 of the query's own key.

    Returns:
        [B, H, L, D of values], differentiable in query, key and value.
    """
    before, after = before.detach().float(), after.detach().float()
    heads, length, groups = *query.shape[1:3], key.shape[1]
    if not is_fast(query, key, value):
        places = torch.arange(length, device=query.device)[None]
        return masked(
            query, key, value, scale, lambda first, last: distance_bias(before, after, places[:, first:last], places)
        )[0]
    down = torch.arange(1.0 - length, 1.0)
    ramp = torch.cat([torch.outer(before, down), torch.outer(after, down.flip(0)[1:])], dim=1)
    starts, ends = cover.everything(heads, length, length, False)
    if prune and length >= FEW and cover.steep(torch.maximum(before, after).tolist(), length, 1):
        starts, ends = cover.needed(query, key, before, after, scale)
    plan = cover.plan(starts, ends, length, length, groups, False, [False] * heads)
    return toeplitz.run(query, key, value, Bias(ramp, length - 1, 0), plan, scale)


def windowed(
    query: Tensor, key: Tensor, value: Tensor, width: int, sinks: int, scale: float, *, causal: bool = True
) -> Tensor:
    """Attention to the keys less than `width` tokens away and to the first `sinks` keys, without a mask.

    Args:
        query: [B, H, L, D].
        key: [B, G, S, D], H a multiple of G; the last query stands on the last key, S >= L.
        value: [B, G, S, D of values].
        width: at least 1; 1 means the own key alone.
        sinks: first keys that every query sees, in causal attention from their own place on.
        scale: multiplier of the logits.
        causal: no query sees a later key.

    Returns:
        [B, H, L, D of values], differentiable in query, key and value; the work is linear in L.
    """
    (heads, length), (groups, size) = query.shape[1:3], key.shape[1:3]
    blocks = cover.sliding(length, size, width, sinks, causal)
    if length > 1 and is_fast(query, key, value):
        near, far = cover.ramps(size, width, sinks, causal)
        bias = Bias(near, size - 1, size - length, sinks, far)
        plan = cover.sliding_plan(blocks, heads, groups, size - length, causal, sinks)
        return toeplitz.run(query, key, value, bias, plan, scale)
    parts = []
    for first, last, begin, end in blocks:
        places, keys, values = torch.arange(begin, end), key[:, :, begin:end], value[:, :, begin:end]
        if begin > 0 and sinks > 0:
            places = torch.cat([torch.arange(sinks), places])
            keys, values = (torch.cat([x[:, :, :sinks], y], dim=2) for x, y in ((key, keys), (value, values)))
        own = torch.arange(size - length + first, size - length + last)[:, None]
        hidden = ((own - places).abs() >= width) & (places >= sinks) | (places > own if causal else places < 0)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)[None, None].to(query.device)
        parts.append(masked(query[:, :, first:last], keys, values, scale, lambda *_, mask=mask: mask)[0])
    return torch.cat(parts, dim=2)


def distance_bias(before: Tensor, after: Tensor | None, query_places: Tensor, key_places: Tensor) -> Tensor:
    """The bias linear in the distance, from whole numbers, so that places far from 0 lose no precision.

    Args:
        before: [H]; a key d places before its query has the bias -before d.
        after: [H], the same for keys behind it; None takes `before`. Whether they are seen is for the caller.
        query_places: [B or 1, L] int64.
        key_places: [B or 1, S] int64.

    Returns:
        [B or 1, H, L, S] float32, differentiable in the slopes.
    """
    distance = (query_places[:, None, :, None] - key_places[:, None, None]).float()
    before = before.float()[:, None, None]
    if after is None:
        return -before * distance.abs()
    return torch.where(distance >= 0, -before, after.float()[:, None, None]) * distance


def masked(
    query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Rows, *, dropout: float = 0.0, weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention with any bias, which is asked for in blocks of queries; a query that sees no key gives zeros.

    Training, too, needs memory linear in the lengths: the blocks are computed again in the backward pass.

    Args:
        query: [B, H, L, D].
        key: [B, G, S, D], H a multiple of G.
        value: [B, G, S, D of values].
        scale: multiplier of the logits.
        rows: for queries first to last (excluded) the bias [B or 1, H or 1, last - first, S] float32, -inf where a
            key is not seen.
        dropout: probability with which a weight is left out.
        weights: whether the weights are wanted.

    Returns:
        The output [B, H, L, D of values], and the weights [B, H, L, S] in the dtype of the query, or None.
    """
    found = []
    for first, last in cover.spans(query.shape[2]):
        block = partial(_attend, scale=scale, rows=partial(rows, first, last), dropout=dropout, weights=weights)
        states = query if last - first == query.shape[2] else query[:, :, first:last]
        if torch.is_grad_enabled() and not weights and not torch.compiler.is_compiling():
            found.append(checkpoint(block, states, key, value, use_reentrant=False))
        else:
            found.append(block(states, key, value))
    if len(found) == 1:
        return found[0]
    output = torch.cat([part for part, _ in found], dim=2)
    return output, torch.cat([part for _, part in found], dim=2) if weights else None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, rows: Callable[[], Tensor], dropout: float, weights: bool
) -> tuple[Tensor, Tensor | None]:
    """`masked` of one block of queries."""
    bias = rows()
    same = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]
    if query.device.type == "cpu" and query.dtype in FAST and same and not (dropout or weights or bias.requires_grad):
        return scaled_dot_product_attention(query, key, value, bias, scale=scale, enable_gqa=True), None
    dtype = torch.promote_types(query.dtype, torch.float32)
    shares = normalised(products(query.to(dtype), key.to(dtype)) * scale, bias).to(query.dtype)
    shares = dropped(shares, dropout) if dropout else shares
    return mixed(shares.to(value.dtype), value), shares if weights else None
