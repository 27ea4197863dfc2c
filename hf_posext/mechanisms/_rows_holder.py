"""What a table keeps whose rows a patch has replaced, and how it is looked up then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_posext.contract import Site
from hf_posext.mechanisms._held import write_buffer

LOOKED_UP = ("weight", "weights")  # names of tables whose modules do nothing but look rows up
OLD_ROWS = "posext_rows"  # the old table beside the new one, where each row of a batch is read with one of them
SIZES = ("num_embeddings", "num_positions", "max_length", "max_positions", "max_position_embeddings")


class RowsHolder:
    """What a table keeps that was changed.

    Which rows a forward looks up is for the module's own code to say: it is run on a table of row numbers.

    Attributes:
        original_class: the class of its module.
        mechanism: what it was found as.
        field: name of its parameter or buffer in the module.
        original: the table to go back to.
        attributes: numbers of rows that the module keeps, as they were.
        reserved: rows in front that stand for no position.
        is_direct: whether the module does more than to look rows up, so that nothing but its table can be changed.
        is_off: whether zeros are added instead of rows.
        formula: [R, W] float64, rows that are no weights and that nothing may replace; None for weights.
        frozen: [R] bool, rows that training leaves alone; None for none.
        kept: [R, W], what these are.
        is_lost: whether the original is not known, since a checkpoint does not have it.
        chooses: positions looked up -> [B or 1] bool, which texts are read with the new table; None for all.
        numbers: the module on a table of row numbers, None where it has to be made.
        version: of the table when the formula was last written into it.
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


def sizes_of(module: nn.Module, rows: int, reserved: int) -> dict[str, int]:
    """Numbers in a module that say how many rows its table has, with or without reserved ones."""
    return {name: vars(module)[name] for name in SIZES if vars(module).get(name) in (rows, rows - reserved)}
