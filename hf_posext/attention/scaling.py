"""Dynamic scaling in a model: the hooks that read the lengths of each forward, and how they reach its attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig

from hf_posext.attention import interface
from hf_posext.attention.growing import let_grow, note_positions, noted_positions
from hf_posext.attention.present import Present, present
from hf_posext.attention.schedule import Schedule
from hf_posext.attention.turns import KEYWORD, Forward, Turning

OWNER = "_posext_dynamic"
LEVELS = "_posext_levels"


@dataclass
class Dynamics:
    """What a model with dynamic scaling keeps: in the `__dict__` of the sub-model whose forward feeds its attention.

    Attributes:
        configs: the configs that name its attention implementation.
        schedules: path of each site -> how it follows the length.
        names: parameters of its forward, in order.
        by_keyword: whether keyword arguments of its forward reach every attention module.
        forward: the forward that runs now, where they do not.
        fixed: the lengths, [B] int64, at which the rows of a generation are read until it ends; None for live lengths.
        levels: those of the fixed lengths, which a cache that is filled now belongs to; None for live lengths.
        is_set: whether the rotary modules are set to the one fixed scale, so that nothing is left to turn.
    """

    configs: list[PreTrainedConfig]
    schedules: dict[str, Schedule]
    names: tuple[str, ...]
    by_keyword: bool
    forward: Forward | None = None
    fixed: Tensor | None = None
    levels: tuple[float, ...] | None = None
    is_set: bool = False

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
    cache = dynamics.argument(args, kwargs, "cache", "past_key_values")
    cache = getattr(cache, "self_attention_cache", cache)
    if not torch.compiler.is_compiling():
        let_grow(cache)
    check_levels(dynamics, cache)
    forward = Forward(
        present(
            dynamics.argument(args, kwargs, "position_ids"),
            dynamics.argument(args, kwargs, "attention_mask"),
            tokens_in(cache),
            states,
        )
    )
    forward.now = with_noted_positions(forward.now, cache, states.shape[0])
    if dynamics.fixed is not None:
        rows = states.shape[0] // len(dynamics.fixed)  # beams of one prompt stand side by side
        forward.now = replace(forward.now, fixed=dynamics.fixed.to(states.device).repeat_interleave(rows))
    dynamics.forward = forward
    if dynamics.by_keyword:
        return args, {**kwargs, KEYWORD: forward}
    return args, kwargs


def after_forward(owner: nn.Module, args: Any, output: Any) -> None:
    """Forgets the forward that ran, and notes in a cache that it filled at what scale its keys are."""
    dynamics: Dynamics = owner.__dict__[OWNER]
    forward, dynamics.forward = dynamics.forward, None
    if torch.compiler.is_compiling():
        return
    cache = next((value for value in values_of(output) if isinstance(value, Cache)), None)
    cache = getattr(cache, "self_attention_cache", cache)
    if cache is None:
        return
    if dynamics.levels is not None:
        cache.__dict__[LEVELS] = dynamics.levels
    if forward is not None and (forward.now.given or forward.now.noted is not None):
        note_positions(cache, places_after(forward.now))


def values_of(output: Any) -> Iterable[Any]:
    """What a model returns, one after the other; attributes of the old names would warn."""
    if isinstance(output, Mapping):
        return output.values()
    return output if isinstance(output, (tuple, list)) else ()


def with_noted_positions(now: Present, cache: Any, batch: int) -> Present:
    """With the positions that were noted as the cache was filled."""
    if cache is None or torch.compiler.is_compiling() or (isinstance(now.past, int) and now.past == 0):
        return now
    noted, follows = noted_positions(cache, int(now.past), batch)
    return now if noted is None else replace(now, noted=noted, follows=follows)


def places_after(now: Present) -> Tensor:
    """[A, B, S]: positions of all tokens that a cache holds after a forward."""
    before = now.cached_positions(now.slots(0, int(now.past)))
    axes, batch = now.positions.shape[0], max(before.shape[1], now.positions.shape[1])
    return torch.cat((before.expand(axes, batch, -1), now.positions.expand(axes, batch, -1)), dim=-1)


def check_levels(dynamics: Dynamics, cache: Any) -> None:
    """Refuses a cache that was filled at other scales than it would be read at.

    Raises:
        ValueError: with both.
    """
    if cache is None or torch.compiler.is_compiling():
        return
    there, now = cache.__dict__.get(LEVELS), dynamics.levels
    if there != now and (there is not None or int(cache.get_seq_length()) > 0):
        words = [
            f"scale {', '.join(f'{max(each, 1):g}' for each in way)}" if way else "live scales" for way in (there, now)
        ]
        raise ValueError(
            f"The cache was filled at {words[0]} and would be read at {words[1]}. Start with an empty cache, or patch "
            'with scale="live", where a cache fits every length.'
        )


def tokens_in(cache: Any) -> int | Tensor:
    """Tokens that a cache holds. Static caches count in a tensor that their layers raise as they go, hence the copy."""
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
