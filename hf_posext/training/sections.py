"""Sections of keys and values as dataclasses: read from YAML, overridden by words, refused with the nearest key."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import yaml

from hf_posext.errors import unknown

FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def check_share(name: str, value: object) -> None:
    """Refuses what is no number from 0 to 1.

    Raises:
        TypeError, ValueError: names the key and what came.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`{name}` must be a number from 0 to 1, got {value!r} of type {type(value).__name__}.")
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be a number from 0 to 1, got {value!r}.")


def parse(text: str, where: str) -> Any:
    """YAML as plain data; `1e-4`, which YAML 1.1 takes for a word, is a number.

    Raises:
        ValueError: no YAML, with the place.
    """
    try:
        return with_floats(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is no YAML: {' '.join(str(error).split())}.") from error


def with_floats(value: Any) -> Any:
    """The same data with words like `1e-4` as numbers."""
    if isinstance(value, dict):
        return {key: with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_floats(item) for item in value]
    return float(value) if isinstance(value, str) and FLOAT.fullmatch(value) else value


def override(data: dict[str, Any], word: str) -> None:
    """Puts one `key=value` into nested data.

    Raises:
        ValueError: no key and value, or a key inside something that has none.
    """
    key, equals, text = word.partition("=")
    if not (equals and all(key.split("."))):
        raise ValueError(
            f"`--set` must be KEY=VALUE with a dotted key, got {word!r}. For example training.max_steps=50."
        )
    *sections, last = key.split(".")
    for section in sections:
        inner = data.get(section)
        data[section] = {} if inner is None else inner
        data = data[section]
        if not isinstance(data, dict):
            raise ValueError(f"`--set {word}`: `{section}` holds {data!r}, which has no keys.")
    data[last] = parse(text, f"`--set {word}`")


def build(cls: Callable[..., Any], data: Mapping[str, Any], where: str = "") -> Any:
    """A dataclass from nested plain data.

    Raises:
        TypeError, ValueError: an unknown key, with the nearest known one, or a section that is no mapping.
    """
    known = {each.name: each for each in fields(cls)}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    values = {}
    for key, value in data.items():
        if key not in known:
            raise ValueError(unknown(f"key in {where}" if where else "key", key, known))
        kind = hints[key]
        is_section = is_dataclass(kind) or known[key].default_factory not in (MISSING, list)
        if is_section and value is None:
            continue
        if is_section and not isinstance(value, Mapping):
            raise TypeError(f"`{key}` must be a section with keys, got {value!r} of type {type(value).__name__}.")
        values[key] = build(kind, value, f"`{key}`") if is_dataclass(kind) else value  # type: ignore[arg-type]
    return cls(**values)
