"""Attention that reads near keys at their true distance and far keys at a mapped one: SelfExtend, ReRoPE, leaky ReRoPE.

The caller turns queries and keys twice: the near views carry the true positions, the far views positions whose
difference is the mapped distance (SelfExtend, arXiv 2401.01325; ReRoPE, Su 2023). The logit of a pair is taken from the
near views where its distance is below the window, else from the far views.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from hf_posext.attention.kernel import takes
from hf_posext.attention.merged import causal_plan, exact_type, run, symmetric_plan
from hf_posext.attention.weights import Rows, mixed, normalised, products

LOGITS = 1 << 24  # logits held at once by the fallback: 64 MB of float32


def two_regions(
    query: Tensor, key: Tensor, far_query: Tensor, far_key: Tensor, value: Tensor, window: int, scale: float
) -> Tensor:
    """Causal attention, where keys `window` or more before the query are read in the far views.

    Memory grows with L, not with its square. Up to `window` keys this is plain attention, and the far views get no
    gradient.

    Args:
        query: [B, H, L, D], at the true positions; the last query stands on the last key.
        key: [B, G, S, D], H a multiple of G, S >= L.
        far_query: [B, H, L, D].
        far_key: [B, G, at least S - window, D], the first keys.
        value: [B, G, S, Dv].
        window: distances below it are near, at least 1.
        scale: multiplier of the logits.

    Returns:
        [B, H, L, Dv] of the dtype of the value.
    """
    length, keys = query.shape[2], key.shape[2]
    if keys <= window and length in (1, keys):
        return scaled_dot_product_attention(query, key, value, is_causal=length > 1, scale=scale, enable_gqa=True)
    if takes(query, key, value):
        plan = causal_plan(length, keys, window, exact_type(query))
        return run((query, far_query), (key, far_key), value, plan, scale)
    before = keys - length

    def distance(begin: int, end: int) -> Tensor:
        return distances(begin + before, end + before, keys, query.device)

    def seen(begin: int, end: int) -> Tensor:
        return torch.where(distance(begin, end) < 0, -torch.inf, 0.0)[:, None]

    far_key = pad(far_key, (0, 0, 0, max(0, keys - far_key.shape[2])))
    return selected(query, key, far_query, far_key, value, scale, distance, seen, window)[0]


def three_regions(
    query: Tensor,
    key: Tensor,
    far_query: Tensor,
    right_query: Tensor,
    far_key: Tensor,
    value: Tensor,
    window: int,
    scale: float,
) -> Tensor:
    """Attention to all keys, where those `window` or more before or after the query are read in far views.

    Args:
        query: [B, H, L, D], at the true positions.
        key: [B, G, L, D], H a multiple of G.
        far_query: [B, H, L, D], for keys before the query.
        right_query: [B, H, L, D], for keys after it.
        far_key: [B, G, L, D].
        value: [B, G, L, Dv].
        window: distances below it are near, at least 1.
        scale: multiplier of the logits.

    Returns:
        [B, H, L, Dv] of the dtype of the value. Up to `window` keys it is plain attention, and the far views get no
        gradient.
    """
    length = query.shape[2]
    if length <= window:
        return scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
    if takes(query, key, value):
        plan = symmetric_plan(length, window, exact_type(query))
        return run((query, far_query, right_query), (key, far_key), value, plan, scale)

    def distance(begin: int, end: int) -> Tensor:
        return distances(begin, end, length, query.device)

    return selected(
        query, key, far_query, far_key, value, scale, distance, everything, window, right_query=right_query
    )[0]


def selected(
    query: Tensor,
    key: Tensor,
    far_query: Tensor,
    far_key: Tensor,
    value: Tensor,
    scale: float,
    distance: Rows,
    seen: Callable[[int, int], Tensor | None],
    window: int,
    *,
    right_query: Tensor | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The same for any positions and mask, on any device and without a branch on values: it computes both logits.

    It goes over blocks of queries, but in one piece where it is compiled, so that lengths may stay unknown.

    Args:
        query: [B, H, L, D], at the true positions.
        key: [B, G, S, D], H a multiple of G.
        far_query: [B, H, L, D].
        far_key: [B, G, S, D].
        value: [B, G, S, Dv].
        scale: multiplier of the logits.
        distance: (begin, end) -> [B or 1, end - begin, S] int64, from all keys to these queries; negative where the key
            is after the query.
        seen: (begin, end) -> [B or 1, 1 or H, end - begin, S] float32 to be added, -inf where a key is not seen, or
            None.
        window: distances below it, on either side, are near.
        right_query: [B, H, L, D], for far keys after the query; None if it is `far_query`.
        cap: logits x become cap tanh(x / cap) before the mask.
        sinks: [H], logits of a key without a value that every query sees.
        dropout: share of the weights to drop.
        weights: whether to return them.

    Returns:
        [B, H, L, Dv], and the weights [B, H, L, S] of the dtype of the query if they are asked for. A query that sees
        no key gives zeros.
    """
    batch, heads, length, _ = query.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    key, far_key, value = key.to(exact), far_key.to(exact), value.to(exact)

    def block(begin: int, end: int) -> tuple[Tensor, Tensor]:
        apart, here = distance(begin, end)[:, None], slice(begin, end)
        near, far = (products(q[:, :, here].to(exact), k) for q, k in ((query, key), (far_query, far_key)))
        logits = torch.where(apart.abs() < window, near, far)
        if right_query is not None:
            logits = torch.where(apart <= -window, products(right_query[:, :, here].to(exact), far_key), logits)
        logits = logits * scale
        if cap is not None:
            logits = cap * (logits / cap).tanh()
        share = normalised(logits, seen(begin, end), sinks)
        share = drop(share, dropout) if dropout else share
        return mixed(share, value).to(query.dtype), share.to(query.dtype) if weights else share[..., :0]

    compiling = torch.compiler.is_compiling()
    rows = length if compiling else max(1, min(length, LOGITS // max(1, batch * heads * key.shape[2])))
    parts = []
    for begin in range(0, length, rows) if rows < length else (0,):
        end = min(begin + rows, length)
        if torch.is_grad_enabled() and not compiling and not weights:  # else the logits of all blocks would be kept
            parts.append(checkpoint(block, begin, end, use_reentrant=False))
        else:
            parts.append(block(begin, end))
    return torch.cat([each for each, _ in parts], 2), torch.cat([each for _, each in parts], 2) if weights else None


def distances(begin: int, end: int, keys: int, device: torch.device) -> Tensor:
    """[1, end - begin, S] int64 from keys 0, 1, ... to queries at begin, begin + 1, ..."""
    return (torch.arange(begin, end, device=device)[:, None] - torch.arange(keys, device=device))[None]


def everything(begin: int, end: int) -> None:
    """No mask."""
