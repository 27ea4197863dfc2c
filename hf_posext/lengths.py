"""The length fields of configs and tokenizers: where N is read, and kept in step as whole numbers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from hf_posext.compat import rope_block, text_configs

# The same quantity under the names that families give it; the first one present is read, all present ones are written.
LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
    "max_trained_positions",
    "model_max_length",
)
# Lengths of one side of an encoder-decoder, which transformers does not treat as the model's own.
SIDE_FIELDS = (
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
    "max_source_positions",
    "max_target_positions",
)
# The size of the images of a vision model: pixels per side, or a pair of them.
IMAGE_FIELD = "image_size"
# Types whose `factor` says that the model reads `factor` times `original_max_position_embeddings`.
STATIC_TYPES = ("yarn", "longrope", "llama3")


def length_fields(config: PreTrainedConfig) -> list[str]:
    """Names of the length fields that a config has, aliases of one another counted once."""
    serialised = config.to_dict()
    return [name for name in LENGTH_FIELDS if isinstance(serialised.get(name), int)]


def side_fields(config: PreTrainedConfig) -> list[str]:
    """Names of the fields that a config has for the length of one side."""
    return [name for name in SIDE_FIELDS if isinstance(getattr(config, name, None), int)]


def image_fields(config: PreTrainedConfig) -> list[str]:
    """Names of the fields for the size of the images that a vision model is made for; none where text has a length."""
    sees = all(getattr(config, name, None) is not None for name in (IMAGE_FIELD, "patch_size"))
    return [IMAGE_FIELD] if sees and not length_fields(config) else []


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The text config that knows a length; the first text config where none does."""
    parts = text_configs(config)
    return next((part for part in parts if length_fields(part)), parts[0])


def stated_length(config: PreTrainedConfig) -> int:
    """The length field of the text config as it is, 0 without one."""
    part = text_part(config)
    return next((int(getattr(part, name)) for name in length_fields(part)), 0)


def trained_length(config: PreTrainedConfig) -> int | None:
    """Tokens that the model as given was made for, scaling that the checkpoint already has included.

    The larger of the length field and `factor` x `original_max_position_embeddings`: some checkpoints raise only one.
    Returns None where no field says it.
    """
    part = text_part(config)
    lengths = [int(getattr(part, name)) for name in length_fields(part)[:1]]
    for block in rope_blocks(part):
        original, factor = block.get("original_max_position_embeddings"), block.get("factor")
        if block.get("rope_type") in STATIC_TYPES and original and factor:
            lengths.append(int(original * factor))
    return max(lengths, default=None)


def original_length(config: PreTrainedConfig, given: int) -> int:
    """The very first trained length: before any scaling that the checkpoint of `given` tokens already carries."""
    part = text_part(config)
    for block in rope_blocks(part):
        if block.get("original_max_position_embeddings"):
            return int(block["original_max_position_embeddings"])
        if block.get("rope_type") == "linear" and block.get("factor"):
            return round(given / block["factor"])
    return given


def rope_blocks(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """All `rope_parameters` blocks of a config: one, or one for each layer type."""
    whole = rope_block(config, "")
    if whole is None:
        return []
    nested = [block for block in whole.values() if isinstance(block, dict)]
    return nested if nested and "rope_type" not in whole else [whole]
