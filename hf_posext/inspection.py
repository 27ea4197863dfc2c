"""inspect_model and list_methods: what was found in a model, what is in force, what was left alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

from hf_posext import mechanisms
from hf_posext.contract import MethodInfo, Site
from hf_posext.lengths import trained_length
from hf_posext.methods import REGISTRY
from hf_posext.records import record_of
from hf_posext.reports import Report


@dataclass(frozen=True)
class SiteReport:
    """One site as it is now.

    Attributes:
        mechanism: how position is encoded there.
        site: path of the module, with the layer type where there is one.
        module: class name.
        base: theta.
        rotated_width: R, channels of a head that rotate.
        attention_scaling: multiplier of cos and sin.
        shortest_wavelength: in tokens.
        longest_wavelength: in tokens; None where a channel does not turn.
        incomplete: channels pairs that never complete a turn within N, of rotated_width / 2.
        is_patched: whether a patch that is in force covers the site.
        window: sliding window of the layers that the site serves, None without one.
    """

    mechanism: str
    site: str
    module: str
    base: float
    rotated_width: int
    attention_scaling: float
    shortest_wavelength: float
    longest_wavelength: float | None
    incomplete: int
    is_patched: bool
    window: int | None


@dataclass(frozen=True, repr=False)
class PositionReport(Report):
    """How a model encodes position.

    Attributes:
        model: class name.
        trained_length: N in tokens of the model as given, None where its config does not say.
        usable_length: tokens that it reads now: N, or the target length of the patch.
        record: the patch in force as plain data, None without one.
        in_force: whether the record's patch is active in the modules; None without a record.
        sites: what was found.
        left_alone: what looks positional and was not touched.
        notes: what a user should know.
    """

    model: str
    trained_length: int | None
    usable_length: int | None
    record: dict[str, Any] | None
    in_force: bool | None
    sites: list[SiteReport]
    left_alone: list[str]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def table(self) -> Group:
        """Sites, notes and what was left alone."""
        table = Table(title=f"{self.model}: {self.summary()}", title_justify="left")
        for heading in ("mechanism", "site", "base", "rotated", "wavelengths (tokens)", "no full turn in N", "patched"):
            table.add_column(heading, overflow="fold")
        for site in self.sites:
            longest = "inf" if site.longest_wavelength is None else f"{site.longest_wavelength:.4g}"
            table.add_row(
                site.mechanism,
                Text(f"{site.site}\n{site.module}"),  # a layer type in brackets is no markup
                f"{site.base:g}",
                str(site.rotated_width),
                f"{site.shortest_wavelength:.4g} to {longest}",
                f"{site.incomplete} of {site.rotated_width // 2}",
                "yes" if site.is_patched else "no",
            )
        lines = [f"note: {note}" for note in self.notes]
        if self.left_alone:
            lines.append(f"left alone: {', '.join(self.left_alone)}")
        return Group(table, *(Text(line) for line in lines))

    def summary(self) -> str:
        """Trained and usable length and the patch, in a few words."""
        if self.record is None:
            return f"trained for {self.trained_length} tokens, not patched"
        state = "" if self.in_force else ", RECORDED BUT NOT IN FORCE"
        method, factor = self.record["method"], self.record["factor"]
        how = f"{method} (dynamic)" if self.record["dynamic"] else method
        return f"trained for {self.trained_length}, reads {self.usable_length} tokens by {how} x{factor:g}{state}"


def inspect_model(model: nn.Module) -> PositionReport:
    """What encodes position in a model, patched or not; nothing is changed.

    Args:
        model: a transformers model, also inside PEFT or another wrapper.

    Raises:
        TypeError: not a transformers model.
    """
    root = mechanisms.root_model(model)
    record = record_of(root)
    length = record.trained_length if record else trained_length(root.config)
    sites = mechanisms.find_sites(model)
    in_force = None if record is None else is_in_force(record.native, sites)
    changed = {name for step in record.steps() for name in step.sites} if record and in_force else set()
    rows = [site_report(site, length or 1, str(site) in changed) for site in sites]
    return PositionReport(
        model=type(root).__name__,
        trained_length=length,
        usable_length=record.target_length if record and in_force else length,
        record=record.to_dict() if record else None,
        in_force=in_force,
        sites=rows,
        left_alone=mechanisms.left_alone(model),
        notes=notes_on(rows, length, in_force),
    )


def is_in_force(native: str | None, sites: list[Site]) -> bool:
    """Whether the modules act as a record says: they are held by a patch, or their own config says the same."""
    return native is not None or any(mechanisms.holder_of(site.module) is not None for site in sites)


def site_report(site: Site, length: int, is_patched: bool) -> SiteReport:
    """The row of one site; N in tokens only bears on the count of incomplete channels."""
    spectrum = mechanisms.read(site, length)
    wavelengths = [2 * math.pi / theta if theta else math.inf for theta in spectrum.inv_freq.tolist()]
    longest = max(wavelengths)
    return SiteReport(
        mechanism=site.mechanism,
        site=str(site),
        module=type(site.module).__name__,
        base=spectrum.base,
        rotated_width=spectrum.rotated_width,
        attention_scaling=spectrum.attention_scaling,
        shortest_wavelength=min(wavelengths),
        longest_wavelength=longest if math.isfinite(longest) else None,
        incomplete=sum(wavelength > length for wavelength in wavelengths),
        is_patched=is_patched,
        window=window_of(site),
    )


def window_of(site: Site) -> int | None:
    """The sliding window of the layers that a site serves; for a table shared by all layers, only if all have one."""
    window = getattr(site.config, "sliding_window", None)
    kinds = set(getattr(site.config, "layer_types", None) or [])
    shared_and_all_local = not site.label and (not kinds or kinds == {"sliding_attention"})
    if not window or getattr(site.config, "use_sliding_window", True) is False:
        return None
    return int(window) if site.is_local or shared_and_all_local else None


def notes_on(rows: list[SiteReport], length: int | None, in_force: bool | None) -> list[str]:
    """Sentences on what limits the reach of the model."""
    notes = []
    if not rows:
        notes.append("no position encoding that is known was found")
    if length is None:
        notes.append(
            "the config does not say the trained length: give `original_max_position_embeddings` when patching"
        )
    if in_force is False:
        notes.append("the config records a patch that plain transformers cannot load: use `load_pretrained`")
    windows = {row.window for row in rows if row.window}
    if windows and len(windows) == len({row.window for row in rows}):
        notes.append(f"every layer sees a sliding window of {min(windows)} tokens: that is the reach of one layer")
    return notes


def list_methods(model: nn.Module | None = None) -> list[MethodInfo]:
    """All methods, or those that have a meaning for a model's mechanisms, in the order of registration."""
    if model is None:
        return [method.info() for method in REGISTRY.values()]
    present = {site.mechanism for site in mechanisms.find_sites(model)}
    return [method.info() for method in REGISTRY.values() if present & set(method.functions)]
