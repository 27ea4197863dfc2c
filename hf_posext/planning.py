"""Validates a patch and computes every change of it before anything of the model is touched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from hf_posext import mechanisms
from hf_posext.arguments import LAYERS, SCALES, check_choice, check_length, resolve_factor
from hf_posext.contract import (
    BucketedBias,
    Change,
    GridChange,
    Host,
    NoPosition,
    Reading,
    Remap,
    RotaryChange,
    Site,
    Spectrum,
    TableChange,
    Window,
)
from hf_posext.errors import NoSiteError, PatchError, quoted
from hf_posext.mechanisms import logits
from hf_posext.methods import REGISTRY, Method, get_method
from hf_posext.spans import growths, length_of

ATTENTION = "attention"


@dataclass(frozen=True)
class Plan:
    """A validated patch, before anything is touched.

    `changes` are those at the full factor, also where `dynamic` makes the factor follow the length. `growth` says by
    how many positions each table of rows becomes longer, and `limit` how many tokens the model can read then.
    """

    method: Method
    options: dict[str, Any]
    factor: float
    trained_length: int
    target_length: int
    layers: str
    dynamic: bool
    scale: str
    sites: list[Site]
    readings: list[Reading]
    changes: list[Change]
    window: Window | None
    growth: dict[str, int]
    limit: int

    @property
    def keeps_short(self) -> bool:
        """Whether text of at most N tokens is read as before, to the last bit."""
        return self.dynamic or any(isinstance(each, TableChange) and each.keeps_short for each in self.changes)

    @property
    def names(self) -> list[str]:
        """Paths of the sites."""
        return [str(site) for site in self.sites]

    @property
    def words(self) -> str:
        """Method and first site, for messages."""
        return f"`{self.method.name}` on {self.names[0]}" if self.names else f"`{self.method.name}`"

    @property
    def spectra(self) -> list[Spectrum]:
        """What the rotary sites read as."""
        return [reading for reading in self.readings if isinstance(reading, Spectrum)]

    @property
    def is_active(self) -> bool:
        """Whether anything changes at all."""
        return any(self._differs) or (self.window is not None and self.factor != 1)

    @property
    def is_for_images(self) -> bool:
        """Whether the model sees: N and T are pixels per side."""
        return any(isinstance(change, GridChange) for change in self.changes)

    @property
    def acts_in_attention(self) -> bool:
        """Whether sites are switched off, distances are read as other ones, or logits get a bias."""
        kinds = BucketedBias | NoPosition | Remap
        return self.window is not None or any(isinstance(change, kinds) for change in self.changes)

    @property
    def _differs(self) -> list[bool]:
        pairs = zip(self.readings, self.changes, strict=True)
        return [self.factor != 1 and not is_identity(reading, change) for reading, change in pairs]

    def rotary(self, sites: list[Site]) -> tuple[list[Site], list[Spectrum], list[RotaryChange]]:
        """Sites that get new frequencies, with what each was and what it becomes."""
        rows = zip(sites, self.readings, self.changes, self._differs, strict=True)
        found = [
            (site, reading, change)
            for site, reading, change, differs in rows
            if differs and isinstance(reading, Spectrum) and isinstance(change, RotaryChange)
        ]
        return [site for site, _, _ in found], [reading for _, reading, _ in found], [change for _, _, change in found]


def is_identity(reading: Reading, change: Change) -> bool:
    """Whether a change leaves the site, and the attention that it serves, as they are."""
    return isinstance(change, RotaryChange) and isinstance(reading, Spectrum) and change.is_identity(reading)


def make_plan(
    model: nn.Module,
    method: str,
    factor: object,
    target_length: object,
    given_length: object,
    layers: str,
    options: dict[str, Any],
    dynamic: bool = False,
    scaling: str = "live",
) -> Plan:
    """Validates all arguments and computes every change; nothing of the model is touched.

    Raises:
        TypeError, ValueError, PatchError: as `patch_model`.
    """
    chosen = get_method(method)
    check_choice("layers", layers, LAYERS)
    check_choice("scale", scaling, SCALES)
    root = mechanisms.root_model(model)
    sites = sites_for(model, chosen, layers)
    chosen.check_options(options, {site.mechanism for site in sites} or None)
    known = length_of(model)
    length = known if given_length is None else check_length("original_max_position_embeddings", given_length)
    if length is None:
        raise ValueError(
            f"{type(root.config).__name__} has none of the length fields that are known. "
            "Give `original_max_position_embeddings`, the tokens that the model was trained at."
        )
    scale, target = resolve_factor(factor, target_length, length)
    growth = growths(sites, known, length, target, scale)
    readings = [read(site, length, growth.get(str(site), 0), given_length is not None) for site in sites]
    changes = [change_of(chosen, site, reading, scale, options) for site, reading in zip(sites, readings, strict=True)]
    window = chosen.change(ATTENTION, Host(length), scale, scale, options) if ATTENTION in chosen.functions else None
    follows = check_dynamic(chosen, sites, changes, scale, dynamic or chosen.follows_length(options), window)
    if scaling != "live" and not follows:
        raise ValueError(
            f"`scale`={scaling!r} has a meaning only for a factor that follows the length. Give dynamic=True too."
        )
    return Plan(
        method=chosen,
        options=options,
        factor=scale,
        trained_length=length,
        target_length=target,
        layers=layers,
        dynamic=follows,
        scale=scaling,
        sites=sites,
        readings=readings,
        changes=changes,
        window=window,
        growth=growth,
        limit=(known or length) + max(growth.values(), default=0),
    )


def read(site: Site, length: int, growth: int, is_given: bool) -> Reading:
    """What a site reads as; a table also says how many rows it is to have.

    Args:
        site: the site.
        length: N in tokens.
        growth: by how many positions a table becomes longer.
        is_given: whether N was given, so that a table is read no further.
    """
    if not mechanisms.has_rows(site):
        return mechanisms.read(site, length)
    count = mechanisms.count_positions(site)
    return replace(mechanisms.read_table(site, length if is_given else count), target_length=count + growth)


def check_dynamic(
    method: Method, sites: list[Site], changes: list[Change], factor: float, wanted: bool, window: Window | None
) -> bool:
    """Whether the factor follows the length of the text.

    Raises:
        ValueError: that was asked of a method that has no scale, or that leaves text of N tokens as it is anyway.
    """
    if not wanted:
        return False
    if window is not None or any(isinstance(change, NoPosition | Remap) for change in changes):
        raise ValueError(
            "`dynamic`=True has a meaning only for methods that scale positions, such as `yarn` or `pi`, not for "
            f"`{method.name}`. Leave it out."
        )
    if any(site.mechanism == "relative_bias" for site in sites):
        raise ValueError(
            "`dynamic`=True has no meaning for a relative bias, which all texts of a batch share. Leave it out."
        )
    if any(isinstance(change, GridChange) for change in changes):
        raise ValueError("`dynamic`=True has no meaning for images, which are all of one size. Leave it out.")
    if factor != 1 and any(isinstance(change, TableChange) and not change.is_scaled for change in changes):
        raise ValueError(
            f"`{method.name}` does not move the positions of short text, so nothing depends on its length. Leave "
            "`dynamic` out."
        )
    return True


def sites_for(model: nn.Module, method: Method, layers: str) -> list[Site]:
    """The sites that a method changes.

    Raises:
        NoSiteError: none, with what was looked at, or with the methods that do apply.
    """
    found = mechanisms.find_sites(model)
    sees = any(map(mechanisms.is_grid, found))
    if ATTENTION in method.functions and not sees:
        return []
    partitioned = [name for name, each in model.named_parameters() if hasattr(each, "ds_id") and not each.numel()]
    if partitioned and not any(site.mechanism in method.functions for site in found):
        raise PatchError(
            f"The weights are partitioned by DeepSpeed ZeRO-3 ({partitioned[0]} has no values here), so that a table "
            "of positions cannot be read. Patch the model before DeepSpeed is initialised."
        )
    if not found:
        looked_at = mechanisms.left_alone(model)
        raise NoSiteError(
            f"{type(model).__name__} has no position encoding that is known. Looked at: {quoted(looked_at)}."
        )
    sites = [site for site in found if site.mechanism in method.functions]
    if not sites:
        kinds = sorted({site.mechanism for site in found})
        served = {*kinds} if sees else {*kinds, ATTENTION}
        able = [each.name for each in REGISTRY.values() if served & set(each.functions)]
        raise NoSiteError(f"`{method.name}` has no meaning for a {kinds[0]} encoding. Methods that do: {quoted(able)}.")
    chosen = [site for site in sites if layers == "all" or not site.is_local]
    if not chosen:
        raise NoSiteError(
            f"Only layers with a sliding window rotate in {type(model).__name__} ({quoted(map(str, sites))}), so "
            'layers="full" would change nothing. Give layers="all" to stretch them.'
        )
    return chosen


def change_of(method: Method, site: Site, reading: Reading, factor: float, options: dict[str, Any]) -> Change:
    """What the method makes of one site.

    Raises:
        PatchError: a temperature through cos and sin on a model that scales its logits elsewhere.
    """
    change = method.change(site.mechanism, reading, factor, factor, options)
    if factor == 1 or not (isinstance(change, RotaryChange) and isinstance(reading, Spectrum)):
        return change
    if change.attention_scaling != reading.attention_scaling and logits.scales_logits_itself(site):
        on_logits = (
            'temperature="logits" to scale the whole logit, or ' if "temperature" in method.options("rotary") else ""
        )
        raise PatchError(
            f"`{method.name}` scales cos and sin by {float(change.attention_scaling):.4g}, which on "
            f"{type(site.module).__name__} reaches only a part of each head: this model scales its logits elsewhere. "
            f"Give {on_logits}attention_factor=1.0 for none."
        )
    return change
