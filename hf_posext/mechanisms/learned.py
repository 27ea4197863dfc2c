"""Learned tables: an embedding whose rows are positions."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posext.contract import PositionTable, Site
from hf_posext.mechanisms import _rows
from hf_posext.mechanisms._held import holder_of
from hf_posext.mechanisms._rows import restore, size_fields
from hf_posext.mechanisms._scope import Scoped
from hf_posext.mechanisms.rotary_table import is_narrow, is_sin_cos
from hf_posext.mechanisms.sinusoidal import formula_of

__all__ = ["MECHANISM", "find", "read", "reserved_rows", "restore", "silence"]

MECHANISM = "learned"
WIDTHS = ("hidden_size", "d_model", "embedding_size", "n_embd", "dim", "emb_dim")


def find(scoped: Scoped) -> list[Site]:
    """An embedding with a row for each position that the config allows, and maybe some reserved ones.

    The embeddings of words and of token types have other sizes; where a vocabulary happens to have the same, it is
    known as the model's input embedding.
    """
    module, config = scoped.module, scoped.config
    if not isinstance(module, nn.Embedding) or is_vocabulary(scoped):
        return []
    site = Site(MECHANISM, scoped.name, module, config, "", "weight")
    holder = holder_of(module)
    if holder is not None:  # it may have more rows by now
        return [site] if getattr(holder, "mechanism", None) == MECHANISM else []
    widths = {getattr(config, name, None) for name in WIDTHS}
    is_named = "position" in scoped.name.rpartition(".")[2]
    if not (is_named or module.embedding_dim in widths) or not size_fields(site):
        return []
    rotates = is_narrow(module.weight, config) and is_sin_cos(module.weight)
    return [] if rotates or formula_of(module.weight) else [site]


def reserved_rows(site: Site) -> int:
    """Rows in front that stand for no position.

    Those that the config does not count, and else those up to and with the row of padding.
    """
    holder = holder_of(site.module)
    if holder is not None:
        return holder.reserved
    uncounted = min(size_fields(site).values(), default=0)
    return uncounted or _rows.rows_of_padding(site)


def is_vocabulary(scoped: Scoped) -> bool:
    """Whether the rows are words."""
    return scoped.module is vocabulary_of(scoped.owner) or "word" in scoped.name.rpartition(".")[2]


def vocabulary_of(owner: Any) -> nn.Module | None:
    """The input embedding of a sub-model, None where it does not say."""
    try:
        return owner.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None


def read(site: Site, trained_length: int) -> PositionTable:
    """The first `trained_length` rows for positions."""
    return _rows.read(site, trained_length, reserved_rows(site))


def silence(model: nn.Module, site: Site, reserved: int, more: int) -> None:
    """Switches the table off; it gets as many more rows, of zeros, as the length in the config says then."""
    _rows.silence(model, site, more, reserved, grows=True)
