"""Methods that act on attention logits rather than on frequencies: sites switched off, adapters put in place."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posext import mechanisms, tables
from hf_posext.attention import interface
from hf_posext.attention.biased import LinearlyBiased, Windowed
from hf_posext.attention.bucketed import Bucketed
from hf_posext.attention.interface import Adapter
from hf_posext.attention.layout import Layout
from hf_posext.attention.masks import ABLE
from hf_posext.attention.reading import BIAS, OWNER, SLOPES, Reader, attach
from hf_posext.attention.remapped import Remapped
from hf_posext.configs import config_parts
from hf_posext.contract import (
    BucketedBias,
    Change,
    LinearBias,
    NoPosition,
    PositionTable,
    Remap,
    RotaryChange,
    Site,
    Spectrum,
    Window,
)
from hf_posext.errors import PatchError
from hf_posext.functional import relative_buckets
from hf_posext.layouts import attended, find_layouts
from hf_posext.mechanisms._scope import scoped_modules
from hf_posext.planning import Plan


def install(model: nn.Module, plan: Plan, sites: list[Site]) -> None:
    """Puts a plan that acts in attention into a model.

    Raises:
        PatchError: attention that does not go through transformers' registry.
        ValueError: options that do not fit the model's heads.
    """
    if plan.window is not None:
        put_window(model, plan.window, plan.target_length)
        return
    owners = {id(scoped.module): scoped.owner for scoped in scoped_modules(model)}
    rows = list(zip(sites, plan.readings, plan.changes, strict=True))
    configs = config_parts(model)
    live = {str(site): kept(site, reading) for site, reading, _ in rows if isinstance(reading, Spectrum)}
    tables.write(model, plan, sites)
    for owner in {id(owner): owner for site in sites if (owner := owners[id(site.module)])}.values():
        mine = {str(row[0]): row for row in rows if owners[id(row[0].module)] is owner}
        if not all(type(change) is NoPosition for _, _, change in mine.values()):
            put_adapters(owner, configs, mine, live)
    for site, reading, change in rows:
        if isinstance(reading, PositionTable) and isinstance(change, NoPosition):
            mechanisms.silence_rows(model, site, reading.reserved, plan.growth[str(site)])
        elif isinstance(change, NoPosition):
            mechanisms.silence(site, plan.target_length)
        elif str(site) in live:  # it keeps the frequencies that it has, whatever is cast or loaded
            mechanisms.write(site, live[str(site)], plan.target_length)


def kept(site: Site, spectrum: Spectrum) -> RotaryChange:
    """The frequencies that a site rotates by now; where it has two lists, those for long text."""
    switches = mechanisms.short_length(site) is not None
    inv_freq = spectrum.inv_freq if switches else mechanisms.read_short(site, spectrum)
    return RotaryChange(inv_freq, spectrum.attention_scaling)


def put_adapters(
    owner: PreTrainedModel,
    configs: list[PreTrainedConfig],
    rows: dict[str, tuple[Site, Any, Change]],
    live: dict[str, RotaryChange],
) -> None:
    """Gives each attention module that the sites of one sub-model serve its adapter."""
    interface.choose(configs, ABLE)
    reach = attended(owner)
    served = served_by(owner, list(reach), rows)
    if not served:
        raise PatchError(not_reached(owner))
    has_end = any(isinstance(change, BucketedBias) for _, _, change in rows.values())
    reader = reader_of(owner, configs, all(reach[module].by_keyword for module in served), has_end)
    adapters: dict[nn.Module, Adapter] = {}
    for module, (site, layout) in served.items():
        change, is_causal = rows[str(site)][2], is_causal_module(module)
        if isinstance(change, LinearBias):
            slopes = torch.stack([each(reach[module].count).float() for each in (change.slopes, change.after)])
            if change.learned:
                give_parameter(owner, module, SLOPES, slopes)
            adapters[module] = LinearlyBiased(reader, is_causal, None if change.learned else slopes)
        elif isinstance(change, BucketedBias):
            adapters[module] = Bucketed(reader, is_causal, buckets_of(change, module))
            give_parameter(owner, module, BIAS, torch.zeros(change.buckets, reach[module].count))
        elif isinstance(change, Remap) and layout is not None:
            index = getattr(module, "layer_idx", None)
            adapters[module] = Remapped(reader, is_causal, change, layout, live[str(site)].inv_freq, index)
    attach(owner, reader, adapters)


def buckets_of(change: BucketedBias, module: nn.Module) -> Tensor:
    """[2T + 1] int64: the bucket of each distance from query to key that a text of T tokens has, -T, ..., T.

    Keys behind the query have buckets where attention is bidirectional.

    Raises:
        TypeError, ValueError: sizes from which no buckets follow.
    """
    distances = torch.arange(-len(change.rows), len(change.rows) + 1)
    sizes = {"buckets": change.buckets, "max_distance": change.max_distance}
    return relative_buckets(distances, bidirectional=not is_causal_module(module), **sizes)


def give_parameter(owner: nn.Module, module: nn.Module, name: str, values: Tensor) -> None:
    """Gives an attention module a parameter to be trained, in the dtype of the sub-model and where the module is."""
    like = next(each for each in owner.parameters() if each.is_floating_point())
    device = next(module.parameters(), like).device
    with torch.inference_mode(False):
        module.register_parameter(name, nn.Parameter(values.to(device, like.dtype, copy=True)))


def served_by(
    owner: PreTrainedModel, modules: list[nn.Module], rows: dict[str, tuple[Site, Any, Change]]
) -> dict[nn.Module, tuple[Site, Layout | None]]:
    """The attention modules that the sites of a sub-model serve, and their layout where they rotate.

    Raises:
        PatchError: a map of distances on modules whose rotation is not understood.
    """
    rotary = [site for site, reading, _ in rows.values() if isinstance(reading, Spectrum)]
    tables = [site for site, reading, _ in rows.values() if not isinstance(reading, Spectrum)]
    layouts: dict[nn.Module, tuple[Site, Layout | None]] = {}
    if rotary and modules:
        try:
            layouts.update(find_layouts(owner, rotary)[0])
        except PatchError:
            if any(isinstance(change, Remap) for _, _, change in rows.values()):
                raise
            tables = tables or rotary[:1]  # a bias needs to know only where to go, and keys may be all zeros
    if not tables:
        return layouts
    return {module: layouts.get(module, (tables[0], None)) for module in modules}  # a table is read by every layer


def put_window(model: nn.Module, window: Window, target_length: int) -> None:
    """Gives every attention module of the text part a window."""
    configs = config_parts(model)
    interface.choose(configs, ABLE)
    owners = {
        id(each.owner): each.owner for each in scoped_modules(model) if each.is_text and is_attention(each.module)
    }
    for owner in owners.values():
        reach = attended(owner)
        if not reach:
            raise PatchError(not_reached(owner))
        reader = reader_of(owner, configs, all(heads.by_keyword for heads in reach.values()), has_end=True)
        attach(
            owner,
            reader,
            {module: Windowed(reader, is_causal_module(module), window.width, window.sinks) for module in reach},
        )
    if not owners:
        raise PatchError(not_reached(mechanisms.root_model(model)))
    for site in mechanisms.find_sites(model):
        if mechanisms.is_finite(site):  # positions go on beyond N, so the table has to
            spectrum = mechanisms.read_spectrum(site, target_length)
            mechanisms.write(site, kept(site, spectrum), target_length)


def reader_of(owner: PreTrainedModel, configs: list[PreTrainedConfig], by_keyword: bool, has_end: bool) -> Reader:
    """A reader for the forward of a sub-model.

    Args:
        owner: the sub-model.
        configs: that name its attention implementation.
        by_keyword: whether keyword arguments of its forward reach every attention module.
        has_end: whether its tables stay in use, whose reader, if they have one, knows the longest text.
    """
    names = tuple(inspect.signature(owner.forward).parameters)
    of_tables: Reader | None = owner.__dict__.get(OWNER) if has_end else None
    if of_tables is None:
        return Reader(configs, names, by_keyword, ABLE)
    return Reader(configs, names, by_keyword, ABLE, of_tables.limit, of_tables.padding)


def is_causal_module(module: nn.Module) -> bool:
    """Whether an attention module sees only earlier tokens: the few that do not say it belong to encoders."""
    return bool(getattr(module, "is_causal", False))


def is_attention(module: nn.Module) -> bool:
    """Whether a module is attention over the text that can go through transformers' registry."""
    return hasattr(module, "is_causal") and hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS")


def not_reached(owner: nn.Module) -> str:
    """Why a model cannot be patched."""
    return (
        f"No attention of {type(owner).__name__} goes through transformers' attention registry, which is where this "
        "method acts. Choose one that changes frequencies, see `list_methods(model)`."
    )
