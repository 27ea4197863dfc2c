"""What learned and sinusoidal tables have in common: rows that are added to the hidden states, and can be left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext.contract import PositionTable, Site
from hf_posext.mechanisms._held import Unheld, hold, holder_of, release
from hf_posext.mechanisms._scope import root_model, scoped_modules

LEARNED = "learned"
UNDO = "_posext_columns"


class SilentHolder(Unheld):
    """What a table keeps that is switched off: its rows stay, and zeros are added instead of them."""

    def __init__(self, module: nn.Module, field: str) -> None:
        self.original_class = type(module)
        self.field = field
        self.rows = getattr(module, field).shape[0]

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Zeros, [1, 1, W], for positions of any number: what is added to hidden states may be broadcast."""
        rows: Tensor = getattr(module, self.field)
        return rows.new_zeros(1, 1, rows.shape[1])


def read(site: Site, trained_length: int) -> PositionTable:
    """Size of the table as it was given."""
    rows, width = getattr(site.module, site.field).shape
    holder = holder_of(site.module)
    return PositionTable(rows if holder is None else holder.rows, width, trained_length)


def silence(model: nn.Module, site: Site, target_length: int, more: int) -> None:
    """Switches the site off; a learned table gets so many more rows, of zeros, as the length in the config says then.

    Without them plain transformers could not load what is saved. Sinusoids it computes itself.
    """
    grow_columns(model, site, more)
    if holder_of(site.module) is None:
        hold(site.module, SilentHolder(site.module, site.field))
    rows = getattr(site.module, site.field)
    if site.mechanism == LEARNED:
        put_rows(site, torch.cat((rows.detach(), rows.new_zeros(more, rows.shape[1]))))


def restore(site: Site) -> None:
    """Switches the site on again, with the rows that it had."""
    holder = holder_of(site.module)
    if holder is None:
        return
    release(site.module)
    rows = getattr(site.module, site.field)
    if rows.shape[0] > holder.rows:
        put_rows(site, rows.detach()[: holder.rows].clone())


def reset(model: nn.Module, site: Site, more: int) -> None:
    """Takes away the rows that a table was given when it was switched off, before it was saved."""
    if more == 0:
        return
    grow_columns(model, site, -more)
    rows = getattr(site.module, site.field)
    if site.mechanism == LEARNED:
        put_rows(site, rows.detach()[: len(rows) - more].clone())


def put_rows(site: Site, rows: Tensor) -> None:
    """Binds a table of another length."""
    present = getattr(site.module, site.field)
    setattr(site.module, site.field, nn.Parameter(rows, requires_grad=present.requires_grad))
    if isinstance(site.module, nn.Embedding):
        site.module.num_embeddings = len(rows)


def grow_columns(model: nn.Module, site: Site, more: int) -> None:
    """Lengthens what the module around a table keeps for each position (`position_ids`, `token_type_ids`).

    Args:
        model: the model.
        site: the table, before its own length changes.
        more: positions beyond those that there were; fewer than 0 to take some away for good.
    """
    rows = getattr(site.module, site.field).shape[0]
    parent = root_model(model).get_submodule(site.name.rpartition(".")[0])
    for name, buffer in parent._buffers.items():
        if buffer is None or buffer.is_floating_point() or buffer.dim() != 2 or buffer.shape[1] != rows:
            continue
        if more < 0:
            parent._buffers[name] = buffer[:, :more].clone()
            continue
        parent.__dict__.setdefault(UNDO, {}).setdefault(name, buffer)
        step = buffer[:, -1:] - buffer[:, -2:-1]
        ahead = buffer[:, -1:] + step * torch.arange(1, more + 1, device=buffer.device)
        parent._buffers[name] = torch.cat((buffer, ahead.to(buffer.dtype)), dim=1)


def shrink_columns(model: nn.Module) -> None:
    """Gives all that `grow_columns` has lengthened back."""
    for each in scoped_modules(model):
        for name, buffer in each.module.__dict__.pop(UNDO, {}).items():
            present = each.module._buffers[name]
            each.module._buffers[name] = buffer if present is None else buffer.to(present.device)
