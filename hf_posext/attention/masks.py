"""What the mask of an attention call says, for adapters that compute attention themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_posext.attention.blocks import causal
from hf_posext.attention.interface import Call
from hf_posext.attention.reading import Forward
from hf_posext.attention.weights import Rows
from hf_posext.errors import PatchError

ABLE = ("eager", "sdpa")
"""Implementations whose masks are tensors and whose result does not depend on how it is computed."""


def in_one_dtype(call: Call) -> Call:
    """A call whose states have one dtype: under autocast rotated ones come in float32 beside values in less."""
    query, key, value = call.query, call.key, call.value
    if query.dtype == key.dtype == value.dtype:
        return call
    return replace(call, query=query.to(value.dtype), key=key.to(value.dtype))


def is_eager(call: Call) -> bool:
    """Whether the model runs with eager attention, which also answers with its weights."""
    return call.attention is not sdpa_attention_forward


def scale_of(call: Call) -> float:
    """What logits are multiplied by."""
    scale = call.options.get("scaling")
    return float(call.query.shape[-1] ** -0.5 if scale is None else scale)


def dropout_of(call: Call) -> float:
    """Probability with which weights are dropped."""
    return float(call.options.get("dropout") or 0.0)


def is_special(call: Call) -> bool:
    """Whether the model's own function does more to its logits than scale and mask them; sdpa knows no caps, sinks."""
    names = ("position_bias", "softcap", "s_aux") if is_eager(call) else ("position_bias",)
    return any(call.options.get(name) is not None for name in names)


def places(call: Call, forward: Forward) -> tuple[Tensor, Tensor]:
    """Places in their row, int64, of queries [B or 1, L] and keys [B or 1, S]; the first of several axes."""
    keys = forward.in_row(forward.key_positions(call.key.shape[2]))[0]
    return forward.in_row(forward.now.positions)[0].to(call.query.device), keys.to(call.query.device)


def is_gapless(call: Call, forward: Forward) -> bool:
    """Whether the keys stand one after the other and the last queries on the last keys; waits for a device."""
    length, keys = call.query.shape[2], call.key.shape[2]

    def look() -> bool:
        query_places, key_places = places(call, forward)
        follows = (key_places.diff(dim=-1) == 1).all()
        return length <= keys and bool(follows & (key_places[:, keys - length :] == query_places).all())

    return forward.remembered(f"gapless {length} {keys}", look)


def is_plain(call: Call, forward: Forward, is_causal: bool) -> bool:
    """Whether mask and positions say nothing: each query meets all keys (up to itself), and no gap lies between.

    False where that cannot be asked (a compiler traces the model), or where the result would have to be more than the
    output: weights, dropout, caps on logits.
    """
    if torch.compiler.is_compiling() or is_eager(call) or is_special(call) or dropout_of(call) > 0:
        return False
    if call.mask is not None:
        mask = call.mask
        if not torch.is_tensor(mask) or mask.dim() != 4:
            return False
        name = f"plain {id(mask)} {is_causal}"
        # the mask itself is kept too, or another one might get its id
        if not forward.remembered(name, lambda: (says_nothing(mask, is_causal), mask))[0]:
            return False
    return is_gapless(call, forward)


def says_nothing(mask: Tensor, is_causal: bool) -> bool:
    """Whether a mask [B or 1, 1, L, S] hides no key, or none but those behind each query.

    The last query stands on the last key.
    """
    seen = mask if mask.dtype == torch.bool else mask == 0
    if not is_causal:
        return bool(seen.all())
    queries, keys = mask.shape[-2:]
    return queries <= keys and bool((seen == causal(queries, keys, mask.device)).all())


def additive(call: Call, is_causal: bool) -> Rows:
    """The mask of some queries as what is added to logits: begin, end -> [B or 1, 1 or H, end - begin, S] float32.

    A hidden key has -inf, never the lowest number of a dtype, to which nothing could be added.

    Raises:
        PatchError: a mask that is no tensor.
    """
    mask: Any = call.mask
    length, keys, device = call.query.shape[2], call.key.shape[2], call.query.device
    if mask is not None and not torch.is_tensor(mask):
        raise PatchError(
            f'A {type(mask).__name__} is no mask that this patch can read. Call `set_attn_implementation("sdpa")`.'
        )

    def rows(begin: int, end: int) -> Tensor:
        if mask is None or mask.dim() == 2:
            hidden = torch.zeros(1, 1, 1, keys, dtype=torch.bool, device=device)
            if is_causal and length > 1:
                # without a mask, sdpa has the first query on the first key
                ahead = 0 if mask is None else keys - length
                hidden = ~causal_rows(begin + ahead, end + ahead, keys, device)
            return hidden_where(hidden if mask is None else hidden | (mask == 0)[:, None, None, -keys:])
        part = mask[..., begin:end, :] if mask.shape[-2] > 1 else mask
        if part.dtype == torch.bool:
            return hidden_where(~part)
        lowest = torch.finfo(part.dtype).min / 2
        return part.float().masked_fill(part <= lowest, -torch.inf)

    return rows


def causal_rows(begin: int, end: int, keys: int, device: torch.device) -> Tensor:
    """[1, 1, end - begin, S] bool: for queries in slots begin to end the keys up to each."""
    queries = torch.arange(begin, end, device=device)[:, None]
    return (torch.arange(keys, device=device) <= queries)[None, None]


def hidden_where(hidden: Tensor) -> Tensor:
    """-inf where True, else 0, float32."""
    return torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device).masked_fill(hidden, -torch.inf)
