"""Position interpolation: positions are divided by the factor, so that none exceeds those seen in training."""

from __future__ import annotations

import torch

from hf_posext.arguments import check_choice, check_flag
from hf_posext.contract import (
    DistanceChange,
    GridChange,
    GridTable,
    Host,
    PositionTable,
    RotaryChange,
    Spectrum,
    TableChange,
)
from hf_posext.functional import interpolate_table
from hf_posext.methods._wavelengths import Factor, per_channel
from hf_posext.methods.registry import method

MODES = ("linear", "cubic")
ALIGNMENTS = ("start", "corners")

pi = method(
    "pi",
    aliases=("linear",),
    summary="divide every position by the factor",
    paper="Chen et al. 2023, arXiv 2306.15595, eq. 4",
)


@pi.on("rotary")
def rotary(spectrum: Spectrum, factor: Factor) -> RotaryChange:
    """theta / s: position s p turns as p did. Equal to `rope_type="linear"` of transformers.

    Source: Chen et al. 2023 (arXiv 2306.15595), eq. 4.
    """
    return RotaryChange(spectrum.inv_freq / per_channel(factor), spectrum.attention_scaling)


@pi.on("learned")
def learned(
    table: PositionTable,
    factor: float,
    *,
    mode: str = "linear",
    align: str = "start",
    frozen_rows: bool = False,
) -> TableChange:
    """E'[p] = E[p / s], between rows by interpolation.

    With `align="start"` row s i is old row i to the last bit (for every whole s i), and rows past the last old one hold
    its value. With "corners" the first and the last row are old ones, to the last bit, and no others in general.

    Args:
        table: the old rows, [N, W].
        factor: s.
        mode: "linear" or "cubic" (cubic convolution, as bicubic resizing of images has it).
        align: "start" or "corners".
        frozen_rows: keep old rows exact and untrained, so that training changes the new rows only.

    Raises:
        ValueError: another mode or alignment.

    Source: Zhu et al. 2024 (LongEmbed, arXiv 2404.12096), sec. 4.1 "linear interpolation".
    """
    check_choice("mode", mode, MODES)
    check_choice("align", align, ALIGNMENTS)
    length, count = table.target_length, table.trained_length
    step = {"factor": factor} if align == "start" else {}
    rows = interpolate_table(table.rows, length, mode=mode, align=align, **step)
    places = torch.arange(count, dtype=torch.float64) * factor
    if align == "corners" and count > 1:
        places = torch.arange(count, dtype=torch.float64) * ((length - 1) / (count - 1))
    old = old_rows(places, length)
    return TableChange(rows, old, is_scaled=True, freezes_old=check_flag("frozen_rows", frozen_rows))


@pi.on("sinusoidal")
def sinusoidal(table: PositionTable, factor: float) -> TableChange:
    """Sines and cosines of p / s: position s p has what p had. Exact, between the old rows too.

    Source: Chen et al. 2023 (arXiv 2306.15595), eq. 4, on the formula of Vaswani et al. 2017, sec. 3.5.
    """
    if table.at is None:
        raise ValueError("The rows of this table follow no formula that is known, so nothing is known between them.")
    rows = table.at(torch.arange(table.target_length, dtype=torch.float64) / factor)
    old = old_rows(torch.arange(table.trained_length, dtype=torch.float64) * factor, table.target_length)
    rows[old >= 0] = table.rows[old[old >= 0]]
    return TableChange(rows, old, is_scaled=True, is_fixed=True)


@pi.on("alibi")
@pi.on("relative_bias")
def distances(host: Host, factor: Factor) -> DistanceChange:
    """Distances are divided by s: slopes of a linear bias become m / s, buckets are those of d / s.

    Source: Al-Khateeb et al. 2023 (arXiv 2310.13017) for slopes; the same idea for buckets.
    """
    return DistanceChange(factor)


@pi.on("grid")
def grid(table: GridTable, factor: float) -> GridChange:
    """The table for images with sides s times as long, as the model's own code interpolates it (most are bicubic).

    Rows that are no patches stay as they are.

    Raises:
        ValueError: sides that are not made of whole patches.

    Source: Dosovitskiy et al. 2021 (ViT, arXiv 2010.11929), sec. 3.2 "2D interpolation".
    """
    side, patch = table.trained_length * factor, table.patch
    image = round(side)
    if factor > 1 and (abs(side - image) > 1e-6 or image % patch):
        above = (int(side) // patch + 1) * patch
        raise ValueError(
            f"Images must be made of whole patches of {patch} x {patch} pixels, but {table.trained_length} pixels per "
            f"side by a factor of {factor:g} are {side:g}. Give `target_length`={above}, which is the next that fits."
        )
    return GridChange(table.at(image), image)


def old_rows(places: torch.Tensor, length: int) -> torch.Tensor:
    """[T] int64: which old row stands at each new position, -1 for none; `places` [N] float64 are those of old rows."""
    whole = (places.round() - places).abs() < 1e-9 * places.clamp(min=1)
    fits = whole & (places.round() < length)
    old = torch.full((length,), -1, dtype=torch.int64)
    old[places[fits].round().long()] = fits.nonzero().flatten()
    return old
