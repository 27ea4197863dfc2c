"""What the modules around a table have for each position: ids in columns, causal masks in squares, and their number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_posext.contract import Site
from hf_posext.lengths import LENGTH_FIELDS, SIDE_FIELDS
from hf_posext.mechanisms._scope import scoped_modules

UNDO = "_posext_columns"
SIZES = (*LENGTH_FIELDS, *SIDE_FIELDS)  # that modules keep beside their config


def grow_columns(model: nn.Module, site: Site, more: int, reserved: int) -> None:
    """Lengthens what the sub-model around a table keeps for each position (`position_ids`, `token_type_ids`, masks).

    Args:
        model: the model.
        site: the table, before its own length changes.
        more: positions beyond those that there were; fewer than 0 to take some away for good.
        reserved: rows of the table that stand for no position, for which such a buffer may or may not have a place.
    """
    if more == 0:
        return
    rows = len(getattr(site.module, site.field))
    every = list(scoped_modules(model))
    owner = next(each.owner for each in every if each.module is site.module)
    for module in [each.module for each in every if each.owner is owner]:
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.dim() == 0 or buffer.shape[-1] not in (rows, rows - reserved):
                continue
            if module is site.module and name == site.field:
                continue
            other = grown(buffer, more)
            if other is None:
                continue
            if more > 0:
                module.__dict__.setdefault(UNDO, {}).setdefault(name, buffer)
            module._buffers[name] = other
        for name in SIZES if module is not site.module else ():
            if vars(module).get(name) in (rows, rows - reserved):
                if more > 0:
                    module.__dict__.setdefault(UNDO, {}).setdefault(name, vars(module)[name])
                vars(module)[name] += more


def grown(buffer: Tensor, more: int) -> Tensor | None:
    """The buffer for other positions; None where it is not one of the two kinds."""
    is_square = buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2] > 1
    if is_square and is_causal_mask(buffer):
        return larger_mask(buffer, more) if more > 0 else buffer[..., :more, :more].clone()
    if buffer.is_floating_point() or buffer.dtype == torch.bool or is_square:
        return None
    return continued(buffer, more) if more > 0 else buffer[..., :more].clone()


def continued(ids: Tensor, more: int) -> Tensor:
    """Integers [..., N] that go on with the step of the last two."""
    step = ids[..., -1:] - ids[..., -2:-1]
    ahead = ids[..., -1:] + step * torch.arange(1, more + 1, device=ids.device)
    return torch.cat((ids, ahead.to(ids.dtype)), dim=-1)


def is_causal_mask(mask: Tensor) -> bool:
    """Whether a square says which keys a query sees: by their distance alone, none of those behind it."""
    if mask.is_meta:
        return mask.dtype == torch.bool or mask.is_floating_point()
    same = torch.equal(mask[..., 1:, 1:], mask[..., :-1, :-1])
    return same and not bool(mask.triu(1).any())


def larger_mask(mask: Tensor, more: int) -> Tensor:
    """A causal mask [..., N, N] for more positions; distances that are new in it are seen as the largest old one is."""
    size = mask.shape[-1] + more
    by_distance = mask[..., -1, :].flip(-1)  # of the last query: distance 0, 1, ..., N - 1
    places = torch.arange(size, device=mask.device)
    distance = places[:, None] - places[None, :]
    seen = by_distance[..., distance.clamp(0, mask.shape[-1] - 1)]
    return torch.where(distance >= 0, seen, torch.zeros_like(seen))


def shrink_columns(model: nn.Module) -> None:
    """Gives all that `grow_columns` has lengthened back."""
    for each in scoped_modules(model):
        for name, value in each.module.__dict__.pop(UNDO, {}).items():
            if isinstance(value, int):
                vars(each.module)[name] = value
                continue
            present = each.module._buffers[name]
            each.module._buffers[name] = value if present is None else value.to(present.device)
