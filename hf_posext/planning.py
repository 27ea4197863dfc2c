"""Validates a patch and computes every change of it before anything of the model is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_posext import mechanisms
from hf_posext.arguments import LAYERS, SCALES, check_choice, check_length, resolve_factor
from hf_posext.contract import RotaryChange, Site, Spectrum
from hf_posext.errors import NoSiteError, PatchError, quoted
from hf_posext.lengths import trained_length
from hf_posext.mechanisms import logits
from hf_posext.methods import REGISTRY, Method, get_method


@dataclass(frozen=True)
class Plan:
    """A validated patch, before anything is touched.

    `changes` are those at the full factor, also where `dynamic` makes the factor follow the length.
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
    spectra: list[Spectrum]
    changes: list[RotaryChange]

    @property
    def names(self) -> list[str]:
        """Paths of the sites."""
        return [str(site) for site in self.sites]

    @property
    def is_active(self) -> bool:
        """Whether any site changes at all."""
        return any(self._differs)

    @property
    def _differs(self) -> list[bool]:
        return [not change.is_identity(spectrum) for spectrum, change in zip(self.spectra, self.changes, strict=True)]

    def active(self, sites: list[Site]) -> tuple[list[Site], list[RotaryChange]]:
        """The given sites (those of the plan, looked up again) that change, and their changes."""
        rows = [row for row in zip(sites, self.changes, self._differs, strict=True) if row[2]]
        return [site for site, _, _ in rows], [change for _, change, _ in rows]

    def active_spectra(self, sites: list[Site]) -> tuple[list[Site], list[Spectrum], list[RotaryChange]]:
        """As `active`, with what each site was."""
        rows = [row for row in zip(sites, self.spectra, self.changes, self._differs, strict=True) if row[3]]
        return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


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
    chosen.check_options("rotary", options)
    length = check_length("original_max_position_embeddings", given_length) if given_length is not None else None
    length = length or trained_length(root.config)
    if length is None:
        raise ValueError(
            f"{type(root.config).__name__} has none of the length fields that are known. "
            "Give `original_max_position_embeddings`, the tokens that the model was trained at."
        )
    scale, target = resolve_factor(factor, target_length, length)
    spectra = [mechanisms.read(site, length) for site in sites]
    changes = [change_of(chosen, site, spectrum, scale, options) for site, spectrum in zip(sites, spectra, strict=True)]
    follows = dynamic or chosen.follows_length(options)
    if scaling != "live" and not follows:
        raise ValueError(
            f"`scale`={scaling!r} has a meaning only for a factor that follows the length. Give dynamic=True too."
        )
    return Plan(chosen, options, scale, length, target, layers, follows, scaling, sites, spectra, changes)


def sites_for(model: nn.Module, method: Method, layers: str) -> list[Site]:
    """The sites that a method changes.

    Raises:
        NoSiteError: none, with what was looked at, or with the methods that do apply.
    """
    found = mechanisms.find_sites(model)
    if not found:
        looked_at = mechanisms.left_alone(model)
        raise NoSiteError(
            f"{type(model).__name__} has no position encoding that is known. Looked at: {quoted(looked_at)}."
        )
    sites = [site for site in found if site.mechanism in method.functions]
    if not sites:
        kinds = sorted({site.mechanism for site in found})
        able = [each.name for each in REGISTRY.values() if set(kinds) & set(each.functions)]
        raise NoSiteError(f"`{method.name}` has no meaning for a {kinds[0]} encoding. Methods that do: {quoted(able)}.")
    chosen = [site for site in sites if layers == "all" or not site.is_local]
    if not chosen:
        raise NoSiteError(
            f"Only layers with a sliding window rotate in {type(model).__name__} ({quoted(map(str, sites))}), so "
            'layers="full" would change nothing. Give layers="all" to stretch them.'
        )
    return chosen


def change_of(method: Method, site: Site, spectrum: Spectrum, factor: float, options: dict[str, Any]) -> RotaryChange:
    """What the method makes of one site; at factor 1 the site as it is, whatever the method.

    Raises:
        PatchError: a temperature through cos and sin on a model that scales its logits elsewhere.
    """
    change = method.change(site.mechanism, spectrum, factor, factor, options)
    if factor == 1:
        return RotaryChange(spectrum.inv_freq, spectrum.attention_scaling)
    if change.attention_scaling != spectrum.attention_scaling and logits.scales_logits_itself(site):
        on_logits = (
            'temperature="logits" to scale the whole logit, or ' if "temperature" in method.options("rotary") else ""
        )
        raise PatchError(
            f"`{method.name}` scales cos and sin by {float(change.attention_scaling):.4g}, which on "
            f"{type(site.module).__name__} reaches only a part of each head: this model scales its logits elsewhere. "
            f"Give {on_logits}attention_factor=1.0 for none."
        )
    return change
