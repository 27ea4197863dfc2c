"""Methods that act in attention, in the tests: which cases there are, and how a model reads with them."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hf_posext import patch_model
from tests import special_models
from tests.architectures import ARCHITECTURE, ENCODER, TRAINED_LENGTH, tiny_model
from tests.dynamic import text

FACTOR = 4
WINDOW = 8
LENGTH = 48
"""Tokens of a text, where N is 32."""

KINDS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "alibi": ("alibi", {}),
    "nope": ("nope", {}),
    "self_extend": ("self_extend", {"window": WINDOW, "group_size": 4}),
    "self_extend_uneven": ("self_extend", {"window": 10, "group_size": 3, "logn": True}),
    "self_extend_dynamic": ("self_extend", {"window": WINDOW, "group_size": "dynamic"}),
    "rerope": ("rerope", {"window": WINDOW}),
    "rerope_logn": ("rerope", {"window": WINDOW, "logn": True}),
    "leaky_rerope": ("leaky_rerope", {"window": WINDOW, "slope": 0.2}),
    "window": ("window", {"width": WINDOW}),
    "window_sinks": ("window", {"width": WINDOW, "sinks": 2}),
}
"""Name -> method and its options."""
REMAPS = tuple(kind for kind, (method, _) in KINDS.items() if method.endswith(("extend", "rope")))
WITHOUT_ROTATION = ("alibi", "nope", "window", "window_sinks")
"""Kinds that have a meaning for a learned table too."""


def bert(**changes: Any) -> Any:
    """A learned table, bidirectional."""
    settings = {**ENCODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **changes}
    return special_models.build("AutoModelForMaskedLM", "bert", settings)


def gpt2(**changes: Any) -> Any:
    """A learned table, causal."""
    settings = {**special_models.GPT, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, **changes}
    return special_models.build("AutoModelForCausalLM", "gpt2", settings)


TABLES: dict[str, Callable[..., Any]] = {"bert": bert, "gpt2": gpt2}
"""Rows whose positions are a learned table, which the methods of `tests/methods.py` have no meaning for."""
ROTARY = ("llama", "qwen3", "gpt_neox", "gemma3", "modernbert")
ROWS = (*ROTARY, *TABLES)
BIDIRECTIONAL = ("modernbert", "bert")
ENDS_AT_N = [(row, kind) for row in TABLES for kind in ("window", "window_sinks")]
"""These keep their table, and with it its end."""

Pair = tuple[str, str]
EVERY_PAIR: list[Pair] = [
    (row, kind) for row in ROWS for kind in KINDS if row in ROTARY or kind in WITHOUT_ROTATION
]  # fmt: skip
MIXED_PAIRS: list[Pair] = [
    *(("llama", kind) for kind in KINDS),
    ("qwen3", "self_extend_uneven"),
    ("qwen3", "alibi"),
    ("gpt_neox", "leaky_rerope"),
    ("gpt_neox", "window_sinks"),
    ("gemma3", "alibi"),
    ("gemma3", "rerope_logn"),
    ("gemma3", "window_sinks"),
    ("modernbert", "alibi"),
    ("modernbert", "self_extend_uneven"),
    ("modernbert", "self_extend_dynamic"),
    ("modernbert", "window_sinks"),
    ("bert", "alibi"),
    ("bert", "nope"),
    ("bert", "window"),
    ("gpt2", "alibi"),
    ("gpt2", "nope"),
]
"""Every kind on the plain row, and every other row with a few kinds."""
FEW_PAIRS: list[Pair] = [
    ("llama", "alibi"),
    ("llama", "self_extend_uneven"),
    ("llama", "self_extend_dynamic"),
    ("qwen3", "window_sinks"),
    ("gpt_neox", "leaky_rerope"),
    ("gemma3", "rerope_logn"),
    ("modernbert", "self_extend"),
    ("bert", "alibi"),
    ("gpt2", "nope"),
]
"""Every way in which something is done, about once, for what is slow."""


def named(pairs: Iterable[Pair]) -> list[Any]:
    """Pairs of a row and a kind as parameters named after both."""
    return [pytest.param(row, kind, id=f"{row}-{kind}") for row, kind in pairs]


def causal(pairs: Iterable[Pair]) -> list[Pair]:
    """Those pairs whose row decodes with a cache."""
    return [pair for pair in pairs if pair[0] not in BIDIRECTIONAL]


EVERY_CASE, MIXED, FEW = named(EVERY_PAIR), named(MIXED_PAIRS), named(FEW_PAIRS)
CACHED, FEW_CACHED = named(causal(MIXED_PAIRS)), named(causal(FEW_PAIRS))


def make(row: str) -> Any:
    """The unpatched model of a row: float32, in evaluation mode, the same each time."""
    return TABLES[row]() if row in TABLES else tiny_model(row)


def auto_class(row: str) -> Any:
    """The auto class of a row."""
    known = {"bert": "AutoModelForMaskedLM", "gpt2": "AutoModelForCausalLM"}
    return getattr(transformers, known[row] if row in known else ARCHITECTURE[row].auto_class)


@functools.cache
def shared_unpatched(row: str) -> Any:
    """An unpatched model for tests that only read with it."""
    return make(row)


def patch(model: Any, kind: str, factor: float = FACTOR, **changes: Any) -> Any:
    """The model with the patch of a kind."""
    method, options = KINDS[kind]
    return patch_model(model, method, factor, **{**options, **changes})


def patched_model(row: str, kind: str, **changes: Any) -> Any:
    """A fresh patched model."""
    return patch(make(row), kind, **changes)


@functools.cache
def shared_model(row: str, kind: str) -> Any:
    """A patched model for tests that only read with it."""
    return patched_model(row, kind)


def loaded_in(row: str, dtype: torch.dtype) -> Any:
    """The unpatched model as `from_pretrained(dtype=...)` gives it: weights rounded, frequencies not."""
    model = auto_class(row).from_config(make(row).config, dtype=dtype).eval()
    model.load_state_dict(make(row).state_dict())
    return model


def length_for(row: str, kind: str) -> int:
    """Tokens that a patched model can read and that show what it does: beyond N, but for tables that go on to end."""
    return TRAINED_LENGTH if (row, kind) in ENDS_AT_N else LENGTH


def text_for(row: str, kind: str, batch: int = 1, seed: int = 0) -> Tensor:
    """Random token ids, [B, L]."""
    return text(length_for(row, kind), batch=batch, seed=seed)
