"""Fixed tables of sines and cosines that are added to the hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_posext.contract import Site
from hf_posext.mechanisms._rows import read, reset, restore, silence
from hf_posext.mechanisms._scope import Scoped

__all__ = ["MECHANISM", "find", "is_sinusoid", "read", "reset", "restore", "silence"]

MECHANISM = "sinusoidal"
BUFFER = "weights"
LOOKED_AT = 64  # rows


def find(scoped: Scoped) -> list[Site]:
    """A table as wide as the hidden states whose rows are sines and cosines: a frozen embedding, or a buffer."""
    module = scoped.module
    name = "weight" if isinstance(module, nn.Embedding) else BUFFER
    table = getattr(module, name, None)
    width = getattr(scoped.config, "hidden_size", None) or getattr(scoped.config, "d_model", None)
    if not torch.is_tensor(table) or table.requires_grad or table.dim() != 2 or table.shape[1] != width:
        return []
    return [Site(MECHANISM, scoped.name, module, scoped.config, "", name)] if is_sinusoid(table) else []


def is_sinusoid(table: Tensor) -> bool:
    """Whether the rows are sines in one half of their channels and cosines of the same angles in the other.

    The row of a padding token may be zero, and an odd width has one channel more than two halves.
    """
    if table.is_meta or table.dim() != 2 or table.shape[0] < 4 or table.shape[1] < 2 or not table.is_floating_point():
        return False
    rows = table.detach()[:LOOKED_AT].float().cpu()
    rows = rows[rows.abs().sum(1) > 0]
    if len(rows) < 3:
        return False
    half = table.shape[1] // 2
    sine, cosine = rows[:, :half], rows[:, half : 2 * half]
    moves = bool((rows[0] != rows[1]).any())
    radius = sine.square() + cosine.square()
    return moves and torch.allclose(radius, radius[:1, :1].expand_as(radius), rtol=0.02)
