"""Hierarchical decomposition: a learned table of N rows read as digits in base N, which reaches N^2 positions."""

from __future__ import annotations

import torch

from hf_posext.arguments import check_flag
from hf_posext.contract import PositionTable, TableChange
from hf_posext.functional import hierarchical_table
from hf_posext.methods.registry import method

hierarchical = method(
    "hierarchical",
    summary="compose new rows of a learned table from pairs of old ones; text up to N is unchanged",
    paper="Su 2020, kexue.fm/archives/7947",
)


@hierarchical.on("learned")
def learned(table: PositionTable, factor: float, *, alpha: float = 0.4, frozen_rows: bool = False) -> TableChange:
    """E'[i N + j] = alpha u_i + (1 - alpha) u_j with u_i = (E_i - alpha E_0) / (1 - alpha).

    Args:
        table: the old rows, [N, W].
        factor: s; not used, the table says how long it is to be, N^2 at most.
        alpha: weight of the higher digit, between 0 and 1 and not 0.5.
        frozen_rows: keep the first N rows exact and untrained, so that training changes the new rows only.

    Raises:
        ValueError: another alpha, or more than N^2 positions.

    Source: Su 2020 (kexue.fm/archives/7947).
    """
    length, count = table.target_length, table.trained_length
    places = torch.arange(length)
    old = torch.where(places < count, places, -1)
    rows = hierarchical_table(table.rows, length, alpha=alpha)
    return TableChange(rows, old, keeps_short=True, freezes_old=check_flag("frozen_rows", frozen_rows))
