"""What a model reads in one forward, told to its attention: hooks of the sub-model whose forward feeds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig

from hf_posext.attention import interface
from hf_posext.attention.growing import let_grow, note_positions, noted_positions
from hf_posext.attention.interface import Adapter, Call
from hf_posext.attention.present import Present, present
from hf_posext.errors import PatchError

SLOPES = "posext_slopes"
BIAS = "posext_bias"
OWN = (SLOPES, BIAS)
"""Names of the parameters that adapters may have given their modules."""
OWNER = "_posext_reader"
KEYWORD = "posext_reading"
Value = TypeVar("Value")


@dataclass
class Forward:
    """One forward of a model: where its tokens stand, and what follows from it, each made when first asked for.

    It travels with the keyword arguments of the layers, so that a layer that gradient checkpointing runs again sees the
    text of its own forward and not of a later one.
    """

    now: Present
    cache: Any = None
    made: dict[Any, Any] = field(default_factory=dict)

    def remembered(self, name: Any, make: Callable[[], Value]) -> Value:
        """The value that `make` gave under this name in this forward, or that it gives now."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    def past(self) -> int:
        """Tokens that the cache held before, as a number of the host."""
        return self.remembered("past", lambda: int(self.now.past))

    def key_positions(self, keys: int) -> Tensor:
        """`Present.key_positions`."""
        if torch.compiler.is_compiling():  # a name made of a length would compile again for every length
            return self.now.key_positions(keys)
        return self.remembered(f"positions {keys}", lambda: self.now.key_positions(keys))

    def in_row(self, positions: Tensor) -> Tensor:
        """Positions [A, B or 1, S] as places in each row, 0 for its first token, also where they count padding."""
        padding = self.remembered("padding", self.now.padding)
        return positions if padding is None else positions - padding[None, :, None]

    def room(self, states: Tensor, use: str) -> Tensor | None:
        """Memory for turned states, the same for all blocks and layers; None where results must be expressions."""
        if is_expression():
            return None
        name = f"{use} {states.dtype} {states.device}"
        if name not in self.made or self.made[name].numel() < states.numel():
            self.made[name] = states.new_empty(states.numel() * 5 // 4)  # blocks grow: not for each of them anew
        return self.made[name][: states.numel()].view(states.shape)


def is_expression() -> bool:
    """Whether results must be differentiable (autograd keeps them, so memory cannot be used again) or traceable."""
    return torch.compiler.is_compiling() or torch.is_grad_enabled()


@dataclass
class Reader:
    """What a model whose attention is adapted keeps: in the `__dict__` of the sub-model whose forward feeds it.

    Attributes:
        configs: the configs that name its attention implementation.
        names: parameters of its forward, in order.
        by_keyword: whether keyword arguments of its forward reach every attention module.
        able: the implementations that can carry what the adapters ask for; None for all.
        limit: tokens that a text may have; None for no limit.
        padding: token id that takes no position; None where every token takes one.
        first: what the first position is called where positions are given, which in some families are row numbers.
        by_mask: whether tokens that the attention mask hides take no position.
        forward: the forward that runs now, where they do not.
    """

    configs: list[PreTrainedConfig]
    names: tuple[str, ...]
    by_keyword: bool
    able: tuple[str, ...] | None = None
    limit: int | None = None
    padding: int | None = None
    by_mask: bool = False
    first: int = 0
    forward: Forward | None = None

    def start(self, now: Present, cache: Any, states: Tensor) -> Forward:
        """The forward that begins.

        Raises:
            ValueError: a cache that does not fit.
        """
        return Forward(now, cache)

    def finish(self, cache: Any) -> None:
        """Called when a forward has filled a cache."""

    def of(self, call: Call) -> tuple[Forward, Call]:
        """The forward that a call of an attention function belongs to, and the call as the model meant it.

        Raises:
            PatchError: there is none.
        """
        options = dict(call.options)
        forward: Forward | None = options.pop(KEYWORD, None) if self.by_keyword else self.forward
        if forward is None:
            raise PatchError(
                "An attention layer of a patched model ran outside of the forward of its model. Call the model, not "
                "its layers; if this is gradient checkpointing, train without it, or patch with a method (or "
                "dynamic=False) that leaves attention as it is."
            )
        return forward, replace(call, options=options)

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
    reader: Reader = owner.__dict__[OWNER]
    interface.choose(reader.configs, reader.able)  # `set_attn_implementation` may have been called since
    states = reader.argument(args, kwargs, "input_ids", "decoder_input_ids", "inputs_embeds")
    if states is None:
        return args, kwargs  # the model itself will say what is missing
    cache = reader.argument(args, kwargs, "cache", "past_key_values")
    cache = getattr(cache, "self_attention_cache", cache)
    if not torch.compiler.is_compiling():
        let_grow(cache)
    now = present(
        reader.argument(args, kwargs, "position_ids"),
        reader.argument(args, kwargs, "attention_mask"),
        tokens_in(cache),
        states,
    )
    check_limit(reader, now, states)
    reader.forward = reader.start(with_noted_positions(now, cache, states.shape[0]), cache, states)
    if reader.by_keyword:
        return args, {**kwargs, KEYWORD: reader.forward}
    return args, kwargs


def check_limit(reader: Reader, now: Present, states: Tensor) -> None:
    """Refuses a text that is too long before anything that depends on its length runs.

    A single token that is decoded is checked where it is looked up: here its position would have to reach the host.

    Raises:
        ValueError: with the limit.
    """
    if reader.limit is None or not isinstance(now.past, int) or torch.compiler.is_compiling():
        return
    if now.tokens == 1 and (now.given or now.past < reader.limit):
        return
    if not now.given and now.past + now.tokens <= reader.limit:
        return
    longest = longest_text(reader, now, states)
    if longest > reader.limit:
        raise ValueError(
            f"The text has {longest} tokens, and the model reads {reader.limit} at most. Cut the text, or patch the "
            "model with a larger `factor` or `target_length`."
        )


def longest_text(reader: Reader, now: Present, states: Tensor) -> int:
    """Positions that the longest text of a batch takes, by what the model numbers them from."""
    past = int(now.past)
    if now.given:
        return int(now.positions.max()) - reader.first + 1
    if reader.by_mask and now.counted is not None:
        return int(now.counted.sum(-1).max())
    if reader.padding is not None and not states.is_floating_point():
        return past + int((states != reader.padding).sum(-1).max())
    return past + now.tokens


def after_forward(owner: nn.Module, args: Any, output: Any) -> None:
    """Forgets the forward that ran, and notes in a cache that it filled where its tokens stand."""
    reader: Reader = owner.__dict__[OWNER]
    forward, reader.forward = reader.forward, None
    if torch.compiler.is_compiling():
        return
    cache = next((value for value in values_of(output) if isinstance(value, Cache)), None)
    cache = getattr(cache, "self_attention_cache", cache)
    if cache is None:
        return
    reader.finish(cache)
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


def tokens_in(cache: Any) -> int | Tensor:
    """Tokens that a cache holds. Static caches count in a tensor that their layers raise as they go, hence the copy."""
    if cache is None:
        return 0
    count = cache.get_seq_length()
    return count.clone() if torch.is_tensor(count) else count


def attach(owner: nn.Module, reader: Reader, adapters: Mapping[nn.Module, Adapter]) -> None:
    """Puts adapters into a sub-model, and what tells them of each forward."""
    for module, adapter in adapters.items():
        module.__dict__[interface.ADAPTER] = adapter
    is_new = OWNER not in owner.__dict__
    owner.__dict__[OWNER] = reader
    if is_new:
        owner.register_forward_pre_hook(before_forward, with_kwargs=True)
        owner.register_forward_hook(after_forward, always_call=True)


def adapters(model: nn.Module) -> list[Adapter]:
    """Those of all attention modules of a model."""
    return [module.__dict__[interface.ADAPTER] for module in model.modules() if interface.ADAPTER in module.__dict__]


def readers(model: nn.Module) -> list[Reader]:
    """Those of all sub-models."""
    return [module.__dict__[OWNER] for module in model.modules() if OWNER in module.__dict__]


def own_parameters(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """What adapters have given their modules to be trained: each with its module and its name there."""
    found = ((module, name, module._parameters.get(name)) for module in model.modules() for name in OWN)
    return [(module, name, parameter) for module, name, parameter in found if parameter is not None]


def detach(model: nn.Module) -> None:
    """Takes adapters and hooks out of a model; nothing to do where there are none."""
    for module in model.modules():
        module.__dict__.pop(interface.ADAPTER, None)
        for name in OWN:
            module._parameters.pop(name, None)
        reader: Reader | None = module.__dict__.pop(OWNER, None)
        if reader is None:
            continue
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in (before_forward, after_forward)]:
                hooks.pop(key)
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)
