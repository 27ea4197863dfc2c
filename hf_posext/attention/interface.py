"""transformers' attention registry, used per model instance: a model's own attention function with something before it.

An implementation `x` gets a twin `posext_x` with the same masks. The twin does what the attention module at hand asks
for (its adapter, an entry in the module's `__dict__`) and then calls `x`; without an adapter it is `x`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

logger = logging.getLogger(__name__)
PREFIX = "posext_"
SUBSTITUTE = "sdpa_for_"
EAGER = "eager"
ADAPTER = "_posext_attention"
Attended = tuple[Tensor, Tensor | None]
Attention = Callable[..., Attended]


@dataclass(frozen=True)
class Call:
    """One call of an attention function, as transformers makes it.

    Attributes:
        attention: the function that the model itself would call.
        module: the attention module.
        query: [B, H, L, D].
        key: [B, G, S, D].
        value: [B, G, S, D of values].
        mask: as the implementation wants it, or None.
        options: the other keyword arguments.
    """

    attention: Attention
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    options: dict[str, Any]

    def run(self) -> Attended:
        """What the model's own function answers: [B, L, H, D of values], and weights [B, H, L, S] or None."""
        return self.attention(self.module, self.query, self.key, self.value, self.mask, **self.options)


class Adapter(Protocol):
    """What one attention module puts between itself and the model's own attention function."""

    def attend(self, call: Call) -> Attended:
        """The answer to a call, as `Call.run`."""


def eager_of(module: nn.Module) -> Attention:
    """The eager attention function, which stands beside a module's class and in no registry."""
    return sys.modules[type(module).__module__].eager_attention_forward


def make_twin(inner: str) -> Attention:
    """The function behind `posext_<inner>`."""

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> Attended:
        attention = eager_of(module) if inner == EAGER else ALL_ATTENTION_FUNCTIONS[inner]
        call = Call(attention, module, query, key, value, attention_mask, options)
        adapter: Adapter | None = module.__dict__.get(ADAPTER)
        return call.run() if adapter is None else adapter.attend(call)

    return forward


def twin_of(inner: str) -> str:
    """The name under which an implementation has its twin, registered on the way."""
    name = PREFIX + inner
    if name not in ALL_ATTENTION_FUNCTIONS:
        register(name, inner)
    return name


def substitute_of(inner: str) -> str:
    """The name under which an implementation that cannot carry what an adapter asks for has the twin of sdpa."""
    name = PREFIX + SUBSTITUTE + inner
    if name not in ALL_ATTENTION_FUNCTIONS:
        register(name, "sdpa")
    return name


def register(name: str, inner: str) -> None:
    """Registers a twin of an implementation, with the same masks."""
    AttentionInterface.register(name, make_twin(inner))
    if inner in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[inner])


for _name in (EAGER, *ALL_ATTENTION_FUNCTIONS):  # so that an unpickled model finds its twin in another process
    twin_of(_name)
    substitute_of(_name)


def choose(configs: Iterable[PreTrainedConfig], able: tuple[str, ...] | None = None) -> None:
    """Makes configs name the twin of the implementation that they name now; nothing to do where they do already.

    The private field is written: the public one also reaches into sub-configs, of vision towers for example.

    Args:
        configs: all configs that the attention modules of a model read.
        able: implementations that can carry what the adapters ask for; for any other sdpa stands in. None for all.
    """
    for config in configs:
        name = config._attn_implementation or EAGER
        if name.startswith(PREFIX):
            continue
        if able is None or name in able:
            config._attn_implementation_internal = twin_of(name)
        else:
            logger.warning(
                f"`{name}` cannot carry what this patch does in attention: sdpa is used in its place until the model "
                "is unpatched."
            )
            config._attn_implementation_internal = substitute_of(name)


def give_back(configs: Iterable[PreTrainedConfig]) -> None:
    """Makes configs name the implementation itself again, whichever it is by now."""
    for config in configs:
        name = config._attn_implementation
        if name is not None and name.startswith(PREFIX):
            config._attn_implementation_internal = name.removeprefix(PREFIX).removeprefix(SUBSTITUTE)


@contextmanager
def adapted(modules: Iterable[nn.Module], adapter: Adapter) -> Iterator[None]:
    """All modules with one adapter, for the length of a block; then with none."""
    modules = list(modules)
    for module in modules:
        module.__dict__[ADAPTER] = adapter
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__[ADAPTER]
