"""One file per way in which a position encoding is kept: each finds, reads, writes and restores its own sites."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor, nn

from hf_posext.contract import DistanceChange, GridTable, Host, PositionTable, RotaryChange, Site, Spectrum, TableChange
from hf_posext.mechanisms import _rows, alibi, grid, learned, relative_bias, rotary, rotary_table, sinusoidal
from hf_posext.mechanisms._columns import shrink_columns
from hf_posext.mechanisms._held import holder_of
from hf_posext.mechanisms._rows import size_fields
from hf_posext.mechanisms._rows_holder import OLD_ROWS
from hf_posext.mechanisms._scope import find_root, root_model, scoped_modules

__all__ = [
    "OLD_ROWS",
    "count_positions",
    "find_root",
    "find_sites",
    "has_rows",
    "holder_of",
    "is_changed",
    "is_finite",
    "is_grid",
    "is_off",
    "is_table",
    "keeper_of",
    "left_alone",
    "read",
    "read_short",
    "read_spectrum",
    "read_table",
    "replace_rows",
    "reserved_rows",
    "reset",
    "reset_rows",
    "restore",
    "root_model",
    "short_length",
    "shrink_columns",
    "silence",
    "silence_rows",
    "size_fields",
    "write",
    "write_rows",
]

KEEPERS: list[ModuleType] = [rotary, rotary_table, learned, sinusoidal, alibi, relative_bias, grid]


def find_sites(model: nn.Module) -> list[Site]:
    """All sites in the text part of a model, in the order of its modules."""
    scoped = [each for each in scoped_modules(model) if each.is_text]
    return [site for each in scoped for keeper in KEEPERS for site in keeper.find(each)]


def left_alone(model: nn.Module) -> list[str]:
    """Paths of modules that look positional and are not sites: outside the text part, or with nothing to change."""
    taken = {id(site.module) for site in find_sites(model)}
    return [
        f"{each.name} ({type(each.module).__name__})"
        for each in scoped_modules(model)
        if id(each.module) not in taken and looks_positional(each.module)
    ]


def looks_positional(module: nn.Module) -> bool:
    """Whether a module has frequencies, or is an embedding whose class says that it is about positions."""
    if any(name.endswith(rotary.SUFFIX) for name, _ in module.named_buffers(recurse=False)):
        return True
    kind = type(module).__name__.lower()
    return ("rotary" in kind or "position" in kind) and not list(module.children())


def keeper_of(site: Site) -> ModuleType:
    """The file that reads and writes a site: that of its mechanism, of which rotary has two."""
    if site.mechanism == rotary.MECHANISM and not site.field.endswith(rotary.SUFFIX):
        return rotary_table
    return next(keeper for keeper in KEEPERS if site.mechanism == keeper.MECHANISM)


def read(site: Site, trained_length: int) -> Spectrum | PositionTable | GridTable | Host:
    """What a site holds now."""
    return keeper_of(site).read(site, trained_length)


def read_spectrum(site: Site, trained_length: int) -> Spectrum:
    """What a rotary site holds now.

    Raises:
        TypeError: the site is not rotary.
    """
    found = read(site, trained_length)
    if not isinstance(found, Spectrum):
        raise TypeError(f"{site} is a {site.mechanism} site, which has no frequencies.")
    return found


def read_short(site: Site, spectrum: Spectrum) -> Tensor:
    """The frequencies that a site uses for short text, [F] float64."""
    return keeper_of(site).read_short(site, spectrum)


def short_length(site: Site) -> int | None:
    """Up to how many tokens that is, where the checkpoint itself switches with the length; else None."""
    return keeper_of(site).short_length(site)


def write(site: Site, change: RotaryChange | DistanceChange, target_length: int) -> None:
    """Puts a change into a site; a finite table gets `target_length` rows."""
    keeper = keeper_of(site)
    if keeper is rotary_table:
        keeper.write(site, change, target_length)
    else:
        keeper.write(site, change)


def write_rows(model: nn.Module, site: Site, change: TableChange, reserved: int, is_chosen: bool = False) -> None:
    """Gives a table other rows behind its reserved ones; with `is_chosen` its old ones stay beside them."""
    _rows.write(model, site, change, reserved, is_chosen)


def read_table(site: Site, trained_length: int) -> PositionTable:
    """What a table of rows holds now."""
    return keeper_of(site).read(site, trained_length)


def reserved_rows(site: Site) -> int:
    """Rows of a table, in front, that stand for no position."""
    return keeper_of(site).reserved_rows(site)


def reset_rows(model: nn.Module, site: Site, table: Tensor) -> None:
    """Gives an unpatched table the rows, [R, W], that it had before it was patched and saved: fewer ones."""
    _rows.reset(model, site, table, reserved_rows(site))


def replace_rows(module: nn.Module, field: str, rows: Tensor) -> None:
    """Puts rows [R, W] that were loaded or trained into a held table of as many."""
    if isinstance(holder_of(module), grid.GridHolder):
        grid.replace_table(module, rows)
    else:
        _rows.replace_rows(module, field, rows)


def count_positions(site: Site) -> int:
    """Positions for which a table has a row."""
    return len(getattr(site.module, site.field)) - reserved_rows(site)


def has_rows(site: Site) -> bool:
    """Whether a site is a table of rows that are added to hidden states."""
    return site.mechanism in (learned.MECHANISM, sinusoidal.MECHANISM)


def is_grid(site: Site) -> bool:
    """Whether a site is the table of a vision model, with a row for each patch of an image."""
    return site.mechanism == grid.MECHANISM


def is_table(site: Site) -> bool:
    """Whether a site is a table of either kind."""
    return has_rows(site) or is_grid(site)


def is_changed(site: Site) -> bool:
    """Whether a patch has put something into a site."""
    return holder_of(site.module) is not None or site.field in vars(site.module)


def is_off(site: Site) -> bool:
    """Whether a site is switched off."""
    if site.mechanism != rotary.MECHANISM:
        return getattr(holder_of(site.module), "is_off", False)
    return not bool(read_spectrum(site, 1).inv_freq.any())


def is_finite(site: Site) -> bool:
    """Whether a rotary site has a table that ends."""
    return keeper_of(site) is rotary_table


def silence(site: Site, target_length: int) -> None:
    """Makes a site that is no table of rows say nothing: rotation by angle 0, or no bias.

    Args:
        site: the site.
        target_length: rows of a finite table of sines and cosines.
    """
    keeper_of(site).silence(site, target_length)


def silence_rows(model: nn.Module, site: Site, reserved: int, more: int) -> None:
    """Makes a table add zeros in place of rows; `more` is by how much the length in the config was raised."""
    keeper_of(site).silence(model, site, reserved, more)


def restore(site: Site) -> None:
    """Gives a site back what it was before the first write."""
    keeper_of(site).restore(site)


def reset(model: nn.Module, site: Site) -> None:
    """Makes an unpatched site that is no table what its own class makes of the config as it is now."""
    keeper_of(site).reset(model, site)
