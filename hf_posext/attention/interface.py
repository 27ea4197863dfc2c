"""transformers' attention registry, used per model instance: a model's own attention function with something before it.

An implementation `x` gets a twin `posext_x` with the same masks. The twin does what the attention module at hand asks
for (its adapter, an entry in the module's `__dict__`) and then calls `x`; without an adapter it is `x`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

PREFIX = "posext_"
EAGER = "eager"
ADAPTER = "_posext_attention"
Attention = Callable[..., tuple[Tensor, Tensor | None]]


class Adapter(Protocol):
    """What one attention module puts between itself and the model's own attention function."""

    eager: Attention | None
    """The eager attention function of the file that defines the module, which no registry lists."""

    def attend(
        self,
        attention: Attention,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """What `attention` answers, [B, L, H, D] and weights or None; queries [B, H, L, D], keys [B, G, S, D]."""


_watchers: list[Callable[[nn.Module, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]] = []


def eager_of(module: nn.Module) -> Attention | None:
    """The eager attention function beside a module's class; None where the file has none."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def make_twin(inner: str) -> Attention:
    """The function behind `posext_<inner>`."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if _watchers:
            return _watchers[-1](module, query, key, value, options), None
        adapter: Adapter | None = module.__dict__.get(ADAPTER)
        if inner != EAGER:
            attention = ALL_ATTENTION_FUNCTIONS[inner]
        else:
            attention = (adapter.eager if adapter is not None else None) or eager_of(module)
        if adapter is None:
            return attention(module, query, key, value, attention_mask, **options)
        return adapter.attend(attention, module, query, key, value, attention_mask, options)

    return forward


def twin_of(inner: str) -> str:
    """The name under which an implementation has its twin, registered on the way."""
    name = PREFIX + inner
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, make_twin(inner))
        if inner in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[inner])
    return name


for _name in (EAGER, *ALL_ATTENTION_FUNCTIONS):  # so that an unpickled model finds its twin in another process
    twin_of(_name)


def choose(configs: Iterable[PreTrainedConfig]) -> None:
    """Makes configs name the twin of the implementation that they name now; nothing to do where they do already.

    The private field is written: the public one also reaches into sub-configs, of vision towers for example.
    """
    for config in configs:
        name = config._attn_implementation or EAGER
        if not name.startswith(PREFIX):
            config._attn_implementation_internal = twin_of(name)


def give_back(configs: Iterable[PreTrainedConfig]) -> None:
    """Makes configs name the implementation itself again, whichever it is by now."""
    for config in configs:
        name = config._attn_implementation
        if name is not None and name.startswith(PREFIX):
            config._attn_implementation_internal = name.removeprefix(PREFIX)


@contextmanager
def watching(watcher: Callable[[nn.Module, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]) -> Iterator[None]:
    """For the length of a block twins call `watcher(module, query, key, value, options)` in place of attending."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.pop()
