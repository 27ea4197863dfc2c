"""Says a patch in the words of transformers' config, so that plain transformers (and engines that read it) load it.

Each way of saying it is tried on a fresh rotary module of the model's own class and kept only if that module turns as
the patched one does. `longrope` with two equal lists can carry any static change of frequencies.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedConfig

from hf_posext.compat import quiet, rope_block
from hf_posext.contract import RotaryChange, Site, Spectrum
from hf_posext.mechanisms import keeper_of, rotary

# Keys that belong to one scaling type; all others (rope_theta, mrope_section, partial_rotary_factor, ...) stay.
SCALING_KEYS = frozenset(
    {"rope_type", "type", "factor", "attention_factor", "original_max_position_embeddings"}
    | {"low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    | {"short_factor", "long_factor", "short_mscale", "long_mscale"}
)
RELATIVE_TOLERANCE = 1e-6  # float32 powers in transformers against float64 here, at small factors
PROBED_POSITIONS = (0, 1, 2, 7)
Block = dict[str, Any]


@dataclass(frozen=True)
class Exported:
    """How one config says the patch: what kind of words, and the new `rope_parameters` (None: none are needed)."""

    kind: str
    rope_parameters: Block | None


@dataclass(frozen=True)
class Stretch:
    """The numbers of a patch that blocks are written from."""

    method: str
    options: dict[str, Any]
    total_factor: float
    original_length: int
    target_length: int


def export(
    config: PreTrainedConfig, sites: list[Site], spectra: list[Spectrum], changes: list[RotaryChange], stretch: Stretch
) -> Exported | None:
    """The new `rope_parameters` of a config whose sites were changed, or None where config words cannot say it.

    Args:
        config: the config before the patch, but with its length fields already raised.
        sites: all changed sites that read this config.
        spectra: what each site was.
        changes: what each site is now.
        stretch: the numbers of the patch.
    """
    if any(float(change.logit_scale) != 1 for change in changes):
        return None
    if all(is_in_state_dict(site, change) for site, change in zip(sites, changes, strict=True)):
        return Exported("weights", None)
    whole = rope_block(config, "")
    if whole is None or any(keeper_of(site) is not rotary for site in sites):
        return None
    whole, kind = copy.deepcopy(whole), ""
    for label in dict.fromkeys(site.label for site in sites):
        of_label = [index for index, site in enumerate(sites) if site.label == label]
        first = of_label[0]
        if any(not torch.equal(changes[index].inv_freq, changes[first].inv_freq) for index in of_label):
            return None
        for block in candidates(rope_block(config, label) or {}, sites[first], spectra[first], changes[first], stretch):
            trial = {**whole, label: block} if label else block
            if turns_alike(sites[first], reloaded(config, trial), changes[first], stretch.total_factor):
                whole, kind = trial, block["rope_type"]
                break
        else:
            return None
    return Exported(kind, whole)


def is_in_state_dict(site: Site, change: RotaryChange) -> bool:
    """Whether the change is saved with the weights: a table carries its scaling, frequencies do not."""
    is_saved = site.field not in site.module._non_persistent_buffers_set
    return is_saved and (keeper_of(site) is not rotary or float(change.attention_scaling) == 1)


def reloaded(config: PreTrainedConfig, rope_parameters: Block) -> PreTrainedConfig | None:
    """The config as transformers would make it from its JSON with another rope block; None where it refuses."""
    try:
        with quiet():
            return type(config).from_dict({**config.to_dict(), "rope_parameters": copy.deepcopy(rope_parameters)})
    except (AttributeError, KeyError, TypeError, ValueError, StrictDataclassError):
        return None


def turns_alike(site: Site, config: PreTrainedConfig | None, change: RotaryChange, factor: float) -> bool:
    """Whether a fresh module made from a config turns as the change says.

    A ramp computed in float32 is off by 6e-8 near 1, which counts factor - 1 times where a channel is interpolated.
    """
    if config is None:
        return False
    try:
        with quiet():
            fresh = rotary.rebuild(site, config)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    inv_freq = getattr(fresh, site.field).double()
    scaling = getattr(fresh, rotary.scaling_name(site.label))
    return (
        inv_freq.shape == change.inv_freq.shape
        and torch.allclose(inv_freq, change.inv_freq, rtol=RELATIVE_TOLERANCE * max(1, factor / 8), atol=0)
        and abs(scaling - change.attention_scaling) <= RELATIVE_TOLERANCE
        and rotary.turns_as(fresh, site.label, change, PROBED_POSITIONS) is not False
    )


def candidates(old: Block, site: Site, spectrum: Spectrum, change: RotaryChange, stretch: Stretch) -> Iterator[Block]:
    """Blocks that may say the change, the plainest first; the caller keeps the first that is right."""
    kept = {key: value for key, value in old.items() if key not in SCALING_KEYS}
    total, original = float(stretch.total_factor), stretch.original_length
    bare = unscaled(site, kept)
    if bare.shape != change.inv_freq.shape:
        return  # the module's width is not what its config says
    ratios = bare / change.inv_freq
    own_temperature = {key: old[key] for key in ("mscale", "mscale_all_dim") if old.get("mscale_all_dim")}
    if not own_temperature:
        base, uniform = rotary.implied_base(change.inv_freq), float(ratios[0])
        if torch.allclose(change.inv_freq, geometric(base, len(ratios)), rtol=RELATIVE_TOLERANCE, atol=0):
            yield {**kept, "rope_type": "default", "rope_theta": base}
        if torch.allclose(ratios, ratios[:1], rtol=RELATIVE_TOLERANCE, atol=0):
            yield {**kept, "rope_type": "linear", "factor": total if abs(total / uniform - 1) < 1e-6 else uniform}
        yield from published(kept, spectrum, change, stretch)
        if old.get("rope_type") == "proportional":
            yield {**kept, "rope_type": "proportional", "factor": total}
    if not torch.isfinite(ratios).all():
        return  # a channel that does not turn has no ratio
    carrier = {
        **kept,
        "rope_type": "longrope",
        "factor": float(old["factor"]) if own_temperature else total,
        "original_max_position_embeddings": original,
        "attention_factor": float(change.attention_scaling),
        "short_factor": ratios.tolist(),
        "long_factor": ratios.tolist(),
        **own_temperature,
    }
    yield carrier
    scaling = float(change.attention_scaling)
    yield {**carrier, "short_mscale": scaling, "long_mscale": scaling}


def geometric(base: float, channels: int) -> Tensor:
    """base^(-i / F), [F] float64: the spectrum without any scaling."""
    return base ** -(torch.arange(channels, dtype=torch.float64) / channels)


def published(kept: Block, spectrum: Spectrum, change: RotaryChange, stretch: Stretch) -> Iterator[Block]:
    """The block of a type that transformers has under the method's own options, where its numbers are consistent."""
    total, original, options = float(stretch.total_factor), stretch.original_length, stretch.options
    if stretch.target_length / original != total:
        return
    block = {**kept, "factor": total, "original_max_position_embeddings": original}
    if stretch.method in ("yarn", "ntk_by_parts"):
        fast = options.get("beta_fast", 32.0)
        yield {
            **block,
            "rope_type": "yarn",
            "beta_fast": spectrum.trained_length / 32 if fast == "auto" else float(fast),
            "beta_slow": float(options.get("beta_slow", 1.0)),
            "attention_factor": float(change.attention_scaling),
            **({} if options.get("truncate", True) else {"truncate": False}),
        }
    if stretch.method == "llama3":
        low, high = options.get("low_freq_factor", 1.0), options.get("high_freq_factor", 4.0)
        yield {**block, "rope_type": "llama3", "low_freq_factor": float(low), "high_freq_factor": float(high)}


def unscaled(site: Site, kept: Block) -> Tensor:
    """The frequencies of the site without any scaling, [F] float64; those there are where they cannot be had."""
    plain = {**kept, "rope_type": "default"}
    config = rotary.module_config(site)
    whole = rope_block(config, "") or {}
    bare = reloaded(config, {**whole, site.label: plain} if site.label else plain)
    with quiet():
        return getattr(rotary.rebuild(site, bare or config), site.field).double()
