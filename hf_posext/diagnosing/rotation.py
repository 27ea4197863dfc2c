"""How attention rotates: once, twice or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posext import layouts, mechanisms
from hf_posext.attention.interface import ADAPTER, choose
from hf_posext.configs import config_parts
from hf_posext.contract import Site
from hf_posext.diagnosing.finding import NOTE, OK, WRONG, Finding, NotApplicableError
from hf_posext.diagnosing.subject import Subject
from hf_posext.errors import PatchError
from hf_posext.layouts import Heads
from hf_posext.mechanisms._scope import scoped_modules
from hf_posext.probe import unmoved

TIMES = (1, 2)


def rotation(subject: Subject) -> Finding:
    """Whether attention turns queries and keys by the angles of the rotary modules, once.

    The modules are given frequencies that tell channels apart, and none; what reaches attention is compared.

    Raises:
        NotApplicableError: the model does not rotate, or its attention cannot be watched.
    """
    sites = subject.rotary
    first = sites[0].module
    owner = next(each.owner for each in scoped_modules(subject.root) if each.module is first)
    mine = [site for site in sites if site.config is sites[0].config]
    with frequencies_given_back(mine), watchable(owner):
        counts, reached = rotations(owner, mine)
    if not reached:
        raise NotApplicableError(f"No attention of {type(owner).__name__} goes through transformers' registry.")
    measured = {"modules": reached, "turned_times": counts}
    if not counts:
        return Finding(
            "rotation",
            WRONG,
            measured,
            "Queries and keys reach attention without rotation: the rotary module is not used.",
            "Load without fused or replaced attention, and check the switch for rotary embeddings in the config.",
        )
    if 2 in counts.values():
        return Finding(
            "rotation",
            WRONG,
            measured,
            "Queries and keys are rotated twice.",
            "Take one of two replacements of attention away (a patch for long context on top of a fused kernel).",
        )
    if None in counts.values():
        meaning = "What attention does to queries and keys is not understood as a rotation of channel pairs."
        return Finding("rotation", NOTE, measured, meaning, "Trust `order` and `ablation` for this model.")
    return Finding("rotation", OK, measured, "Attention turns queries and keys once by the rotary module's angles.")


@contextmanager
def watchable(owner: PreTrainedModel) -> Iterator[None]:
    """Attention of a sub-model asks for adapters for the length of a block; those of a patch are there again then."""
    configs = [(config, config._attn_implementation_internal) for config in config_parts(owner)]
    adapters = [(module, vars(module)[ADAPTER]) for module in owner.modules() if ADAPTER in vars(module)]
    choose(config for config, _ in configs)
    try:
        yield
    finally:
        for config, name in configs:
            config._attn_implementation_internal = name
        for module, adapter in adapters:
            vars(module)[ADAPTER] = adapter


@contextmanager
def frequencies_given_back(sites: list[Site]) -> Iterator[None]:
    """Rotary modules are, after a block, what they were before, with their patch where they had one."""
    holders = [(site, mechanisms.holder_of(site.module)) for site in sites]
    kept = [(dict(vars(site.module)), {} if holder is None else fields_of(holder)) for site, holder in holders]
    with unmoved(sites):  # buffers that a patch of some layers does not hold
        try:
            yield
        finally:
            for (site, holder), (attributes, fields) in zip(holders, kept, strict=True):
                if holder is None:
                    mechanisms.restore(site)
                else:
                    vars(site.module).update(attributes)
                    vars(holder).update(fields)
                    holder.rewrite(site.module)


def fields_of(holder: object) -> dict[str, Any]:
    """What a holder keeps, in dicts of its own where these are written into."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(holder).items()}


def rotations(owner: PreTrainedModel, sites: list[Site]) -> tuple[dict[str, int | None], int]:
    """Path of each module that rotates -> how many times (None: in no way that is understood), and all that there are.

    Raises:
        NotApplicableError: the model cannot run on token ids alone.
    """
    chosen = [layouts.chosen_frequencies(site, place / len(sites)) for place, site in enumerate(sites)]
    try:
        still = layouts.watch(owner, sites, [torch.zeros_like(each) for each in chosen])
        turned = layouts.watch(owner, sites, chosen)
    except PatchError as error:
        raise NotApplicableError(str(error)) from error
    names = {module: name for name, module in owner.named_modules()}
    moved = [module for module in still if not torch.equal(still[module].key, turned[module].key)]
    angles = [layouts.angles_of(owner, each) for each in chosen]
    return {names[module]: times(module, still[module], turned[module], angles) for module in moved}, len(still)


def times(module: nn.Module, still: Heads, turned: Heads, angles: list[torch.Tensor]) -> int | None:
    """How many times a module turns by the angles of one of the sites; None for none that is understood."""
    for count in TIMES:
        for each in angles:
            try:
                if layouts.layout_of(module, still, turned, count * each, [], last=True) is not None:
                    return count
            except PatchError:
                continue
    return None
