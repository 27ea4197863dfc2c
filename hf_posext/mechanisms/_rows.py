"""What learned and sinusoidal tables have in common: rows that are added to hidden states, looked up by position."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_posext.contract import PositionTable, Site, TableChange
from hf_posext.errors import PatchError
from hf_posext.lengths import length_fields, side_fields
from hf_posext.mechanisms._columns import grow_columns
from hf_posext.mechanisms._held import hold, holder_of, release
from hf_posext.mechanisms._rows_holder import LOOKED_UP, OLD_ROWS, RowsHolder, sizes_of

OFFSET = 2  # rows in front of the first position that some families have whatever their padding


def size_fields(site: Site) -> dict[str, int]:
    """Length fields of the config that say how many rows the table has -> rows beyond what they say."""
    config, rows = site.config, len(getattr(site.module, site.field))
    extra = {0, OFFSET, (getattr(config, "pad_token_id", None) or 0) + 1}
    lengths = {name: getattr(config, name) for name in (*length_fields(config), *side_fields(config))}
    return {name: rows - length for name, length in lengths.items() if rows - length in extra}


def read(site: Site, trained_length: int, reserved: int) -> PositionTable:
    """The first `trained_length` rows for positions that the table has now, on the CPU.

    Raises:
        PatchError: a table on meta, which has no values.
    """
    rows = getattr(site.module, site.field).detach()
    if rows.is_meta:
        raise PatchError(f"{site} is on the meta device and has no values. Load the weights before patching.")
    return PositionTable(rows[reserved : reserved + trained_length].cpu().double(), reserved)


def rows_of_padding(site: Site) -> int:
    """Rows up to and with that of the padding token, after which positions begin; 0 where there is none."""
    padding: int | None = getattr(site.module, "padding_idx", None)
    return 0 if padding is None else padding + 1


def holder_for(site: Site, reserved: int) -> RowsHolder:
    """The holder of a site, put in place where there is none."""
    if holder_of(site.module) is None:
        hold(site.module, RowsHolder(site, reserved))
    return holder_of(site.module)


def write(model: nn.Module, site: Site, change: TableChange, reserved: int, is_chosen: bool) -> None:
    """Gives a table other rows; reserved ones stay in front.

    Args:
        model: the model that has it.
        site: the table.
        change: its new rows.
        reserved: rows that stay.
        is_chosen: whether the old rows stay beside the new ones, to be chosen from by `chooses`.
    """
    present: Tensor = getattr(site.module, site.field)
    grow_columns(model, site, len(change.rows) + reserved - len(present), reserved)
    holder = holder_for(site, reserved)
    if is_chosen:
        check_looked_up(site)
        site.module.register_buffer(OLD_ROWS, present.detach().clone())
    full = torch.cat((present.detach()[:reserved].cpu().double(), change.rows))
    holder.formula = full if change.is_fixed else None
    holder.frozen = holder.kept = None
    if change.freezes_old:
        holder.frozen = torch.cat((torch.ones(reserved, dtype=torch.bool), change.old >= 0)).to(present.device)
        holder.kept = full.to(present.device, present.dtype)
    put_rows(site, full.to(present.dtype).to(present.device), is_trained=not change.is_fixed)
    holder.rewrite(site.module)


def check_looked_up(site: Site) -> None:
    """Refuses what needs more than another table where a module does more than to look rows up.

    Raises:
        PatchError: it does.
    """
    if site.field not in LOOKED_UP:
        raise PatchError(
            f"{site} ({type(site.module).__name__}) does more than to look rows up in its `{site.field}`, so that its "
            "table can be replaced, but neither switched off nor chosen for each text. Patch with another method, and "
            "with dynamic=False."
        )


def silence(model: nn.Module, site: Site, more: int, reserved: int, grows: bool) -> None:
    """Switches a table off.

    Args:
        model: the model that has it.
        site: the table.
        more: by how much the length in the config was raised.
        reserved: rows that stand for no position.
        grows: whether the table gets as many more rows, of zeros, without which plain transformers could not load what
            is saved. What a class computes itself needs none.
    """
    check_looked_up(site)
    grow_columns(model, site, more, reserved)
    holder_for(site, reserved).is_off = True
    rows = getattr(site.module, site.field)
    if grows:
        put_rows(site, torch.cat((rows.detach(), rows.new_zeros(more, rows.shape[1]))), is_trained=True)


def reset(model: nn.Module, site: Site, table: Tensor, reserved: int) -> None:
    """Gives an unpatched table the rows, [R, W], that it had before it was patched and saved: fewer ones."""
    grow_columns(model, site, len(table) - len(getattr(site.module, site.field)), reserved)
    for name in sizes_of(site.module, len(getattr(site.module, site.field)), reserved):
        vars(site.module)[name] -= len(getattr(site.module, site.field)) - len(table)
    put_rows(site, table, is_trained=True)


def replace_rows(module: nn.Module, field: str, rows: Tensor) -> None:
    """Puts rows [R, W] that were loaded or trained into a table of as many, whatever a patch has made of it."""
    holder: RowsHolder = holder_of(module)
    if holder.formula is not None:
        holder.formula = rows.detach().cpu().double()
    elif isinstance(rows, nn.Parameter):
        module._parameters[field] = rows
    else:
        getattr(module, field).data.copy_(rows)
    holder.rewrite(module)


def restore(site: Site) -> None:
    """Gives a table back the rows that it had."""
    holder: RowsHolder | None = holder_of(site.module)
    if holder is None:
        return
    present = getattr(site.module, holder.field)
    release(site.module)
    old = site.module._buffers.pop(OLD_ROWS, None)
    if old is not None:  # a checkpoint has them to the last bit
        holder.original.data = old
    bind(site, holder.original, present)
    vars(site.module).update(holder.attributes)


def bind(site: Site, table: Tensor, like: Tensor) -> None:
    """Puts a table back as what it was (a parameter or a buffer), in the dtype and on the device of another."""
    if (table.dtype, table.device) != (like.dtype, like.device) and not table.is_meta:
        table.data = table.data.to(like.device, like.dtype)
    module = site.module
    if isinstance(table, nn.Parameter):
        module._buffers.pop(site.field, None)
        module._parameters[site.field] = table
    else:
        module._parameters.pop(site.field, None)
        module._buffers[site.field] = table


def put_rows(site: Site, rows: Tensor, is_trained: bool) -> None:
    """Binds a table of another length: a parameter, or a buffer of the same name where it is never trained."""
    module, present = site.module, getattr(site.module, site.field)
    if is_trained and isinstance(present, nn.Parameter):
        rows = nn.Parameter(rows, requires_grad=present.requires_grad)
    rows._is_hf_initialized = True  # type: ignore[attr-defined]  # else `init_weights` would draw it again
    more, holder = len(rows) - len(present), holder_of(module)
    bind(site, rows, rows)
    if holder is not None:
        for name in holder.attributes:
            vars(module)[name] += more
