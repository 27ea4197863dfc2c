"""Rows of tables across a patch: those that were trained, and the old ones, found again in a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn

from hf_posext import mechanisms
from hf_posext.configs import config_tree
from hf_posext.contract import PositionTable, Site, TableChange
from hf_posext.functional import sinusoidal_table
from hf_posext.lengths import IMAGE_FIELD, LENGTH_FIELDS
from hf_posext.mechanisms import grid
from hf_posext.mechanisms.learned import MECHANISM as LEARNED
from hf_posext.methods import get_method
from hf_posext.records import PatchRecord
from hf_posext.spans import is_whole

Rows = list[tuple[nn.Module, str, Tensor]]


def live_rows(model: nn.Module) -> Rows:
    """Module, name and value of each table of weights that a patch has given other rows, which may be trained."""
    found = [
        (site.module, site.field, attrgetter(site.field)(site.module))
        for site in mechanisms.find_sites(model)
        if mechanisms.is_table(site)
    ]
    return [(module, name, rows) for module, name, rows in found if is_trained(module, rows)]


def lost_tables(model: nn.Module) -> list[Site]:
    """The tables whose rows before the patch are not known."""
    sites = mechanisms.find_sites(model)
    return [site for site in sites if getattr(mechanisms.holder_of(site.module), "is_lost", False)]


def is_trained(module: nn.Module, rows: Tensor) -> bool:
    """Whether a table is held, not switched off and a parameter."""
    holder = mechanisms.holder_of(module)
    return holder is not None and not holder.is_off and isinstance(rows, nn.Parameter)


def put_back(rows: Rows) -> None:
    """Gives tables that a patch was put into again the rows that they had with it before."""
    for module, name, value in rows:
        if not mechanisms.holder_of(module).is_off:
            mechanisms.replace_rows(module, name, value)


def reset(model: nn.Module, record: PatchRecord, sites: list[Site]) -> tuple[Rows, list[nn.Module]]:
    """Gives tables that were loaded with a patch in them the rows that they had before it.

    Args:
        model: as plain transformers loaded it.
        record: the patch, whose config fields are still in force.
        sites: tables of the model.

    Returns:
        The rows of weights that were loaded, which may have been trained since, and the modules whose old rows are not
        in the checkpoint: these have got others of the same size.
    """
    # Rows that were moved follow no formula any more, so what they were is for the record to say.
    kinds = [(site, record.mechanism_at(str(site))) for site in sites]
    mine = [replace(site, mechanism=kind) for site, kind in kinds if kind is not None]
    if any(map(mechanisms.is_grid, mine)):  # a model has no other tables then
        return reset_grids(record, mine)
    growth = {str(site): grown(model, record, site) for site in mine}
    whole = [mechanisms.count_positions(site) - growth[str(site)] for site in mine if is_whole(site)]
    whole += [length for fields in record.before.values() for name, length in fields.items() if name in LENGTH_FIELDS]
    loaded, lost = [], []
    for site in mine:
        table, reserved = getattr(site.module, site.field), mechanisms.reserved_rows(site)
        rows: Tensor | None = table.detach()[reserved:]
        is_computed = mechanisms.read_table(site, len(table)).at is not None  # by its class: nothing was moved
        if isinstance(table, nn.Parameter) and not is_computed:
            loaded.append((site.module, site.field, table.detach().clone()))
        before = counts(
            record, len(table) - reserved - growth[str(site)], min(whole, default=0) if is_whole(site) else None
        )
        for step, (count, used) in zip(reversed(record.steps()), reversed(before), strict=True):
            if rows is not None:
                rows = rows[:count] if is_computed else recovered(site, rows, step, count, used)
        if rows is None:
            rows = stand_in(table.detach()[reserved : reserved + before[0][0]], site)
            lost.append(site.module)
        mechanisms.reset_rows(model, site, torch.cat((table.detach()[:reserved], rows)))
    return loaded, lost


def reset_grids(record: PatchRecord, sites: list[Site]) -> tuple[Rows, list[nn.Module]]:
    """As `reset`, for the tables of a vision model, whose old rows are never in the checkpoint."""
    before = grid.square(record.before[""][IMAGE_FIELD])
    loaded, lost = [], []
    for site in sites:
        if before is not None and grid.sizes_of(site).image != before:
            loaded.append((site.module, site.field, grid.table_of(site).detach().clone()))
            grid.reset(site, before)
            lost.append(site.module)
    return loaded, lost


def stand_in(rows: Tensor, site: Site) -> Tensor:
    """Rows of the size of others, for a table whose own are not known: what is made of them is replaced at once."""
    if site.mechanism == LEARNED:
        return rows.flip(0)
    return sinusoidal_table(*rows.shape).to(rows.device, rows.dtype)


def grown(model: nn.Module, record: PatchRecord, site: Site) -> int:
    """By how many positions a table grew in all steps of a record: as the config field did whose size it is."""
    name = next(iter(mechanisms.size_fields(site)))
    paths = [
        path for path, config in config_tree(mechanisms.root_model(model).config) if type(config) is type(site.config)
    ]
    before = next(record.before[path] for path in paths if path in record.before)
    return int(getattr(site.config, name)) - int(before[name])


def counts(record: PatchRecord, first: int, whole: int | None) -> list[tuple[int, int]]:
    """Positions of a table before each step of a record, and how many of them the step used.

    Args:
        record: the patch.
        first: positions before the first step.
        whole: N of the model before it, where the table is as long as the whole model reads; None for another side.
    """
    found = []
    for step in record.steps():
        found.append((first, first if whole in (None, step.trained_length) else step.trained_length))
        more = int(first * step.factor + 1e-9) - first if whole is None else step.target_length - whole
        first += max(more, 0)
        whole = None if whole is None else whole + max(more, 0)
    return found


def recovered(site: Site, rows: Tensor, step: PatchRecord, count: int, used: int) -> Tensor | None:
    """[N, W]: the rows that a table had before a step, from those that it has after it; None where these do not say.

    They are among the new ones, or the new ones are weighted sums of them, which is solved. Rows that were trained
    since are taken as they are.

    Args:
        site: the table.
        rows: [T, W], those for positions after the step.
        step: of the patch.
        count: N, positions before it.
        used: how many of these it used.
    """
    unit = PositionTable(torch.eye(used, dtype=torch.float64), 0, len(rows), at=partial(no_rows, used))
    change = get_method(step.method).change(site.mechanism, unit, step.factor, step.factor, step.options)
    if not isinstance(change, TableChange):  # switched off: nothing was moved
        return rows[:count]
    place = torch.full((count,), -1)
    is_old = change.old >= 0
    place[change.old[is_old]] = is_old.nonzero().flatten()
    if (place >= 0).all():
        return rows[place]
    if used == count and not change.is_fixed:
        solved = torch.linalg.lstsq(change.rows, rows.double().cpu()).solution.to(rows.device, rows.dtype)
        solved[place >= 0] = rows[place[place >= 0]]
        return solved
    return None


def no_rows(width: int, positions: Tensor) -> Tensor:
    """[P, W] zeros: between old rows nothing of them is known."""
    return torch.zeros(len(positions), width, dtype=torch.float64)
