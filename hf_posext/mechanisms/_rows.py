"""What learned and sinusoidal tables have in common: rows that are added to hidden states, looked up by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_posext.contract import PositionTable, Site, TableChange
from hf_posext.errors import PatchError
from hf_posext.lengths import length_fields, side_fields
from hf_posext.mechanisms._columns import grow_columns
from hf_posext.mechanisms._held import hold, holder_of, release, write_buffer

OFFSET = 2  # rows in front of the first position that some families have whatever their padding
LOOKED_UP = ("weight", "weights")  # names of tables whose modules do nothing but look rows up
OLD_ROWS = "posext_rows"  # the old table beside the new one, where each row of a batch is read with one of them
SIZES = ("num_embeddings", "num_positions", "max_length", "max_positions", "max_position_embeddings")


class RowsHolder:
    """What a table keeps that was changed.

    Which rows a forward looks up is for the module's own code to say: it is run on a table of row numbers.

    Attributes:
        site: what it was found as: mechanism and name of its field.
        original: the table to go back to.
        attributes: numbers of rows that the module keeps, as they were.
        reserved: rows in front that stand for no position.
        is_direct: whether the module does more than to look rows up, so that nothing but its table can be changed.
        is_off: whether zeros are added instead of rows.
        formula: [R, W] float64, rows that are no weights and that nothing may replace; None for weights.
        frozen: [R] bool, rows that training leaves alone; None for none.
        kept: [R, W], what these are.
        is_lost: whether the original is not known, since a checkpoint does not have it.
        chooses: rows looked up -> [B or 1] bool, which rows of the batch are read with the new table; None for all.
    """

    def __init__(self, site: Site, reserved: int) -> None:
        self.original_class = type(site.module)
        self.mechanism, self.field = site.mechanism, site.field
        self.original: Tensor = getattr(site.module, site.field)
        self.attributes = sizes_of(site.module, len(self.original), reserved)
        self.reserved = reserved
        self.is_direct = site.field not in LOOKED_UP
        self.is_off = self.is_lost = False
        self.formula: Tensor | None = None
        self.frozen: Tensor | None = None
        self.kept: Tensor | None = None
        self.chooses: Callable[[Tensor], Tensor] | None = None
        self.numbers: nn.Module | None = None
        self.version = 0

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """[B or 1, L, W], the rows for the positions that the module is asked for; zeros where it is switched off.

        Raises:
            ValueError: a position beyond the last row.
        """
        table: Tensor = getattr(module, self.field)
        if self.is_off:
            return table.new_zeros(1, 1, table.shape[1])
        if self.formula is not None and not torch.compiler.is_compiling() and table._version != self.version:
            self.rewrite(module)
        try:
            if self.is_direct:
                return forward(module, *args, **kwargs)
            rows, *more = self.asked_for(module, args, kwargs)
            found = self.look_up(module, getattr(module, self.field), rows)
        except IndexError as error:
            raise ValueError(too_long(len(table) - self.reserved)) from error
        return (found, *more) if more else found

    def asked_for(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """[..., L] int64, the rows that the module looks up, and what else it gives out.

        Raises:
            IndexError, ValueError: a position far beyond the last row.
        """
        table = getattr(module, self.field)
        if self.numbers is None or self.numbers_table().device != table.device:
            self.count_rows(module)
        output = self.original_class.forward(self.numbers, *args, **kwargs)
        numbers, *more = output if isinstance(output, tuple) else (output,)
        if numbers.shape[-1] != 1:  # a class whose table grows on demand
            self.numbers = None
            raise ValueError(too_long(len(table) - self.reserved))
        return numbers[..., 0].long(), *more

    def look_up(self, module: nn.Module, table: Tensor, rows: Tensor) -> Tensor:
        """The new rows, but for those that are frozen and for texts that are read with the old table."""
        unused = getattr(module, "padding_idx", None) if isinstance(module, nn.Embedding) else None
        found = functional.embedding(rows, table, unused)
        if self.frozen is not None and self.kept is not None:
            found = torch.where(self.frozen[rows][..., None], functional.embedding(rows, self.kept), found)
        if self.chooses is None:
            return found
        rows = rows if rows.dim() > 1 else rows[None]
        is_long = self.chooses(rows - self.reserved)
        old = getattr(module, OLD_ROWS)
        before = functional.embedding(rows.clamp(max=len(old) - 1), old, unused)
        return torch.where(is_long[:, None, None], found, before)

    def numbers_table(self) -> Tensor:
        """[2R, 1]: the numbers 0, 1, ..., beyond R since some classes ask by the width of a batch, padding included."""
        return getattr(self.numbers, self.field)

    def count_rows(self, module: nn.Module) -> None:
        """Makes the module of row numbers: the present one, without hooks, on another table."""
        table = getattr(module, self.field)
        numbers = torch.arange(2 * len(table), dtype=torch.float32, device=table.device)[:, None]
        plain = nn.Module()
        plain.__dict__.update({name: value for name, value in vars(module).items() if name not in vars(plain)})
        plain.__dict__.pop("_posext", None)
        plain.training = False
        plain.__class__ = self.original_class
        plain._buffers[self.field] = numbers
        self.numbers = plain

    def rewrite(self, module: nn.Module) -> None:
        """Writes rows that training or casts may not change, and takes row numbers to where the table is now."""
        table = getattr(module, self.field)
        if self.formula is not None:
            write_buffer(module, self.field, self.formula, table.dtype)
            self.version = getattr(module, self.field)._version
        if self.frozen is not None and self.kept is not None and not table.is_meta:
            self.frozen, self.kept = self.frozen.to(table.device), self.kept.to(table)
            with torch.no_grad():
                table[self.frozen] = self.kept[self.frozen]
        self.numbers = None

    def loaded(self, module: nn.Module) -> None:
        """Rows that are weights are those that were loaded, and frozen ones stay as they were loaded."""
        if self.kept is not None:
            self.kept = getattr(module, self.field).detach().clone()
        self.rewrite(module)

    def rope_parameters(self, label: str | None) -> tuple[Tensor, float]:
        """Never asked for: the module has no frequencies."""
        return torch.empty(0), 1.0


def too_long(last: int) -> str:
    """What is wrong with a text that is too long for a table."""
    return (
        f"The text has a position beyond the last one that the model can read, which is {last - 1} ({last} tokens). "
        "Cut the text, or patch the model with a larger `factor` or `target_length`."
    )


def size_fields(site: Site) -> dict[str, int]:
    """Length fields of the config that say how many rows the table has -> rows beyond what they say."""
    config, rows = site.config, len(getattr(site.module, site.field))
    extra = {0, OFFSET, (getattr(config, "pad_token_id", None) or 0) + 1}
    lengths = {name: getattr(config, name) for name in (*length_fields(config), *side_fields(config))}
    return {name: rows - length for name, length in lengths.items() if rows - length in extra}


def sizes_of(module: nn.Module, rows: int, reserved: int) -> dict[str, int]:
    """Numbers in a module that say how many rows its table has, with or without reserved ones."""
    return {name: vars(module)[name] for name in SIZES if vars(module).get(name) in (rows, rows - reserved)}


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
