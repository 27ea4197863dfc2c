"""A scale that is fixed for a while: for one generation, as fast as a fixed factor, or for a request of a server."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext import mechanisms
from hf_posext.arguments import check_length
from hf_posext.attention.reading import readers
from hf_posext.attention.scaling import Dynamics
from hf_posext.contract import RotaryChange, Site
from hf_posext.errors import PatchError
from hf_posext.mechanisms import logits
from hf_posext.records import record_of

DEFAULT_NEW_TOKENS = 20  # of `generate`, where neither the call nor the generation config says how many


def scale_for(model: nn.Module, length: int) -> float:
    """The scale s at which a text of some length is read (its last token, where the scale follows the length).

    A server can choose by it, for each request, which factor to patch with or at what length to fix the scale.

    Args:
        model: a model patched by this package.
        length: tokens, at least 1.

    Returns:
        max(1, l / N) in 8 to 32 steps per doubling, at most the factor of the patch; with a patch that does not follow
        the length its factor, whatever the length.

    Raises:
        PatchError: the model is not patched.
        TypeError, ValueError: not a whole number of tokens, or below 1.
    """
    check_length("length", length)
    record = record_of(model)
    if record is None:
        raise PatchError("The model is not patched, so no text is scaled. Call `patch_model` first.")
    dynamics = following(model)
    return dynamics[0].scale_at(length) if dynamics else record.factor


@contextmanager
def fixed_length(model: nn.Module, length: int | Sequence[int] | Tensor) -> Iterator[nn.Module]:
    """For the length of a block every text is read at the scale of one length, not of its own.

    With one scale for all rows the rotary modules are set to it, and every pass costs what it costs with a fixed
    factor. A cache that was filled inside can only be read inside a block for the same scale.

    Args:
        model: a model patched with dynamic scaling.
        length: tokens, for all rows or for each: the longest that the text will become; of an encoder-decoder the text
            that it writes.

    Raises:
        PatchError: no dynamic scaling in force, or a block inside another.
        TypeError, ValueError: not a whole number of tokens, or below 1.
    """
    dynamics = following(model)
    if not dynamics:
        raise PatchError("No length can be fixed: the model is not patched with dynamic=True.")
    if any(each.fixed is not None for each in dynamics):
        raise PatchError("A length is fixed already. Leave that block first.")
    rows = torch.as_tensor(length).reshape(-1).tolist()
    lengths = torch.tensor([check_length("length", row) for row in rows])
    levels = dynamics[0].levels_of(lengths)
    one_scale = len(set(levels)) == 1
    for each in dynamics:
        each.fixed, each.levels, each.is_set = lengths, levels[:1] if one_scale else levels, one_scale
    try:
        with set_to(model, dynamics, lengths[:1]) if one_scale else nullcontext():
            yield model
    finally:
        for each in dynamics:
            each.fixed, each.levels, each.is_set = None, None, False


def following(model: nn.Module) -> list[Dynamics]:
    """What reads each text by its length; of an encoder-decoder only the decoder, since an encoder reads it at once."""
    root = mechanisms.root_model(model)
    encoder = root.get_encoder() if root.config.is_encoder_decoder else None
    inside = set(map(id, readers(encoder))) if isinstance(encoder, nn.Module) else set()
    return [each for each in readers(model) if isinstance(each, Dynamics) and id(each) not in inside]


@contextmanager
def set_to(model: nn.Module, dynamics: list[Dynamics], length: Tensor) -> Iterator[None]:
    """Puts the scale of one length, [1] int64, into the rotary modules."""
    schedules = {name: schedule for each in dynamics for name, schedule in each.schedules.items()}
    sites = [site for site in mechanisms.find_sites(model) if str(site) in schedules]
    logit_scale = 1.0
    try:
        for site in sites:
            schedule = schedules[str(site)]
            inv_freq, ratio, logit = schedule.changed(length.to(schedule.base.device))
            put(site, inv_freq[0].cpu(), schedule.scaling * float(ratio))
            logit_scale = float(logit)
        if logit_scale != 1:
            logits.write(model, sites, logit_scale)
        yield
    finally:
        logits.restore(model)
        for site in sites:
            put(site, schedules[str(site)].base.cpu(), schedules[str(site)].scaling)


def put(site: Site, inv_freq: Tensor, scaling: float) -> None:
    """Sets a held site."""
    mechanisms.write(site, RotaryChange(inv_freq, scaling), getattr(mechanisms.holder_of(site.module), "rows", 0))


class FrozenGenerate:
    """`generate` of a model whose scale is frozen: fixed for prompt and new tokens of each row until it ends."""

    def __init__(self, model: Any) -> None:
        self.model = model
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `generate`."""
        with fixed_length(self.model, final_lengths(self.model, *args, **kwargs)):
            return type(self.model).generate(self.model, *args, **kwargs)


def final_lengths(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """[B] int64: tokens of each prompt, padding left out, and the new tokens that a call of `generate` asks for."""
    prompt = args[0] if args else None
    for name in ("inputs", "input_ids", "inputs_embeds"):
        prompt = kwargs.get(name) if prompt is None else prompt
    if prompt is None:
        raise ValueError('scale="frozen" needs a prompt: give `input_ids` or `inputs_embeds` to `generate`.')
    mask = kwargs.get("attention_mask")
    width = prompt.shape[1]
    lengths = torch.full((prompt.shape[0],), width) if mask is None else mask.cpu().long().sum(-1)
    if model.config.is_encoder_decoder:  # what is written begins anew
        width, lengths = 1, torch.ones_like(lengths)
    config = kwargs.get("generation_config") or model.generation_config
    new = kwargs.get("max_new_tokens")
    if new is None and kwargs.get("max_length") is not None:
        new = kwargs["max_length"] - width
    if new is None:
        new = config.max_new_tokens
    if new is None and config.max_length is not None:
        new = config.max_length - width
    return lengths + (DEFAULT_NEW_TOKENS if new is None else max(int(new), 0))
