"""Fixed tables of sines and cosines that are added to the hidden states."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext.contract import PositionTable, Site
from hf_posext.functional import sinusoidal_table
from hf_posext.mechanisms import _rows
from hf_posext.mechanisms._held import holder_of
from hf_posext.mechanisms._rows import restore
from hf_posext.mechanisms._rows_holder import RowsHolder
from hf_posext.mechanisms._scope import Scoped

__all__ = ["MECHANISM", "find", "formula_of", "read", "reserved_rows", "restore", "silence"]

MECHANISM = "sinusoidal"
LOOKED_AT = 64  # rows
FORMULAE: list[dict[str, Any]] = [
    {"layout": layout, "spacing": spacing, "turned": turned}
    for layout, turned in (("halves", False), ("interleaved", False), ("halves", True))
    for spacing in ("paper", "tensor2tensor")
]
"""Arguments of `formula_rows`."""


def find(scoped: Scoped) -> list[Site]:
    """A table as wide as the hidden states whose rows are sines and cosines: an embedding's weight, or a buffer."""
    module = scoped.module
    holder = holder_of(module)
    if isinstance(holder, RowsHolder) and holder.mechanism == MECHANISM:  # its rows may be other ones by now
        return [Site(MECHANISM, scoped.name, module, scoped.config, "", holder.field)]
    tables = dict(module.named_buffers(recurse=False))
    if isinstance(module, nn.Embedding):
        tables["weight"] = module.weight
    width = getattr(scoped.config, "hidden_size", None) or getattr(scoped.config, "d_model", None)
    wide = [name for name, table in tables.items() if table.dim() == 2 and table.shape[1] == width]
    sites = [Site(MECHANISM, scoped.name, module, scoped.config, "", name) for name in wide]
    return [site for site in sites if _rows.size_fields(site) and formula_of(tables[site.field])]


def formula_of(table: Tensor) -> dict[str, Any] | None:
    """Which published formula gives the rows of a table, as arguments of `formula_rows`; None for no such table.

    The row of a padding token may be zero, and an odd width may have one channel more than two halves.
    """
    if table.is_meta or table.dim() != 2 or min(table.shape) < 4 or not table.is_floating_point():
        return None
    few = table.detach()[:4].cpu().double()
    if (few.square().sum(1) - table.shape[1] / 2).abs().min() > 1:  # of each angle sin^2 + cos^2 = 1
        return None
    rows = table.detach()[:LOOKED_AT].cpu().double()
    filled = rows.abs().sum(1) > 0
    tolerance = 4 * torch.finfo(table.dtype).eps + 1e-5  # angles of published code are rounded to float32
    for formula in FORMULAE:
        expected = formula_rows(torch.arange(len(rows)), table.shape[1], **formula)
        if filled.sum() > 2 and torch.allclose(rows[filled], expected[filled], rtol=0, atol=tolerance):
            return formula
    return None


def formula_rows(positions: Tensor, width: int, layout: str, spacing: str, turned: bool) -> Tensor:
    """[P, W] float64: `sinusoidal_table`; turned, the cosines come first."""
    rows = sinusoidal_table(positions, width, layout=layout, spacing=spacing)
    return rows.roll(width // 2, dims=1) if turned else rows


def reserved_rows(site: Site) -> int:
    """Rows in front that stand for no position."""
    holder = holder_of(site.module)
    if holder is not None:
        return holder.reserved
    return _rows.rows_of_padding(site)


def read(site: Site, trained_length: int) -> PositionTable:
    """Rows and formula; angles of reserved rows count, since published code numbers rows and not positions."""
    reserved = reserved_rows(site)
    found = _rows.read(site, trained_length, reserved)
    formula = formula_of(getattr(site.module, site.field))
    if formula is None:
        return found
    return replace(found, at=partial(rows_at, found.rows.shape[1], reserved, formula))


def rows_at(width: int, reserved: int, formula: dict[str, Any], positions: Tensor) -> Tensor:
    """[P, W] float64: what a table would say at any positions, [P] float64."""
    return formula_rows(reserved + positions, width, **formula)


def silence(model: nn.Module, site: Site, reserved: int, more: int) -> None:
    """Switches the table off; its class computes as many rows as it needs."""
    _rows.silence(model, site, more, reserved, grows=False)
