"""Dynamic scaling in a model: the hooks that read the lengths of each forward, and how they reach its attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from hf_posext.attention import interface
from hf_posext.attention.present import present
from hf_posext.attention.turns import KEYWORD, Forward, Turning

OWNER = "_posext_dynamic"


@dataclass
class Dynamics:
    """What a model with dynamic scaling keeps: in the `__dict__` of the sub-model whose forward feeds its attention.

    Attributes:
        configs: the configs that name its attention implementation.
        names: parameters of its forward, in order.
        by_keyword: whether keyword arguments of its forward reach every attention module.
        forward: the forward that runs now, where they do not.
    """

    configs: list[PreTrainedConfig]
    names: tuple[str, ...]
    by_keyword: bool
    forward: Forward | None = None

    def argument(self, args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> Any:
        """The first argument under one of several names that is given and not None."""
        for name in names:
            if kwargs.get(name) is not None:
                return kwargs[name]
            place = self.names.index(name) if name in self.names else len(args)
            if place < len(args) and args[place] is not None:
                return args[place]
        return None


def before_forward(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Reads lengths and positions of a forward before it runs; a pre-hook of the owner."""
    dynamics: Dynamics = owner.__dict__[OWNER]
    interface.choose(dynamics.configs)  # `set_attn_implementation` may have been called since
    states = dynamics.argument(args, kwargs, "input_ids", "decoder_input_ids", "inputs_embeds")
    if states is None:
        return args, kwargs  # the model itself will say what is missing
    forward = Forward(
        present(
            dynamics.argument(args, kwargs, "position_ids"),
            dynamics.argument(args, kwargs, "attention_mask"),
            tokens_in(dynamics.argument(args, kwargs, "cache", "past_key_values")),
            states,
        )
    )
    if dynamics.by_keyword:
        return args, {**kwargs, KEYWORD: forward}
    dynamics.forward = forward
    return args, kwargs


def after_forward(owner: nn.Module, args: Any, output: Any) -> None:
    """Forgets the forward that ran; a hook of owners whose layers get no keyword arguments."""
    owner.__dict__[OWNER].forward = None


def tokens_in(cache: Any) -> int | Tensor:
    """Tokens that a cache holds. Static caches count in a tensor that their layers raise as they go, hence the copy."""
    cache = getattr(cache, "self_attention_cache", cache)
    if cache is None:
        return 0
    count = cache.get_seq_length()
    return count.clone() if torch.is_tensor(count) else count


def attach(owner: nn.Module, dynamics: Dynamics, turnings: dict[nn.Module, Turning]) -> None:
    """Puts dynamic scaling into a sub-model."""
    for module, turning in turnings.items():
        module.__dict__[interface.ADAPTER] = turning
    owner.__dict__[OWNER] = dynamics
    owner.register_forward_pre_hook(before_forward, with_kwargs=True)
    if not dynamics.by_keyword:
        owner.register_forward_hook(after_forward, always_call=True)
    interface.choose(dynamics.configs)


def turnings(model: nn.Module) -> list[Turning]:
    """The adapters of all attention modules of a model."""
    found = (module.__dict__.get(interface.ADAPTER) for module in model.modules())
    return [each for each in found if isinstance(each, Turning)]


def detach(model: nn.Module) -> None:
    """Takes dynamic scaling out of a model; nothing to do where there is none."""
    for module in model.modules():
        module.__dict__.pop(interface.ADAPTER, None)
        dynamics: Dynamics | None = module.__dict__.pop(OWNER, None)
        if dynamics is None:
            continue
        interface.give_back(dynamics.configs)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in (before_forward, after_forward)]:
                hooks.pop(key)
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
