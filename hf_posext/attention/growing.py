"""A cache layer that grows in place.

transformers' dynamic layer copies all its keys and values for every new token. What a layer with room saves pays for
turning the keys as they are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

LEAST_ROOM = 64  # tokens
SHARE_OF_ROOM = 16  # one token of room for so many in use


class Store:
    """Memory for [B, G, capacity, D] of which the first `filled` tokens were handed out and are never written again."""

    def __init__(self, states: Tensor) -> None:
        batch, heads, length, width = states.shape
        room = max(LEAST_ROOM, length // SHARE_OF_ROOM)
        self.memory = states.new_empty(batch, heads, length + room, width)
        self.memory[:, :, :length] = states
        self.filled = length

    def continues(self, states: Tensor, more: int) -> bool:
        """Whether states are what was handed out last, so that nobody else has written behind them, with room left."""
        return (
            states.data_ptr() == self.memory.data_ptr()
            and states.stride() == self.memory.stride()
            and states.shape[2] == self.filled
            and self.filled + more <= self.memory.shape[2]
        )

    def append(self, states: Tensor) -> Tensor:
        """Everything handed out so far and some more, as a view."""
        end = self.filled + states.shape[2]
        self.memory[:, :, self.filled : end] = states
        self.filled = end
        return self.memory[:, :, :end]


class GrowingLayer(DynamicLayer):
    """`DynamicLayer` with room for the next tokens.

    Its keys and values are views that nothing overwrites: a layer that was cropped, copied or reordered, or whose
    tensors somebody replaced, is copied once and goes on in memory of its own.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As the base class: the new states are appended, and all states returned."""
        keys, values = self.keys, self.values
        wants_gradient = key_states.requires_grad or value_states.requires_grad
        if keys is None or values is None or keys.dim() != 4 or wants_gradient:
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys = keys = self._grown("keys", keys, key_states)
        self.values = values = self._grown("values", values, value_states)
        return keys, values

    def _grown(self, name: str, present: Tensor, new: Tensor) -> Tensor:
        store: Store | None = self.__dict__.get(f"_posext_{name}")
        if store is None or not store.continues(present, new.shape[2]):
            store = self.__dict__[f"_posext_{name}"] = Store(torch.cat((present, new), dim=2))
            return store.memory[:, :, : store.filled]
        return store.append(new)


def let_grow(cache: Any) -> None:
    """Gives the plain dynamic layers of a cache room; all others stay what they are."""
    if isinstance(cache, Cache):
        for layer in cache.layers:
            if type(layer) is DynamicLayer:
                layer.__class__ = GrowingLayer
