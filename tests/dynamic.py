"""Dynamic scaling in the tests: which cases there are, and how a text is read: whole, in pieces, padded, generated."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posext import patch_model, record_of
from tests.architectures import ARCHITECTURE, ARCHITECTURES, DECODER, TRAINED_LENGTH, tiny_inputs, tiny_model
from tests.methods import TEMPERATURE_ELSEWHERE, frequencies_of, ramp

FACTOR = 4
PREFILL, LENGTH = 20, 48
"""Tokens read at once, and in all, where N is 32."""
TOLERANCE = 1e-4
CORE = ("llama", "gpt_neox", "qwen3", "gemma3", "phi3")


@functools.cache
def shared_unpatched(row: str) -> Any:
    """An unpatched model for tests that only read with it."""
    return tiny_model(row)


def is_in_registry(row: str) -> bool:
    """Whether the attention of a row goes through transformers' registry; that of GPT-J does in newer releases."""
    return hasattr(sys.modules[type(shared_unpatched(row)).__module__], "ALL_ATTENTION_FUNCTIONS")


REFUSED = tuple(row.id for row in ARCHITECTURES if not is_in_registry(row.id))
SHARP = ("granite",)
"""Rows with logits so large that in float32 the unpatched model too misses the tolerance: these run in float64."""
OTHERS = tuple(row.id for row in ARCHITECTURES if row.id not in (*CORE, *REFUSED))

KINDS: dict[str, tuple[str, Callable[[int], Mapping[str, Any]]]] = {
    "pi": ("pi", lambda frequencies: {}),
    "ntk": ("ntk", lambda frequencies: {}),
    "ntk_by_parts": ("ntk_by_parts", lambda frequencies: {}),
    "yarn": ("yarn", lambda frequencies: {}),
    "llama3": ("llama3", lambda frequencies: {}),
    "abf": ("abf", lambda frequencies: {"rope_theta": 2_000_000.0}),
    "dynamic_ntk": ("dynamic_ntk", lambda frequencies: {}),
    "longrope": ("longrope", lambda frequencies: {"long_factor": ramp(frequencies)}),
    "longrope_two_lists": (
        "longrope",
        lambda frequencies: {"long_factor": ramp(frequencies), "short_factor": short_list(frequencies)},
    ),
    "yarn_logits": ("yarn", lambda frequencies: {"temperature": "logits"}),
    "pi_all": ("pi", lambda frequencies: {"layers": "all"}),
}
"""Name -> method and its options for a model that rotates F frequencies."""

SWITCHED_AT_N = "longrope_two_lists"
"""The one kind that does not read short text as the unpatched model does: that is what its short list is for."""
EVERYWHERE = tuple(KINDS)[:9]
EXTRA = (("llama", "yarn_logits"), ("gpt_neox", "yarn_logits"), ("gemma3", "pi_all"))


def short_list(frequencies: int) -> list[float]:
    """A factor for each of F channels that changes short text a little."""
    return [1.0 + 0.02 * channel for channel in range(frequencies)]


def named(pairs: Iterable[tuple[str, str]]) -> list[Any]:
    """Pairs of a row and a kind as parameters named after both."""
    return [pytest.param(row, kind, id=f"{row}-{kind}") for row, kind in pairs]


CORE_CASES = named([*((row, kind) for row in CORE for kind in EVERYWHERE), *EXTRA])
OTHER_PAIRS = [*((row, kind) for row in OTHERS for kind in ("pi", "yarn")), ("deepseek_v3", "yarn_logits")]
MIXED = {
    "llama": ("yarn", SWITCHED_AT_N),
    "gpt_neox": ("ntk", "yarn_logits"),
    "qwen3": ("pi", "dynamic_ntk"),
    "gemma3": ("yarn", "llama3", SWITCHED_AT_N),
    "phi3": ("abf", "longrope"),
}
MIXED_PAIRS = [(row, kind) for row, kinds in MIXED.items() for kind in kinds]
MIXED_CASES = named(MIXED_PAIRS)
"""Every core row and every kind once or twice, for what is too slow for the full product."""
BROAD_PAIRS = list(dict.fromkeys([*MIXED_PAIRS, *(("llama", kind) for kind in EVERYWHERE)]))
BROAD_CASES = named(BROAD_PAIRS)
"""These, and every kind on the plain row."""


def options_of(row: str, kind: str) -> dict[str, Any]:
    """Options with which a kind runs on a row."""
    options = dict(KINDS[kind][1](frequencies_of(ARCHITECTURE[row])))
    if kind == "yarn" and row in TEMPERATURE_ELSEWHERE:
        options["attention_factor"] = 1.0
    return options


def patch_dynamic(model: Any, row: str, kind: str, factor: float = FACTOR, **changes: Any) -> Any:
    """The model with a factor that follows the length of the text."""
    return patch_model(model, KINDS[kind][0], factor, dynamic=True, **{**options_of(row, kind), **changes})


