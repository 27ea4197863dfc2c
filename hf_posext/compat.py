"""Differences between the supported transformers releases; no other module may test a version or a missing name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import logging


def text_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The configs of the text parts of a model, to any depth: an encoder-decoder has two, a plain decoder its own.

    A config that is its own text part may have parts under other names (a model of bytes and patches); these count
    unless their name says that they see or hear.
    """
    found, pending = [config], [config]
    while pending:
        part = pending.pop()
        news = [each for each in text_parts(part) if all(each is not known for known in found)]
        found.extend(news)
        pending.extend(news)
    if found == [config]:
        return [config, *(each for name, each in vars(config).items() if is_text_part(name, each))]
    return found[1:] + found[:1]  # the parts first: the whole knows no lengths


def text_parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The sub-configs that transformers calls text, for either side of an encoder-decoder; none where it is flat."""
    parts = []
    for side in ({}, {"encoder": True}, {"decoder": True}):
        try:
            part = config.get_text_config(**side)
        except ValueError:  # several candidates and none asked for
            continue
        if any(part is value for value in vars(config).values()):  # else itself, or a copy made for the caller
            parts.append(part)
    encoder = getattr(config, "encoder", None)  # one that sees as well as reads is not called text, but has a text part
    if isinstance(encoder, PreTrainedConfig) and encoder.get_text_config() is not encoder:
        parts.append(encoder)
    return parts


def is_text_part(name: str, value: object) -> bool:
    """Whether a field holds a config and its name does not say that the part sees or hears."""
    sensory = ("vision", "image", "video", "audio", "speech")
    return isinstance(value, PreTrainedConfig) and not any(word in name for word in sensory)


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
