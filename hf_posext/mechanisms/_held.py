"""Keeps values in a module that casts, moves, loads and re-initialisation would otherwise round or replace.

A held module gets a subclass of its own class, of the same name: its buffers are written again, from values kept in
float64 outside of any buffer, after whatever replaced them. Its holder says how it runs.
"""

from __future__ import annotations

import functools
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

HOOKED = "_old_forward"
_HELD: dict[type[nn.Module], type[nn.Module]] = {}


class Holder(Protocol):
    """What a held module keeps: the class and values to go back to, and the values to keep."""

    original_class: type[nn.Module]

    def rewrite(self, module: nn.Module) -> None:
        """Writes the kept values into the module's buffers, on the device where these are now."""

    def loaded(self, module: nn.Module) -> None:
        """Called when a state dict was loaded into the module."""

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a forward of the module gives; `forward` is that of its own class."""

    def rope_parameters(self, label: str | None) -> tuple[Tensor, float]:
        """Frequencies and attention scaling, for transformers' weight initialisation."""


def holder_of(module: nn.Module) -> Any:
    """The holder of a held module, None for any other."""
    return module.__dict__.get("_posext")


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module before it was held."""
    holder = holder_of(module)
    return type(module) if holder is None else holder.original_class


class Intact(ABC):
    """The part of holders whose modules run as their class does, once buffers that something replaced are rewritten."""

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward on the kept values."""
        if not self.is_intact(module):
            self.rewrite(module)
        return forward(module, *args, **kwargs)

    @abstractmethod
    def is_intact(self, module: nn.Module) -> bool:
        """Whether no buffer was replaced behind the module's back (mixed precision that casts `buffer.data`)."""

    @abstractmethod
    def rewrite(self, module: nn.Module) -> None:
        """As `Holder.rewrite`."""

    def loaded(self, module: nn.Module) -> None:
        """The kept values stay in force."""
        self.rewrite(module)


class Unheld:
    """The part of holders that keep no value of their own, but change how a module runs."""

    def rewrite(self, module: nn.Module) -> None:
        """Nothing: no value is kept."""

    def loaded(self, module: nn.Module) -> None:
        """Nothing: no value is kept."""

    def rope_parameters(self, label: str | None) -> tuple[Tensor, float]:
        """Never asked for: the module has no frequencies."""
        return torch.empty(0), 1.0


def hold(module: nn.Module, holder: Holder) -> None:
    """Makes a module keep the holder's values from now on."""
    module.__dict__["_posext"] = holder
    rebind(module, held_class(holder.original_class))
    holder.rewrite(module)


def release(module: nn.Module) -> None:
    """Gives the module back its class; the values are the caller's to restore."""
    rebind(module, holder_of(module).original_class)
    del module.__dict__["_posext"]


def rebind(module: nn.Module, to: type[nn.Module]) -> None:
    """Gives a module another class, and its forward to the hooks of accelerate, which keep that of the class before."""
    kept = module.__dict__.get(HOOKED)
    if kept is not None and getattr(kept, "__func__", None) is type(module).forward:
        module.__dict__[HOOKED] = types.MethodType(to.forward, module)
    module.__class__ = to


def revive(base: type[nn.Module]) -> nn.Module:
    """An empty instance for copying and unpickling, where the subclass cannot be found by its name."""
    held = held_class(base)
    return held.__new__(held)


def held_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `base` that writes its buffers again whenever they were replaced; one for each base."""
    if base not in _HELD:
        _HELD[base] = make_held_class(base)
    return _HELD[base]


def make_held_class(base: type[nn.Module]) -> type[nn.Module]:
    """Derives that subclass."""

    class Held(base):  # type: ignore[misc, valid-type]
        _posext: Holder

        @functools.wraps(base.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            holder = holder_of(self)
            if holder is None:  # a hook has kept this method beyond the patch
                return base.forward(self, *args, **kwargs)
            return holder.run(self, base.forward, args, kwargs)

        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            super()._apply(fn, recurse)
            self._posext.rewrite(self)
            return self

        def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
            super()._load_from_state_dict(*args, **kwargs)
            self._posext.loaded(self)

        def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
            self._posext.rewrite(self)  # an optimiser may have changed what is to be kept
            super()._save_to_state_dict(*args, **kwargs)

        def compute_default_rope_parameters(
            self, config: Any = None, device: Any = None, seq_len: Any = None, layer_type: str | None = None, **_: Any
        ) -> tuple[Tensor, float]:
            inv_freq, scaling = self._posext.rope_parameters(layer_type)
            return inv_freq.float().to(device), scaling

        def __reduce_ex__(self, protocol: Any) -> Any:
            state = super().__reduce_ex__(protocol)[2]
            return revive, (base,), state

    Held.__name__, Held.__qualname__, Held.__module__ = base.__name__, base.__qualname__, base.__module__
    return Held


def write_buffer(module: nn.Module, field: str, values: Tensor, dtype: torch.dtype) -> None:
    """Puts values (float64, CPU) into a buffer or weight: in place where nothing but the values changes.

    In place matters to CUDA graphs, which replay from the buffer's address. On meta there is nothing to write.
    """
    present = getattr(module, field)
    if present.is_meta:
        return
    rounded = values.to(dtype)  # on the CPU: float64 does not exist on every device
    if present.dtype == dtype and present.shape == rounded.shape:
        with torch.no_grad():
            present.copy_(rounded)
    elif isinstance(present, nn.Parameter):
        setattr(module, field, nn.Parameter(rounded.to(present.device), requires_grad=present.requires_grad))
    else:
        module._buffers[field] = rounded.to(present.device)