def dynamic_model(row: str, kind: str, factor: float = FACTOR, **changes: Any) -> Any:
    """A fresh patched model."""
    return patch_dynamic(tiny_model(row), row, kind, factor, **changes)


@functools.cache
def shared_model(row: str, kind: str) -> Any:
    """A patched model for tests that only read with it."""
    return dynamic_model(row, kind).double() if row in SHARP else dynamic_model(row, kind)


def short_reach(row: str, model: Any) -> int:
    """Tokens up to which a patched model must be as before: N, or where the checkpoint itself switches before."""
    return TRAINED_LENGTH if "longrope" in row else record_of(model).trained_length


def text(length: int = LENGTH, batch: int = 1, seed: int = 0) -> Tensor:
    """Random token ids, [B, L]."""
    return tiny_inputs(length, batch=batch, seed=seed)["input_ids"]


def cache_name(model: Any) -> str:
    """What `forward` calls its cache: `past_key_values` before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


CACHES: dict[str, Callable[[Any, int], Any]] = {
    "dynamic": lambda model, length: DynamicCache(),
    "dynamic of config": lambda model, length: DynamicCache(config=model.config),
    "static": lambda model, length: StaticCache(config=model.config, max_cache_len=length + 5),
}
"""Name -> an empty cache of a model for so many tokens."""


@torch.no_grad()
def whole(model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
    """Logits of one pass without a cache, [B, L, V]."""
    return model(input_ids=tokens, **({"use_cache": False} if has_cache(model) else {}), **inputs).logits


def has_cache(model: Any) -> bool:
    """Whether `forward` takes a cache."""
    return cache_name(model) in inspect.signature(model.forward).parameters


def pieces(length: int, size: int) -> list[int]:
    """Sizes of the pieces of a text, the last one what is left."""
    return [min(size, length - begin) for begin in range(0, length, size)]


def steps(prefill: int = PREFILL, length: int = LENGTH) -> list[int]:
    """One piece for the prompt, and one for each token after it."""
    return [prefill, *[1] * (length - prefill)]


@torch.no_grad()
def in_pieces(
    model: Any, tokens: Tensor, sizes: Iterable[int], cache: Any, mask: Tensor | None = None, axes: int = 1
) -> Tensor:
    """Logits of a text that is read in pieces with a cache, [B, L, V].

    Args:
        model: patched or not.
        tokens: [B, L], after what the cache holds.
        sizes: lengths of the pieces; their sum is L.
        cache: grows by L.
        mask: [B, W] of what the cache holds and the new tokens; positions are then those of unmasked tokens.
        axes: position axes, all with the same positions; 0 to leave positions to the model, which numbers slots.
    """
    found, begin = [], 0
    for size in sizes:
        inputs: dict[str, Any] = {cache_name(model): cache}
        if mask is not None:
            seen = mask.shape[1] - tokens.shape[1] + begin + size
            inputs["attention_mask"] = mask[:, :seen]
            places = positions(mask[:, :seen])[:, -size:]
            if axes > 0:
                inputs["position_ids"] = places if axes == 1 else places.expand(axes, -1, -1)
        found.append(model(input_ids=tokens[:, begin : begin + size], use_cache=True, **inputs).logits)
        begin += size
    assert begin == tokens.shape[1]
    return torch.cat(found, dim=1)


def padded(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    """Texts [L_i] as one batch: `input_ids` and `attention_mask`, both [B, max L_i]; padding is token 0."""
    width = max(len(row) for row in rows)
    tokens, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        tokens[index, place], mask[index, place] = row, 1
    return {"input_ids": tokens, "attention_mask": mask}


def positions(mask: Tensor) -> Tensor:
    """Positions of the unmasked tokens, 0 for padding on the left, [B, L]."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def greedy(model: Any, tokens: Tensor, count: int) -> Tensor:
    """The text and its most likely next tokens, each from a pass over all before it without a cache; never the end."""
    for _ in range(count):
        logits = whole(model, tokens)[:, -1:]
        logits[..., DECODER["eos_token_id"]] = -torch.inf
        tokens = torch.cat((tokens, logits.argmax(-1)), dim=1)
    return tokens


@contextmanager
def recorded() -> Iterator[dict[Any, list[tuple[int, Tensor]]]]:
    """What reaches the attention function: for each module its calls, as number of queries and keys [B, G, S, D]."""
    inner = ALL_ATTENTION_FUNCTIONS["sdpa"]
    calls: dict[Any, list[tuple[int, Tensor]]] = {}

    def attention(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.setdefault(module, []).append((query.shape[2], key.clone()))
        return inner(module, query, key, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    try:
        yield calls
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def keys_by_token(calls: list[tuple[int, Tensor]]) -> list[Tensor]:
    """For each token the keys that it met, its own the last; after a prompt each call must be of one token."""
    found: list[Tensor] = []
    for queries, keys in calls:
        begin = len(found)
        found += [keys] if queries == 1 else [keys[:, :, : begin + place + 1] for place in range(queries)]
    return [keys[:, :, : place + 1] for place, keys in enumerate(found)]


def assert_close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """No value further off than the tolerance."""
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
