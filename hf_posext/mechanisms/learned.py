"""Learned tables: an embedding whose rows are positions."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_posext.contract import Site
from hf_posext.lengths import length_fields
from hf_posext.mechanisms._held import holder_of
from hf_posext.mechanisms._rows import LEARNED as MECHANISM
from hf_posext.mechanisms._rows import SilentHolder, read, reset, restore, silence
from hf_posext.mechanisms._scope import Scoped
from hf_posext.mechanisms.sinusoidal import is_sinusoid

__all__ = ["MECHANISM", "find", "read", "reset", "restore", "silence"]

RESERVED = 2  # rows in front of the first position that some families have whatever their padding
# Lengths of one side of an encoder-decoder, which transformers does not treat as the model's own.
SIDE_FIELDS = (
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
    "max_source_positions",
    "max_target_positions",
)


def find(scoped: Scoped) -> list[Site]:
    """An embedding with a row for each position that the config allows, and maybe some reserved ones.

    The embeddings of words and of token types have other sizes; where a vocabulary happens to have the same, it is
    known as the model's input embedding.
    """
    module, config = scoped.module, scoped.config
    if not isinstance(module, nn.Embedding) or is_vocabulary(scoped) or is_sinusoid(module.weight):
        return []
    site = Site(MECHANISM, scoped.name, module, config, "", "weight")
    if isinstance(holder_of(module), SilentHolder):  # it may have more rows by now
        return [site]
    fields = (*length_fields(config), *SIDE_FIELDS)
    lengths = {length for name in fields if isinstance(length := getattr(config, name, None), int)}
    reserved = {0, RESERVED, (getattr(config, "pad_token_id", None) or 0) + 1}
    if not any(module.num_embeddings == length + more for length in lengths for more in reserved):
        return []
    return [site]


def is_vocabulary(scoped: Scoped) -> bool:
    """Whether the rows are words."""
    return scoped.module is vocabulary_of(scoped.owner) or "word" in scoped.name.rpartition(".")[2]


def vocabulary_of(owner: Any) -> nn.Module | None:
    """The input embedding of a sub-model, None where it does not say."""
    try:
        return owner.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
