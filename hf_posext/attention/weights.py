"""Attention written out for some queries: for any bias, mask, device and dtype, where no kernel helps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Rows = Callable[[int, int], Tensor]
"""First query and the one after the last -> something about them, [B or 1, H or 1, queries, S]."""


def products(query: Tensor, key: Tensor) -> Tensor:
    """[B, H, L, D] and [B, G, S, D] -> [B, H, L, S], without copies of the keys."""
    batch, heads, length, _ = query.shape
    groups = key.shape[1]
    found = query.reshape(batch, groups, heads // groups * length, -1) @ key.mT
    return found.view(batch, heads, length, -1)


def mixed(share: Tensor, value: Tensor) -> Tensor:
    """[B, H, L, S] and [B, G, S, Dv] -> [B, H, L, Dv], without copies of the values."""
    batch, heads, length, keys = share.shape
    groups = value.shape[1]
    found = share.reshape(batch, groups, heads // groups * length, keys) @ value
    return found.view(batch, heads, length, -1)


def normalised(logits: Tensor, mask: Tensor | None, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the keys and a sink [H] that is left out then; zeros where no key is seen, also in the gradient."""
    if mask is not None:
        logits = logits + mask
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat((logits, column), dim=-1).softmax(-1)[..., :-1]
    if mask is None:
        return logits.softmax(-1)
    empty = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
