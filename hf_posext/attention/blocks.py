"""Attention in blocks of queries that share a scale, so that one pass over a text equals its generation with a cache.

A token is read at the scale of the text up to it. (With the scale of the whole text for all, as papers and transformers
have it, every layer above the first would depend on later tokens, and no cache could ever hold what one pass computes.)
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_posext.attention.interface import Attention
from hf_posext.errors import PatchError


def runs(levels: Tensor) -> list[tuple[int, int, bool]]:
    """Maximal runs of tokens at which the level of no row changes: (begin, end, whether all levels are 0).

    Args:
        levels: [B, L]; read on the host, the one synchronisation of a forward with more than one token.
    """
    changes = (levels[:, 1:] != levels[:, :-1]).any(0)
    edges = [0, *(changes.nonzero().flatten() + 1).tolist(), levels.shape[1]]
    still = (levels == 0).all(0).tolist()
    return [(begin, end, still[begin]) for begin, end in pairwise(edges)]


def mask_of_block(mask: Any, begin: int, end: int, seen: int, attention: Attention, keys: Tensor) -> Any:
    """The mask under which queries begin to end meet the first `seen` of S keys.

    Without a mask, attention functions align queries and keys at their first token, but flash attention at the last
    one, which is what a block wants; for the others such a block needs a mask of its own, unless it is square or a
    single query.

    Args:
        mask: of the whole forward: None, [B, S] for flash attention, or [B or 1, 1, L, S].
        begin: first query of the block.
        end: the query after the last.
        seen: keys that the block is given.
        attention: the model's own attention function.
        keys: all keys of the forward, [B, G, S, D].

    Raises:
        PatchError: a mask that cannot be cut.
    """
    if mask is None:
        is_aligned = end - begin in (1, seen) or attention.__name__.startswith("flash")
        return None if is_aligned else causal(end - begin, seen, keys.device)
    if not torch.is_tensor(mask):
        raise PatchError(
            f"Dynamic scaling reads long text in blocks, and a {type(mask).__name__} cannot be cut into blocks. Call "
            '`set_attn_implementation("sdpa")`.'
        )
    if mask.dim() == 2:
        return mask[:, :seen] if mask.shape[1] == keys.shape[2] else mask
    return mask[:, :, begin:end, :seen] if mask.shape[2] > 1 else mask


def causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """[1, 1, L, S] bool: the last query sees the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]


def attend_block(
    attention: Attention, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """`attention` of one block.

    transformers copies grouped keys for every head of queries when there is a mask, here for every block again. On CPU
    torch needs no copies.
    """
    plain = not any(options.get(name) is not None for name in ("position_bias", "s_aux", "softcap"))
    if attention is not sdpa_attention_forward or key.device.type != "cpu" or not plain or mask is None:
        return attention(module, query, key, value, mask, **options)
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=options.get("dropout", 0.0),
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


def as_rows(states: Tensor, queries: int) -> Tensor:
    """[B, ...] -> [B L, ...]: each row once for each of its queries, without a copy where possible."""
    return states[:, None].expand(-1, queries, *states.shape[1:]).flatten(0, 1)


def each_query_alone(
    attention: Attention, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention in which every query has keys of its own: no branch on values, for compilers.

    Args:
        attention: the model's own attention function.
        module: the attention module.
        query: [B, H, L, D].
        key: [B L, G, S, D].
        value: [B, G, S, D].
        mask: [B, 1, L, S], bool or additive.
        options: keyword arguments of `attention`.
    """
    batch, heads, length, width = query.shape
    rows = query.transpose(1, 2).reshape(batch * length, heads, 1, width)
    row_mask = mask.expand(batch, -1, length, -1).transpose(1, 2).flatten(0, 1).unsqueeze(2)
    output, weights = attention(module, rows, key, as_rows(value, length), row_mask, **options)
    output = output.reshape(batch, length, *output.shape[2:])
    if weights is not None:
        weights = weights.reshape(batch, length, *weights.shape[1:2], -1).transpose(1, 2)
    return output, weights


def joined(parts: list[tuple[Tensor, Tensor | None]], keys: int) -> tuple[Tensor, Tensor | None]:
    """Blocks put together again: outputs [B, L, H, D] and, where there are any, weights [B, H, L, S]."""
    if len(parts) == 1:
        return parts[0]
    output = torch.cat([part for part, _ in parts], dim=1)
    weights = [part for _, part in parts if part is not None]
    if len(weights) < len(parts):
        return output, None
    return output, torch.cat([pad(part, (0, keys - part.shape[-1])) for part in weights], dim=2)
