"""Attention in blocks of queries that share a scale, so that one pass over a text equals its generation with a cache.

A token is read at the scale of the text up to it. (With the scale of the whole text for all, as papers and transformers
have it, every layer above the first would depend on later tokens, and no cache could ever hold what one pass computes.)
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_posext.attention.interface import Attended, Call
from hf_posext.attention.kernel import attend
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


def block(call: Call, begin: int, end: int, query: Tensor, key: Tensor) -> Call:
    """The part of a call for queries begin to end, which meet the first keys.

    Without a mask, attention functions align queries and keys at their first token, but flash attention at the last
    one, which is what a block wants; for the others a block needs a mask, unless it is square or a single query.

    Args:
        call: of the whole forward; its mask is None, [B, S] for flash attention, or [B or 1, 1, L, S].
        begin: first query of the block.
        end: the query after the last.
        query: these queries at their scale, [B, H, end - begin, D].
        key: the first keys as these queries read them, [B, G, seen, D].

    Raises:
        PatchError: a mask that cannot be cut.
    """
    mask, seen = call.mask, key.shape[2]
    if mask is None:
        is_aligned = end - begin in (1, seen) or call.attention.__name__.startswith("flash")
        mask = None if is_aligned else causal(end - begin, seen, key.device)
    elif not torch.is_tensor(mask):
        raise PatchError(
            f"Dynamic scaling reads long text in blocks, and a {type(mask).__name__} cannot be cut into blocks. Call "
            '`set_attn_implementation("sdpa")`.'
        )
    elif mask.dim() == 2:
        mask = mask[:, :seen] if mask.shape[1] == call.key.shape[2] else mask
    elif mask.shape[2] > 1:
        mask = mask[:, :, begin:end, :seen]
    return replace(call, query=query, key=key, value=call.value[:, :, :seen], mask=mask)


def has_rows(mask: Any) -> bool:
    """Whether a mask tells queries apart, so that it may let a token see later ones."""
    return mask is not None and not (torch.is_tensor(mask) and mask.dim() == 2)


def causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """[1, 1, L, S] bool: the last query sees the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]


def run_causal(call: Call) -> Attended:
    """`Call.run` of a block whose last query sees the last key and whose mask says no more than that.

    transformers copies grouped keys for every head of queries where there is a mask, here for each block again; torch's
    CPU kernel needs no copies, and in float32 no mask either.
    """
    options = call.options
    plain = not any(options.get(name) for name in ("position_bias", "s_aux", "softcap", "dropout"))
    if call.mask is None or not plain or not is_cpu_sdpa(call):
        return call.run()
    if call.query.dtype == torch.float32:
        output = in_two_parts(call.query, call.key, call.value, options.get("scaling"))
    else:
        output = scaled_dot_product_attention(
            call.query, call.key, call.value, call.mask, scale=options.get("scaling"), enable_gqa=True
        )
    return output.transpose(1, 2).contiguous(), None


def in_two_parts(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention of a block: the keys before it, all of them seen, and its own, a square, joined by their sums.

    Each part is rounded to the dtype, so this is for float32: in half precision it would be rounded more often than
    attention in one piece.

    Args:
        query: [B, H, L, D].
        key: [B, G, S, D]; the last query sees the last one.
        value: [B, G, S, D].
        scale: multiplier of the logits, None for 1 / sqrt(D).
    """
    before = key.shape[2] - query.shape[2]
    together = query.reshape(*key.shape[:2], -1, query.shape[3])  # the kernel is faster with more queries for a key
    far, far_sum = attend(together, key[:, :, :before], value[:, :, :before], scale=scale)
    far, far_sum = far.reshape(query.shape), far_sum.reshape(query.shape[:3])
    near, near_sum = attend(query, key[:, :, before:], value[:, :, before:], 0.0, True, scale=scale)
    return torch.lerp(near, far, torch.sigmoid(far_sum - near_sum)[..., None])


def is_cpu_sdpa(call: Call) -> bool:
    """Whether a call may go to torch's CPU kernel itself, which gives no gradients."""
    return (
        call.attention is sdpa_attention_forward
        and call.key.device.type == "cpu"
        and call.key.shape[-1] == call.value.shape[-1]
        and not torch.is_grad_enabled()
    )


def as_rows(states: Tensor, queries: int) -> Tensor:
    """[B, ...] -> [B L, ...]: each row once for each of its queries, without a copy where possible."""
    return states[:, None].expand(-1, queries, *states.shape[1:]).flatten(0, 1)


def each_query_alone(call: Call) -> Attended:
    """A call in which every query has keys of its own, [B L, G, S, D]: no branch on values, for compilers.

    Its mask is [B or 1, 1, L, S], bool or additive.
    """
    batch, heads, length, width = call.query.shape
    query = call.query.transpose(1, 2).reshape(batch * length, heads, 1, width)
    mask = call.mask.expand(batch, -1, length, -1).transpose(1, 2).flatten(0, 1).unsqueeze(2)
    output, weights = replace(call, query=query, value=as_rows(call.value, length), mask=mask).run()
    output = output.reshape(batch, length, *output.shape[2:])
    if weights is not None:
        weights = weights.reshape(batch, length, *weights.shape[1:2], -1).transpose(1, 2)
    return output, weights


def joined(parts: list[Attended], keys: int) -> Attended:
    """Blocks put together again: outputs [B, L, H, D] and, where there are any, weights [B, H, L, S]."""
    if len(parts) == 1:
        return parts[0]
    output = torch.cat([part for part, _ in parts], dim=1)
    weights = [part for _, part in parts if part is not None]
    if len(weights) < len(parts):
        return output, None
    return output, torch.cat([pad(part, (0, keys - part.shape[-1])) for part in weights], dim=2)
