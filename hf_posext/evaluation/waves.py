"""What a model adds to, or multiplies with, its states at each position: rows of a table, or cosines of a rotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext import mechanisms
from hf_posext.contract import Site
from hf_posext.errors import quoted
from hf_posext.evaluation.spectra import frequencies_of, rotary_sites
from hf_posext.evaluation.standing import read_twice
from hf_posext.functional import sinusoidal_table

MOST = 1024  # positions that are read where nobody says how many


@dataclass(frozen=True)
class Waves:
    """The rows of one encoding.

    Attributes:
        name: what it is of: path of the site, and the patch.
        unit: of the values, in words.
        values: [P, W] float64, position x channel; for a rotation [P, F], one for each channel pair.
        channel: what a column is, in words.
        trained_length: N in tokens, None where it is not known.
    """

    name: str
    unit: str
    values: Tensor
    channel: str
    trained_length: int | None


def waves_of(
    model: nn.Module | tuple[int, int],
    method: str | None = None,
    factor: float | None = None,
    *,
    positions: int | None = None,
    **arguments: Any,
) -> Waves:
    """The rows of a model's table of positions, learned or sinusoidal, else the cosines of its rotation.

    Args:
        model: a transformers model, which is left as it was; or (P, W) for the published sinusoids at P positions in W
            channels.
        method: to look at, for a model that is not patched; a patch that is in force is looked at without one.
        factor: s, as for `patch_model`.
        positions: how many, from 0 on; if None the target length (without a patch N), at most 1024. No table is read
            beyond its last row.
        arguments: others of `patch_model`.

    Raises:
        TypeError, ValueError: a bad value, or a model that says nothing by position alone (a bias by distance).
        NoSiteError, PatchError: as by `patch_model`.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), sec. 3.5; RoFormer (arXiv 2104.09864), eq. 15.
    """
    if isinstance(model, tuple):
        count, width = model
        return Waves("sinusoids", "value", sinusoidal_table(count, width), "channel", None)
    found = read_twice(model, read, method, factor, reach=positions, **arguments)
    present = found.before if found.after is None else found.after
    if present is None:
        kinds = sorted({site.mechanism for site in mechanisms.find_sites(model)})
        raise ValueError(
            f"{type(model).__name__} has neither a table of positions nor a rotation; it has {quoted(kinds)}. Draw its "
            "bias instead."
        )
    site, values, is_table = present
    rows = values[: found.reach if positions is not None else min(found.reach, MOST)]
    name = site if found.after is None else f"{site}, {found.name}"
    words = ("value added to the states", "channel") if is_table else ("cos(angle)", "channel pair")
    return Waves(name, words[0], rows, words[1], found.trained_length)


def read(model: nn.Module, length: int) -> tuple[str, Tensor, bool] | None:
    """The first encoding by position: its path, values up to some length, and whether it is a table; None without."""
    sites = mechanisms.find_sites(model)
    tables = [site for site in sites if mechanisms.has_rows(site)]
    if tables:
        return str(tables[0]), rows_of(tables[0], length), True
    rotary = sorted(rotary_sites(model), key=lambda site: site.is_local)  # layers that see everything come first
    if not rotary:
        return None
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies_of(model, length)[str(rotary[0])]
    return str(rotary[0]), angles.cos(), False


def rows_of(site: Site, length: int) -> Tensor:
    """[P, W] float64: the rows of a table for the first positions; zeros where it is switched off."""
    rows = mechanisms.read_table(site, min(length, mechanisms.count_positions(site))).rows
    return torch.zeros_like(rows) if mechanisms.is_off(site) else rows
