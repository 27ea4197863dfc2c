"""The channel layout of each attention module of a model, found by watching it rotate.

The model runs twice on a few tokens with an attention that answers zeros, so that every layer sees the same hidden
states both times: once with all frequencies zero, once with chosen ones. What changed between the two is the rotation.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posext import mechanisms
from hf_posext.attention import interface
from hf_posext.attention.layout import Layout, LayoutError, fit, usual
from hf_posext.attention.reading import KEYWORD
from hf_posext.attention.turning import turn
from hf_posext.compat import rope_block
from hf_posext.contract import RotaryChange, Site
from hf_posext.errors import PatchError

TOKENS = 24
TOLERANCE = 0.02  # of a head's norm: above bf16 rounding, far below a layout that is wrong


@dataclass(frozen=True)
class Heads:
    """One head of an attention module as it was handed to the attention function, and how many query heads it has."""

    query: Tensor
    key: Tensor
    by_keyword: bool
    count: int


@dataclass
class Watcher:
    """An adapter that keeps what it is called with and answers zeros."""

    heads: dict[nn.Module, Heads] = field(default_factory=dict)

    def attend(self, call: interface.Call) -> interface.Attended:
        """Zeros, so that no layer sees what a former one made of positions."""
        query, key = call.query, call.key
        if call.module not in self.heads and query.shape[2] == key.shape[2] == TOKENS:
            self.heads[call.module] = Heads(
                query[0, 0].clone(), key[0, 0].clone(), KEYWORD in call.options, query.shape[1]
            )
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], call.value.shape[-1]), None


def find_layouts(owner: PreTrainedModel, sites: list[Site]) -> tuple[dict[nn.Module, tuple[Site, Layout]], bool]:
    """The layout of every attention module that rotates by one of the sites, and whether keywords reach them all.

    Raises:
        PatchError: none is reached through the registry, or what one does is not a rotation of channel pairs.
    """
    chosen = [chosen_frequencies(site, place / len(sites)) for place, site in enumerate(sites)]
    still = watch(owner, sites, [torch.zeros_like(each) for each in chosen])
    turned = watch(owner, sites, chosen)
    found: dict[nn.Module, tuple[Site, Layout]] = {}
    known: list[Layout] = []
    for module, before in still.items():
        after = turned[module]
        if torch.equal(before.key, after.key) and torch.equal(before.query, after.query):
            continue
        inside = [index for index, site in enumerate(sites) if any(part is site.module for part in module.modules())]
        for index in inside or range(len(sites)):
            layout = layout_of(
                module,
                before,
                after,
                angles_of(owner, chosen[index]),
                known,
                last=index == (inside or [len(sites) - 1])[-1],
            )
            if layout is not None:
                found[module] = sites[index], layout
                break
    if not found:
        raise PatchError(
            f"No attention of {type(owner).__name__} that rotates goes through transformers' attention registry, which "
            "is where this patch acts. Patch with a method that changes frequencies (and dynamic=False), for the "
            "longest text that you will read."
        )
    return found, all(still[module].by_keyword for module in found)


def chosen_frequencies(site: Site, share: float) -> Tensor:
    """Frequencies, [F] float64 between 0 and pi, that tell channels and sites apart within a few tokens."""
    count = mechanisms.read_spectrum(site, 1).inv_freq.numel()
    return math.pi * (torch.arange(count, dtype=torch.float64) + 0.5) / count * (1 - 0.3 * share)


def places_of(owner: PreTrainedModel) -> Tensor:
    """Positions of the tokens of a watched run, [A, T]: one axis, or three that differ where the model has sections."""
    axis = torch.arange(TOKENS)
    block = rope_block(owner.config.get_text_config(), "") or {}
    if "mrope_section" not in block:
        return axis[None]
    return torch.stack((axis, (5 * axis + 3) % TOKENS, (7 * axis + 1) % TOKENS))


def angles_of(owner: PreTrainedModel, inv_freq: Tensor) -> Tensor:
    """Angles of a watched run, [A, T, F] float64."""
    return places_of(owner).double()[:, :, None] * inv_freq


def watch(owner: PreTrainedModel, sites: list[Site], spectra: list[Tensor]) -> dict[nn.Module, Heads]:
    """`attended` when the sites have given frequencies."""
    for site, inv_freq in zip(sites, spectra, strict=True):
        scaling = mechanisms.read_spectrum(site, 1).attention_scaling
        mechanisms.write(site, RotaryChange(inv_freq, scaling), TOKENS)
    return attended(owner)


def attended(owner: PreTrainedModel) -> dict[nn.Module, Heads]:
    """What reaches the attention function from each module of a sub-model that attends to its own text.

    Raises:
        PatchError: the model cannot run on token ids alone.
    """
    watcher = Watcher()
    parameters = inspect.signature(owner.forward).parameters
    device = next(owner.parameters()).device
    words = int(owner.config.get_text_config().vocab_size)
    # Ids from the whole vocabulary: the first ones of real models are reserved, and their embeddings hardly differ.
    tokens = torch.arange(1, TOKENS + 1, device=device)[None] * max(1, words // (TOKENS + 1)) % words
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}
    places = places_of(owner)
    if len(places) > 1:
        inputs["position_ids"] = places[:, None].to(device)
    inputs = {name: value for name, value in inputs.items() if name in parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        inputs[KEYWORD] = None
    if needs_encoder(owner):  # one token less than the text, so that nobody takes it for the text itself
        width = getattr(owner.config, "cross_attention_hidden_size", None) or owner.config.hidden_size
        weight = next(owner.parameters())
        inputs["encoder_hidden_states"] = weight.new_zeros(1, TOKENS - 1, width)
    every_gpu = range(torch.cuda.device_count())
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=every_gpu), interface.adapted(owner.modules(), watcher):
            torch.manual_seed(0)  # dropout of a model in training mode is the same in both runs
            owner(**inputs)
    except Exception as error:  # whatever a foreign forward raises
        raise PatchError(
            f"{type(owner).__name__} could not be run on a few token ids to see how it rotates "
            f"({type(error).__name__}: {error}). This patch acts in attention: choose one that changes frequencies for "
            "all lengths alike (dynamic=False), or patch after the weights are loaded."
        ) from error
    return watcher.heads


def needs_encoder(owner: PreTrainedModel) -> bool:
    """Whether a sub-model is a decoder whose every layer also attends to an encoder."""
    config: Any = owner.config
    is_decoder = getattr(config, "is_decoder", False) and getattr(config, "cross_attention_hidden_size", None)
    return bool(is_decoder) and "encoder_hidden_states" in inspect.signature(owner.forward).parameters


def layout_of(
    module: nn.Module, before: Heads, after: Heads, angles: Tensor, known: list[Layout], *, last: bool
) -> Layout | None:
    """The layout that explains what was seen of a module, one that is known already or usual if possible.

    A channel that a model has silenced (weights of 0 in the norm of its keys) tells nothing of its partner, so what is
    usual is tried before pairs are looked for.

    Raises:
        PatchError: nothing does, and this was the last site that might.
    """
    name = str(len(known))
    for each in (*known, *usual(name, before.key.shape[-1], angles.shape[-1])):
        if explains(each, before, after, angles):
            known += [each] if each not in known else []
            return each
    try:
        layout = fit(name, before.key, after.key, angles)
        if layout is not None and explains(layout, before, after, angles):
            known.append(layout)
            return layout
        reason = "its queries and keys do not rotate alike"
    except LayoutError as error:
        reason = str(error)
    if last:
        raise PatchError(f"{type(module).__name__} cannot be patched in its attention: {reason}.")
    return None


def explains(layout: Layout, before: Heads, after: Heads, angles: Tensor) -> bool:
    """Whether a layout turns both queries and keys of one run into those of the other."""
    if layout.width != before.key.shape[-1]:
        return False
    pairs = angles.shape[-1] if layout.frequencies is None else len(layout.frequencies)
    order = torch.arange(pairs) if layout.frequencies is None else layout.frequencies
    if int(order.max()) >= angles.shape[-1]:
        return False
    axes = torch.zeros(pairs, dtype=torch.int64) if layout.axes is None else layout.axes
    turns = angles[axes, :, order].T.float()[None, None]
    for still, turned in ((before.query, after.query), (before.key, after.key)):
        expected = turn(still.float().cpu()[None, None], turns.cos(), turns.sin(), layout)
        if (expected[0, 0] - turned.float().cpu()).norm() > TOLERANCE * turned.float().norm():
            return False
    return True
