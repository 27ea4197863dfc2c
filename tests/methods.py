"""One row per static method: with which options the conformance tests run it. To add a method, add a row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from hf_posext import patch_model
from tests.architectures import ARCHITECTURE, ARCHITECTURES, Architecture

HEAD_WIDTH = 16
TEMPERATURE_ELSEWHERE = ("deepseek_v3", "deepseek_v3_yarn")
"""Rows whose cos and sin cannot carry a temperature (MLA): methods with one are run with `attention_factor=1.0`."""


@dataclass(frozen=True)
class MethodRow:
    """One method with the options that the conformance tests give it, as data."""

    id: str
    """Canonical name."""
    native: str
    """The `rope_type` in which a plain, unscaled Llama says it; what makes it loadable without this package."""
    options: Callable[[int], Mapping[str, Any]] = lambda frequencies: {}
    """Options for a model that rotates F frequencies, for methods that need some or take a list of F values."""
    temperature: bool = False
    """Whether the method multiplies cos and sin by something other than 1."""


METHODS: tuple[MethodRow, ...] = (
    MethodRow("pi", "linear"),
    MethodRow("ntk", "default"),
    MethodRow("ntk_by_parts", "yarn"),
    MethodRow("yarn", "yarn", temperature=True),
    MethodRow("llama3", "llama3"),
    MethodRow("longrope", "longrope", lambda frequencies: {"long_factor": ramp(frequencies)}, temperature=True),
    MethodRow("abf", "default", lambda frequencies: {"rope_theta": 2_000_000.0}),
)
METHOD = {row.id: row for row in METHODS}
DYNAMIC_BY_NATURE = ("dynamic_ntk",)
"""Methods that have no static form: tests/dynamic.py says how they are run."""

IN_ATTENTION = ("alibi", "nope", "self_extend", "rerope", "leaky_rerope", "window")
"""Methods that act on logits rather than on frequencies: tests/in_attention.py says how they are run."""

ON_TABLES = ("tile", "hierarchical", "sinusoidal", "relative_bias")
"""Methods that have a meaning for tables of rows alone: tests/tables.py says how they are run."""

# What is asked of every method is asked of it on these rows, one for each way in which a position encoding is kept.
CORE = ("llama", "gemma3", "gpt_neox", "gptj", "roformer", "qwen2_vl", "deepseek_v3", "llama_yarn", "phi3_longrope")
EVERYWHERE = ("pi", "yarn")


def ramp(frequencies: int) -> list[float]:
    """A factor for each of F channels, from 1 upwards."""
    return [1.0 + 0.25 * channel for channel in range(frequencies)]


def frequencies_of(row: Architecture) -> int:
    """F: channel pairs of a head that rotate."""
    return int(HEAD_WIDTH * row.rotated_share) // 2


def options_for(architecture: str, method: str) -> dict[str, Any]:
    """Options with which a method runs on a row."""
    row = METHOD[method]
    options = dict(row.options(frequencies_of(ARCHITECTURE[architecture])))
    if row.temperature and architecture in TEMPERATURE_ELSEWHERE:
        options["attention_factor"] = 1.0
    return options


def patch_row(model: Any, architecture: str, method: str, factor: float = 2, **arguments: Any) -> Any:
    """`patch_model` with the options of the rows."""
    return patch_model(model, method, factor, **{**options_for(architecture, method), **arguments})


def pairs(rows: tuple[str, ...] = tuple(ARCHITECTURE), methods: tuple[str, ...] = tuple(METHOD)) -> list[Any]:
    """Every method on every row, as parameters named after both."""
    return [pytest.param(row, method, id=f"{row}-{method}") for row in rows for method in methods]


def spread() -> list[Any]:
    """Every method on the core rows and two methods on all others: for checks too slow for the full product."""
    others = tuple(row.id for row in ARCHITECTURES if row.id not in CORE)
    return [*pairs(CORE), *pairs(others, EVERYWHERE)]
