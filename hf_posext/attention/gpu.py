"""Linear biases in kernels of GPUs: the slopes of flash attention where it is installed, else FlexAttention."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.integrations.flex_attention import compile_friendly_flex_attention
from transformers.utils import is_flash_attn_2_available

from hf_posext.attention.interface import Call

FLASH_WIDTH = 256  # channels of a head at most


def has_flash(call: Call) -> bool:
    """Whether flash attention is installed and takes the tensors of a call."""
    half = call.query.dtype in (torch.float16, torch.bfloat16)
    return half and call.query.shape[-1] == call.value.shape[-1] <= FLASH_WIDTH and is_flash_attn_2_available()


def flash_linear(call: Call, scale: float, slopes: Tensor, is_causal: bool) -> Tensor:
    """[B, H, L, D] with -slope x distance; flash attention has the last query on the last key.

    Args:
        call: query [B, H, L, D], key and value [B, G, S, D], to be read without its mask.
        scale: multiplier of the logits.
        slopes: [H] float32, for both sides of the query.
        is_causal: whether keys behind the query are hidden.
    """
    from flash_attn import flash_attn_func

    query, key, value = (states.transpose(1, 2) for states in (call.query, call.key, call.value))
    output = flash_attn_func(query, key, value, softmax_scale=scale, causal=is_causal, alibi_slopes=slopes)
    return output.transpose(1, 2)


def flex_linear(call: Call, scale: float, before: Tensor, after: Tensor, is_causal: bool) -> Tensor:
    """The same with slopes of their own for keys behind the query, by FlexAttention.

    Args:
        call: as for `flash_linear`.
        scale: multiplier of the logits.
        before: [H] float32.
        after: [H] float32.
        is_causal: whether keys behind the query are hidden.
    """
    length, keys, device = call.query.shape[2], call.key.shape[2], call.query.device
    ahead = keys - length  # the last query stands on the last key

    def biased(logit: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + ahead - key
        return logit - torch.where(distance >= 0, before[head] * distance, -after[head] * distance)

    output = compile_friendly_flex_attention(
        call.query,
        call.key,
        call.value,
        score_mod=biased,
        block_mask=causal_blocks(length, keys, device) if is_causal else None,
        scale=scale,
        enable_gqa=call.query.shape[1] != call.key.shape[1],
        training=call.module.training,
    )
    return output[0] if isinstance(output, tuple) else output


@lru_cache(maxsize=4)  # all layers of a forward ask for the same
def causal_blocks(length: int, keys: int, device: torch.device) -> BlockMask:
    """Each query sees the keys up to its own; the last query stands on the last key."""
    ahead = keys - length

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + ahead

    return create_block_mask(seen, None, None, length, keys, device=device)
