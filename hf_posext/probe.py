"""Proof that a patch acts: the rotary modules turn as the method says, and what the model computes depends on it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posext.contract import RotaryChange, Site
from hf_posext.errors import PatchError
from hf_posext.mechanisms import find_sites, grid, is_grid, keeper_of, root_model, rotary
from hf_posext.mechanisms._scope import scoped_modules

logger = logging.getLogger(__name__)
POSITIONS = (0, 1, 2, 7)
TOKENS = 6
CHARACTERS = 128
DEPTHS = ("first attention", "whole stack")


class NoEffectError(PatchError):
    """The model computes the same with and without the patch."""


class _Reached(Exception):  # noqa: N818 - it ends a forward early, nothing went wrong
    """Carries the output of the part at which a probe stops."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


def check_turns(sites: list[Site], changes: list[RotaryChange]) -> None:
    """Compares the live cos and sin of each changed module with the closed form.

    Raises:
        PatchError: a module whose forward does not use the frequencies that it was given.
    """
    for site, change in zip(sites, changes, strict=True):
        buffer = getattr(site.module, site.field)
        if keeper_of(site) is not rotary or buffer.is_meta:
            continue
        if rotary.turns_as(site.module, site.label, change, POSITIONS) is False:
            raise PatchError(
                f"{site} ({type(site.module).__name__}) does not turn by the frequencies in its `{site.field}`: its "
                "forward computes them elsewhere. Report the model; it was left as it was."
            )


def check_effect(before: Tensor | None, after: Tensor | None, patch: str, depth: str) -> None:
    """Demands that what came out of the model for a few tokens is not the same with and without the patch.

    Args:
        before: output of `run` before the patch.
        after: output of `run` with it; None for either where the model cannot run on token ids alone.
        patch: what was done, in words for a message.
        depth: how far both ran.

    Raises:
        NoEffectError: the outputs are the same to the last bit.
    """
    if before is not None and after is not None and torch.equal(before, after):
        raise NoEffectError(
            f"{patch} has no effect on what the model computes ({depth}): its attention does not use what was "
            "changed (fused or replaced attention, rotation switched off in the config, or sliding windows that hide "
            "all that the method is about). Patch before fusing, "
            "or load without fused kernels. The model was left as it was."
        )


def first_attention(owner: nn.Module, sites: list[Site]) -> list[nn.Module]:
    """The composite parts of the first decoder layer that the sites serve: whichever ends first is attention.

    Empty where no stack of layers is found.
    """
    stacks = [module for module in owner.modules() if isinstance(module, nn.ModuleList)]
    layers = max(stacks, key=len, default=None)
    if not layers:
        return []
    kinds = getattr(sites[0].config, "layer_types", None) or []
    labels = {site.label for site in sites}
    served = (index for index in range(len(layers)) if index < len(kinds) and kinds[index] in labels)
    return [part for part in layers[next(served, 0)].children() if list(part.children())]


def run(model: nn.Module, sites: list[Site], depth: str, length: int) -> Tensor | None:
    """What comes out of the first attention that the sites serve, or of the whole stack, for a few tokens or an image.

    The first attention costs next to nothing on a large model, but one without rotation shows nothing: the whole stack
    is the second try. The mask is given, or gaps between positions would look like packed documents. The random state
    is put back, so that dropout of a model in training mode is the same twice and nobody notices.

    Args:
        model: the model, patched or not.
        sites: the sites of the patch; those of the model for one that changes none.
        depth: one of `DEPTHS`.
        length: N, over which the positions are spread; of a vision model pixels per side.

    Returns:
        A tensor, or None where the model cannot run on token ids alone, or on an image alone.
    """
    sites = sites or find_sites(model)
    if not sites:
        return None
    owner = next(each.owner for each in scoped_modules(model) if each.module is sites[0].module)
    owner = root_model(model) if is_grid(sites[0]) else owner
    accepted = inspect.signature(owner.forward).parameters
    if next(owner.parameters()).device.type == "meta":
        return None
    inputs = image(owner, sites[0], length) if is_grid(sites[0]) else text(owner, length)
    stop = first_attention(owner, sites) if depth == DEPTHS[0] else []
    every_gpu = range(torch.cuda.device_count())  # named, since leaving them out warns where there are several
    with torch.no_grad(), torch.random.fork_rng(devices=every_gpu), unmoved(sites), stopping_at(stop):
        torch.manual_seed(0)
        try:
            output = owner(**{name: value for name, value in inputs.items() if name in accepted})
        except _Reached as reached:
            output = reached.output
        except Exception as error:  # whatever a foreign forward raises when it wants more than token ids
            logger.debug("The probe could not run %s on token ids alone: %s", type(owner).__name__, error)
            return None
    values = output.values() if isinstance(output, Mapping) else output
    first = output if torch.is_tensor(output) else next(iter(values))
    return first if torch.is_tensor(first) else None


def text(owner: PreTrainedModel, length: int) -> dict[str, Any]:
    """A few tokens whose positions are spread over a length."""
    device = next(owner.parameters()).device
    tokens = torch.arange(1, TOKENS + 1, device=device)[None] % vocabulary_size(owner.config)
    positions = torch.arange(TOKENS, device=device)[None] * max(1, length // TOKENS)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "position_ids": positions,
        "use_cache": False,
    }


def vocabulary_size(config: PreTrainedConfig) -> int:
    """Token ids that a text model has; characters are numbered without an end."""
    return int(getattr(config.get_text_config(), "vocab_size", None) or CHARACTERS)


def image(owner: PreTrainedModel, site: Site, side: int) -> dict[str, Any]:
    """A square image with something else in every place; one of another size than the model's is to be interpolated."""
    channels = getattr(site.config, "num_channels", 3)
    pixels = torch.arange(channels * side * side, dtype=torch.float32).sin().reshape(1, channels, side, side)
    return {
        "pixel_values": pixels.to(next(owner.parameters()).device, owner.dtype),
        grid.HOOK: side != grid.sizes_of(site).image,
    }


@contextmanager
def unmoved(sites: list[Site]) -> Iterator[None]:
    """Takes back what rotary modules write into themselves as they run: some types swap frequencies with the length."""
    modules = {id(site.module): site.module for site in sites if keeper_of(site) is rotary}.values()
    kept = [(module, dict(module.__dict__), dict(module._buffers)) for module in modules]
    values = [(buffer, buffer.clone()) for _, _, buffers in kept for buffer in buffers.values() if buffer is not None]
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.update(buffers)
        for buffer, value in values:
            buffer.copy_(value)


@contextmanager
def stopping_at(parts: list[nn.Module]) -> Iterator[None]:
    """Ends the forward of a model as soon as one of its parts has produced its output."""

    def stop(module: nn.Module, arguments: Any, output: Any) -> None:
        raise _Reached(output)

    handles = [part.register_forward_hook(stop) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
