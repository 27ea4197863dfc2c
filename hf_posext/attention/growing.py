"""A cache layer that grows in place.

transformers' dynamic layer copies all its keys and values for every new token. What a layer with room saves pays for
turning the keys as they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

PLACES = "_posext_positions"
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
        self.views: dict[str, tuple[Any, Store]] = {}  # what was made of the states, for the same reader

    def continues(self, states: Tensor, more: int) -> bool:
        """Whether states are what was handed out last, so that nobody else has written behind them, with room left."""
        return (
            states.data_ptr() == self.memory.data_ptr()
            and states.stride() == self.memory.stride()
            and states.shape[2] == self.filled
            and self.filled + more <= self.memory.shape[2]
            and (torch.is_inference_mode_enabled() or not self.memory.is_inference())
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
        if keys is None or values is None or keys.dim() != 4:
            return super().update(key_states, value_states, *args, **kwargs)
        if any(states.requires_grad for states in (keys, values, key_states, value_states)):
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys = keys = self._grown("keys", keys, key_states)
        self.values = values = self._grown("values", values, value_states)
        return keys, values

    def reset(self) -> None:
        """As the base class, and gives the memory back."""
        super().reset()
        for name in [name for name in self.__dict__ if name.startswith("_posext_")]:
            del self.__dict__[name]

    def reorder_cache(self, beam_idx: Any) -> None:
        """As the base class; noted positions follow."""
        super().reorder_cache(beam_idx)
        self._move_places(lambda places: places.index_select(1, beam_idx.to(places.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """As the base class; noted positions follow."""
        super().batch_repeat_interleave(repeats)
        self._move_places(lambda places: places.repeat_interleave(repeats, dim=1))

    def batch_select_indices(self, indices: Tensor) -> None:
        """As the base class; noted positions follow."""
        super().batch_select_indices(indices)
        self._move_places(lambda places: places[:, indices])

    def _move_places(self, move: Callable[[Tensor], Tensor]) -> None:
        if PLACES in self.__dict__ and self.__dict__[PLACES].shape[1] > 1:  # else one row stands for all
            self.__dict__[PLACES] = move(self.__dict__[PLACES])

    def _grown(self, name: str, present: Tensor, new: Tensor) -> Tensor:
        store: Store | None = self.__dict__.get(f"_posext_{name}")
        if store is None or not store.continues(present, new.shape[2]):
            store = self.__dict__[f"_posext_{name}"] = Store(torch.cat((present, new), dim=2))
            return store.memory[:, :, : store.filled]
        return store.append(new)


def made_of(cache: Any, layer: Any, states: Tensor, name: str, kind: Any, make: Callable[[int], Tensor]) -> Tensor:
    """What a reader makes of cached states, made once for each of them where the cache grows in place.

    Args:
        cache: the cache that gave the states, or None.
        layer: index of its layer, or None.
        states: [B, G, S, D] as it gave them.
        name: tells the readers of one layer apart.
        kind: what else the result depends on; another kind makes it anew.
        make: index of the first state -> what is made of the states from there on, [B, G, S - begin, D].
    """
    layers = getattr(cache, "layers", ())
    home = layers[layer] if isinstance(layer, int) and layer < len(layers) else None
    store: Store | None = home.__dict__.get("_posext_keys") if isinstance(home, GrowingLayer) else None
    is_same = store is not None and store.memory.data_ptr() == states.data_ptr() and store.filled == states.shape[2]
    if store is None or not is_same or torch.is_grad_enabled():
        return make(0)
    before, view = store.views.get(name, (None, None))
    is_closed = view is not None and view.memory.is_inference() and not torch.is_inference_mode_enabled()
    if view is None or before != kind or is_closed:
        view = Store(make(0))
        store.views[name] = kind, view
    elif view.filled < store.filled:
        new = make(view.filled)
        if view.filled + new.shape[2] > view.memory.shape[2]:
            view = Store(torch.cat((view.memory[:, :, : view.filled], new), dim=2))
            store.views[name] = kind, view
        else:
            view.append(new)
    return view.memory[:, :, : view.filled]


def let_grow(cache: Any) -> None:
    """Gives the plain dynamic layers of a cache room; all others stay what they are."""
    if isinstance(cache, Cache):
        for layer in cache.layers:
            if type(layer) is DynamicLayer:
                layer.__class__ = GrowingLayer


def noted_positions(cache: Any, past: int, batch: int) -> tuple[Tensor | None, bool]:
    """The positions of cached tokens, [A, B, past], as noted, and whether they followed the rows of the cache.

    None where nothing was noted, or where it does not fit.
    """
    home = home_of(cache)
    places: Tensor | None = home.__dict__.get(PLACES)
    if places is None or places.shape[1] not in (1, batch) or places.shape[2] < past:
        return None, False
    return places[..., :past], isinstance(home, GrowingLayer)


def note_positions(cache: Any, places: Tensor) -> None:
    """Notes the positions, [A, B, S], of all tokens that a cache now holds."""
    let_grow(cache)
    home_of(cache).__dict__[PLACES] = places


def home_of(cache: Any) -> Any:
    """Where positions are noted: in a layer that keeps them in step with its rows, else beside the cache."""
    return next((layer for layer in getattr(cache, "layers", ()) if isinstance(layer, GrowingLayer)), cache)
