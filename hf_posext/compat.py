"""Differences between the supported transformers releases; no other module may test a version or a missing name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging


def text_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The configs of the text parts of a model: the config itself, or the sub-configs for text.

    An encoder-decoder has two. A composite config (text with vision or audio) is not among its own text parts.
    """
    found: list[PreTrainedConfig] = []
    for side in ({}, {"encoder": True}, {"decoder": True}):
        try:
            part = config.get_text_config(**side)
        except ValueError:  # several candidates and none asked for
            continue
        if all(part is not other for other in found):
            found.append(part)
    return found or [config]


def rope_block(config: PreTrainedConfig, label: str) -> dict[str, Any] | None:
    """The live `rope_parameters` of one layer type, or of the whole model for an empty label; None without."""
    block = getattr(config, "rope_parameters", None)
    if label and isinstance(block, dict):
        block = block.get(label)
    return block if isinstance(block, dict) else None


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines of transformers' config validation, for configs that are built only to be tried."""
    level = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(level)
