"""Static scaling of a model: one factor for every length, in its modules and, where there are words, in its config."""

from __future__ import annotations

import copy

from torch import nn

from hf_posext import distances, images, mechanisms, native, tables
from hf_posext.configs import ConfigUndo, config_parts
from hf_posext.contract import DistanceChange, RotaryChange, Site, Spectrum, TableChange
from hf_posext.mechanisms import logits
from hf_posext.planning import Plan


def write(model: nn.Module, plan: Plan, sites: list[Site], undo: ConfigUndo, first: int) -> str | None:
    """Writes a factor that does not follow the length into sites, softmax scaling and `rope_parameters`.

    Returns:
        In what words plain transformers loads it, as `PatchRecord.native`; None where one of the sites has none.
    """
    kinds: list[str | None] = []
    if any(isinstance(change, RotaryChange) for change in plan.changes):
        kinds.append(write_rotary(model, plan, sites, undo, first))
    if any(isinstance(change, TableChange) for change in plan.changes):
        tables.write(model, plan, sites)
        kinds.append(tables.native_kind(model, plan, sites))
    if plan.is_for_images:
        images.write(model, plan, sites, undo)
        kinds.append("weights")
    if any(isinstance(change, DistanceChange) for change in plan.changes):
        distances.write(model, plan, sites)
        kinds.append(None)
    return None if None in kinds else kinds[0]


def write_rotary(model: nn.Module, plan: Plan, sites: list[Site], undo: ConfigUndo, first: int) -> str | None:
    """Writes the rotary part."""
    rotary, spectra, changes = plan.rotary(sites)
    scale = float(changes[0].logit_scale)
    if scale != 1:
        logits.write(model, sites, scale)
    stretch = native.Stretch(plan.method.name, plan.options, plan.target_length / first, first, plan.target_length)
    kind = export(model, undo, rotary, spectra, changes, stretch)
    for site, change in zip(rotary, changes, strict=True):
        mechanisms.write(site, change, plan.target_length)
    return kind


def export(
    model: nn.Module,
    undo: ConfigUndo,
    sites: list[Site],
    spectra: list[Spectrum],
    changes: list[RotaryChange],
    stretch: native.Stretch,
) -> str | None:
    """Writes the patch into `rope_parameters` of every text config, or of none if one of them cannot say it.

    Returns:
        In what words, None where it cannot be said.
    """
    exported = {}
    for kind in {type(site.config) for site in sites}:
        mine = [index for index, site in enumerate(sites) if type(site.config) is kind]
        exported[kind] = native.export(
            sites[mine[0]].config,
            [sites[index] for index in mine],
            [spectra[index] for index in mine],
            [changes[index] for index in mine],
            stretch,
        )
    if any(each is None for each in exported.values()):
        return None
    for config in config_parts(model):
        words = exported.get(type(config))
        if words is not None and words.rope_parameters is not None:
            undo.set(config, rope_parameters=copy.deepcopy(words.rope_parameters))
    return next(each.kind for each in exported.values() if each is not None)
