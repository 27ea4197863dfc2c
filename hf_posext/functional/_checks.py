"""Checks of tensors and counts that several functions share."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from hf_posext.arguments import check_length

EXACT = (torch.float32, torch.float64)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def as_positions(positions: int | Tensor) -> Tensor:
    """A count n as 0, ..., n - 1 (int64 on the CPU), a tensor as it is.

    Raises:
        TypeError, ValueError: no count, or a tensor of a dtype that cannot hold positions.
    """
    if isinstance(positions, Tensor):
        return check_precision("positions", positions)
    return torch.arange(check_length("positions", positions), device="cpu")


def check_precision(name: str, values: Tensor) -> Tensor:
    """A tensor of whole numbers, float32 or float64.

    Raises:
        TypeError: anything else. Half precision has no 257 (bfloat16) or 2049 (float16).
    """
    given = values.dtype if isinstance(values, Tensor) else type(values).__name__
    if given not in (*EXACT, *WHOLE):
        raise TypeError(
            f"`{name}` must be a tensor of whole numbers, float32 or float64, got {given}. Compute them in one of "
            "these; a later conversion does not bring back what was rounded."
        )
    return values


def check_table(table: Tensor) -> Tensor:
    """A floating tensor [N, W] with N, W >= 1.

    Raises:
        TypeError: no floating tensor.
        ValueError: another shape.
    """
    if not isinstance(table, Tensor) or not table.is_floating_point():
        given = table.dtype if isinstance(table, Tensor) else type(table).__name__
        raise TypeError(f"`table` must be a floating tensor, got {given}. Give the weight of the embedding.")
    if table.dim() != 2 or not table.numel():
        raise ValueError(f"`table` must have the shape [rows, channels], got {list(table.shape)}. Give one at a time.")
    return table


def check_whole(name: str, value: object, least: int = 1) -> int:
    """A whole number of at least `least`.

    Raises:
        TypeError: not a whole number (bool included).
        ValueError: a smaller one.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be a whole number >= {least}, got {value!r} of type {type(value).__name__}.")
    if value < least:
        raise ValueError(f"`{name}` must be a whole number >= {least}, got {value!r}.")
    return int(value)
