"""Tile: a learned table that begins again after its last row."""

from __future__ import annotations

import torch

from hf_posext.arguments import check_flag
from hf_posext.contract import PositionTable, TableChange
from hf_posext.functional import tile_table
from hf_posext.methods.registry import method

tile = method(
    "tile",
    aliases=("copy",),
    summary="copy the rows of a learned table one after the other; text up to N is unchanged",
    paper="Beltagy et al. 2020 (Longformer), arXiv 2004.05150, sec. 5",
)


@tile.on("learned")
def learned(table: PositionTable, factor: float, *, frozen_rows: bool = False) -> TableChange:
    """E'[p] = E[p mod N].

    Args:
        table: the old rows, [N, W].
        factor: s; not used, the table says how long it is to be.
        frozen_rows: keep the first N rows exact and untrained, so that training changes the new rows only.

    Source: Beltagy et al. 2020 (arXiv 2004.05150), sec. 5.
    """
    length, count = table.target_length, table.trained_length
    places = torch.arange(length)
    old = torch.where(places < count, places, -1)  # a copy is a new row: it is what training has to change
    rows = tile_table(table.rows, length)
    return TableChange(rows, old, keeps_short=True, freezes_old=check_flag("frozen_rows", frozen_rows))
