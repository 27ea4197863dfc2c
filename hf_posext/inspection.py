"""inspect_model and list_methods: what was found in a model, what is in force, what was left alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

from hf_posext import mechanisms
from hf_posext.attention.reading import adapters, readers
from hf_posext.contract import GridTable, Host, MethodInfo, PositionTable, Site
from hf_posext.in_attention import is_attention
from hf_posext.methods import REGISTRY
from hf_posext.planning import ATTENTION
from hf_posext.records import record_of
from hf_posext.reports import Report
from hf_posext.spans import length_of


@dataclass(frozen=True)
class SiteReport:
    """One site as it is now.

    Attributes:
        mechanism: how position is encoded there.
        site: path of the module, with the layer type where there is one.
        module: class name.
        is_patched: whether a patch that is in force covers the site.
        is_off: whether the site is switched off, so that it says nothing about positions.
        window: sliding window of the layers that the site serves, None without one.
        base: theta; this and the next five of rotary sites only.
        rotated_width: R, channels of a head that rotate.
        attention_scaling: multiplier of cos and sin.
        shortest_wavelength: in tokens; None where no channel turns.
        longest_wavelength: in tokens; None where a channel does not turn.
        incomplete: channels pairs that never complete a turn within N, of rotated_width / 2.
        rows: of a table of positions.
    """

    mechanism: str
    site: str
    module: str
    is_patched: bool
    is_off: bool
    window: int | None
    base: float | None = None
    rotated_width: int | None = None
    attention_scaling: float | None = None
    shortest_wavelength: float | None = None
    longest_wavelength: float | None = None
    incomplete: int | None = None
    rows: int | None = None

    def cells(self) -> tuple[str, str, str, str]:
        """Base, rotated channels, wavelengths and channels without a full turn as text."""
        if self.base is None or self.rotated_width is None:
            return "", "", "" if self.rows is None else f"{self.rows} rows", ""
        shortest = "inf" if self.shortest_wavelength is None else f"{self.shortest_wavelength:.4g}"
        longest = "inf" if self.longest_wavelength is None else f"{self.longest_wavelength:.4g}"
        counts = f"{self.incomplete} of {self.rotated_width // 2}"
        return f"{self.base:g}", str(self.rotated_width), f"{shortest} to {longest}", counts


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
            table.add_row(
                site.mechanism,
                Text(f"{site.site}\n{site.module}"),  # a layer type in brackets is no markup
                *site.cells(),
                ("off" if site.is_off else "yes") if site.is_patched else "no",
            )
        lines = [f"note: {note}" for note in self.notes]
        if self.left_alone:
            lines.append(f"left alone: {', '.join(self.left_alone)}")
        return Group(table, *(Text(line) for line in lines))

    def summary(self) -> str:
        """Trained and usable length and the patch, in a few words."""
        unit = "pixels per side" if any(site.mechanism == "grid" for site in self.sites) else "tokens"
        if self.record is None:
            return f"trained for {self.trained_length} {unit}, not patched"
        state = "" if self.in_force else ", RECORDED BUT NOT IN FORCE"
        method, factor = self.record["method"], self.record["factor"]
        how = f"{method} (dynamic)" if self.record["dynamic"] else method
        return f"trained for {self.trained_length}, reads {self.usable_length} {unit} by {how} x{factor:g}{state}"


def inspect_model(model: nn.Module) -> PositionReport:
    """What encodes position in a model, patched or not; nothing is changed.

    Args:
        model: a transformers model, also inside PEFT or another wrapper.

    Raises:
        TypeError: not a transformers model.
    """
    root = mechanisms.root_model(model)
    record = record_of(root)
    length = record.trained_length if record else length_of(model)
    sites = mechanisms.find_sites(model)
    in_force = None if record is None else is_in_force(root, record.native, sites)
    steps = record.steps() if record and in_force else []
    changed = [any(step.mechanism_at(str(site)) for step in steps) for site in sites]
    rows = [site_report(site, length or 1, is_patched) for site, is_patched in zip(sites, changed, strict=True)]
    return PositionReport(
        model=type(root).__name__,
        trained_length=length,
        usable_length=record.target_length if record and in_force else length,
        record=record.to_dict() if record else None,
        in_force=in_force,
        sites=rows,
        left_alone=mechanisms.left_alone(model),
        notes=[*notes_on(rows, length, in_force), *notes_on_attention(root)],
    )


def is_in_force(model: nn.Module, native: str | None, sites: list[Site]) -> bool:
    """Whether the modules act as a record says: they are held by a patch, or their own config says the same."""
    return native is not None or any(map(mechanisms.is_changed, sites)) or bool(readers(model))


def site_report(site: Site, length: int, is_patched: bool) -> SiteReport:
    """The row of one site; N in tokens only bears on the count of incomplete channels."""
    reading, kind = mechanisms.read(site, length), type(site.module).__name__
    if isinstance(reading, PositionTable | GridTable):
        return SiteReport(
            site.mechanism,
            str(site),
            kind,
            is_patched,
            mechanisms.is_off(site),
            None,
            rows=attrgetter(site.field)(site.module).shape[-2],
        )
    if isinstance(reading, Host):
        return SiteReport(site.mechanism, str(site), kind, is_patched, mechanisms.is_off(site), None)
    wavelengths = [2 * math.pi / theta if theta else math.inf for theta in reading.inv_freq.tolist()]
    shortest, longest = min(wavelengths), max(wavelengths)
    return SiteReport(
        mechanism=site.mechanism,
        site=str(site),
        module=kind,
        is_patched=is_patched,
        is_off=mechanisms.is_off(site),
        window=window_of(site),
        base=reading.base,
        rotated_width=reading.rotated_width,
        attention_scaling=reading.attention_scaling,
        shortest_wavelength=shortest if math.isfinite(shortest) else None,
        longest_wavelength=longest if math.isfinite(longest) else None,
        incomplete=sum(wavelength > length for wavelength in wavelengths),
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


def notes_on_attention(model: nn.Module) -> list[str]:
    """What attention itself does about positions."""
    count = len(adapters(model))
    return [f"the patch acts in {count} attention modules"] if count else []


def list_methods(model: nn.Module | None = None) -> list[MethodInfo]:
    """All methods, or those that have a meaning for a model's mechanisms, in the order of registration."""
    if model is None:
        return [method.info() for method in REGISTRY.values()]
    present = {site.mechanism for site in mechanisms.find_sites(model)}
    if "grid" not in present and any(is_attention(module) for module in model.modules()):
        present.add(ATTENTION)
    return [method.info() for method in REGISTRY.values() if present & set(method.functions)]
