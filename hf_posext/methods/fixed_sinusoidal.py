"""Sinusoids in place of a learned table, or a fixed table of sinusoids made longer by its own formula."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posext.contract import PositionTable, TableChange
from hf_posext.functional import sinusoidal_table
from hf_posext.methods.registry import method

sinusoidal = method(
    "sinusoidal",
    summary="sines and cosines as positions, fixed; a model trained with a learned table needs tuning",
    paper="Vaswani et al. 2017, arXiv 1706.03762, sec. 3.5",
    needs_tuning=True,
)


@sinusoidal.on("learned")
def learned(table: PositionTable, factor: float) -> TableChange:
    """PE(p) of the paper times one number, which gives it the root mean square of the old table.

    Args:
        table: the old rows, [N, W]; only their size is used.
        factor: s; not used, the table says how long it is to be.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), sec. 3.5; an odd width has one sine more than cosines.
    """
    rows = sinusoidal_table(table.target_length, table.rows.shape[1])
    size = table.rows.square().mean().sqrt() / rows[: table.trained_length].square().mean().sqrt()
    return TableChange(rows * size, no_old_row(table.target_length), is_fixed=True)


@sinusoidal.on("sinusoidal")
def longer(table: PositionTable, factor: float) -> TableChange:
    """The table's own formula at more positions, those that it has to the last bit.

    Args:
        table: the old rows, [N, W].
        factor: s; not used, the table says how long it is to be.

    Raises:
        ValueError: rows that follow no formula that is known.

    Source: the same.
    """
    if table.at is None:
        raise ValueError("The rows of this table follow no formula that is known, so it cannot be made longer.")
    places = torch.arange(table.target_length)
    rows = table.at(places.double())
    rows[: table.trained_length] = table.rows
    old = torch.where(places < table.trained_length, places, -1)
    return TableChange(rows, old, keeps_short=True, is_fixed=True)


def no_old_row(length: int) -> Tensor:
    """[T] int64: none of the new rows is an old one."""
    return torch.full((length,), -1, dtype=torch.int64)
