"""Longer tables made from the rows of a learned one."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posext.arguments import check_choice, check_length, check_positive
from hf_posext.functional._checks import check_table

SNAP = 4 * torch.finfo(torch.float64).eps  # more than rounding s, and then p / s, can move a place
CUBIC = -0.75  # slope of the cubic kernel at distance 1, as in torch's bicubic


def tile_table(table: Tensor, length: int) -> Tensor:
    """Copies, one after another: row p is E[p mod N].

    Args:
        table: E, [N, W] floating.
        length: rows wanted.

    Returns:
        [length, W] like `table`.

    Raises:
        TypeError, ValueError: a bad value.

    Source: Longformer (arXiv 2004.05150), sec. 5.
    """
    rows = len(check_table(table))
    return table[torch.arange(check_length("length", length), device=table.device) % rows]


def hierarchical_table(table: Tensor, length: int, *, alpha: float = 0.4) -> Tensor:
    """Row iN + j is alpha u_i + (1 - alpha) u_j, where u_i = (E_i - alpha E_0) / (1 - alpha).

    Args:
        table: E, [N, W] floating. Its rows are the first N of the result to the last bit.
        length: rows wanted, at most N^2.
        alpha: weight of the coarse place i: above 0, below 1, and not 0.5.

    Returns:
        [length, W] like `table`, computed in float64 on the CPU.

    Raises:
        TypeError, ValueError: a bad value.

    Source: Su 2020, kexue.fm/archives/7947.
    """
    rows, weight = len(check_table(table)), check_positive("alpha", alpha)
    if check_length("length", length) > rows**2:
        raise ValueError(f"`length` must be at most {rows**2}, the square of {rows} rows, got {length}. Lower it.")
    if weight >= 1 or weight == 0.5:  # at 0.5 the rows of (i, j) and (j, i) are the same
        raise ValueError(f"`alpha` must be above 0, below 1 and not 0.5, got {alpha!r}. The source takes 0.4.")
    exact = table.cpu().double()
    parts = (exact - weight * exact[:1]) / (1 - weight)
    beyond = torch.arange(rows, max(length, rows), device="cpu")
    later = weight * parts[beyond // rows] + (1 - weight) * parts[beyond % rows]
    return torch.cat((table[:length], later.to(table.dtype).to(table.device)))


def interpolate_table(
    table: Tensor, length: int, *, factor: float | None = None, mode: str = "linear", align: str = "start"
) -> Tensor:
    """Stretched table: row p is E at the place p / s, between two rows where that is no whole number.

    Args:
        table: E, [N, W] floating.
        length: rows wanted.
        factor: s > 0, length / N if None; only with align="start".
        mode: "linear", or "cubic" for cubic convolution with a = -0.75 and the end rows repeated.
        align: "start" for places p / s, where those beyond the last row hold its value; "corners" for places
            p (N - 1) / (length - 1), where the first row stays the first and the last one the last.

    Returns:
        [length, W] like `table`, computed in float64 on the CPU. A row whose place is a whole number i (with "start"
        the row s i) is row i to the last bit.

    Raises:
        TypeError, ValueError: a bad value.

    Source: Position Interpolation (arXiv 2306.15595), eq. 4, on a table as in LongEmbed (arXiv 2404.12096).
    """
    check_choice("mode", mode, ("linear", "cubic"))
    last = len(check_table(table)) - 1
    places = places_on(last, check_length("length", length), factor, align)
    below = places.floor().long()
    between = (places - below)[:, None]
    source = table.cpu()
    exact = source.double()
    blended = exact.new_zeros(length, table.shape[1])
    for offset in (0, 1) if mode == "linear" else (-1, 0, 1, 2):
        distance = (between - offset).abs()
        weight = 1 - distance if mode == "linear" else cubic_weight(distance)
        blended = blended + weight * exact[(below + offset).clamp(0, last)]
    return torch.where(between == 0, source[below], blended.to(table.dtype)).to(table.device)


def places_on(last: int, length: int, factor: float | None, align: str) -> Tensor:
    """Where each new row lies among the old rows 0, ..., `last`, [length] float64 on the CPU."""
    targets = torch.arange(length, dtype=torch.float64, device="cpu")
    if check_choice("align", align, ("start", "corners")) == "corners":
        if factor is not None:
            raise ValueError(f'`factor` has no meaning with align="corners", got {factor!r}. Leave it out.')
        return targets * last / max(length - 1, 1)
    places = targets / (length / (last + 1) if factor is None else check_positive("factor", factor))
    nearest = places.round()
    return torch.where((places - nearest).abs() <= SNAP * nearest, nearest, places).clamp(max=last)


def cubic_weight(distance: Tensor) -> Tensor:
    """Weight of a row 0 to 2 rows away. Source: Keys 1981, Cubic Convolution Interpolation, eq. 4."""
    near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance * distance + 1
    far = CUBIC * (((distance - 5) * distance + 8) * distance - 4)
    return torch.where(distance <= 1, near, far)
