"""Invariants 6, 7 and 8 for methods that act in attention: caches give what one pass gives, in any batch and order."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.architectures import TRAINED_LENGTH
from tests.dynamic import (
    CACHES,
    PREFILL,
    TOLERANCE,
    assert_close,
    greedy,
    in_pieces,
    padded,
    pieces,
    positions,
    steps,
    text,
    whole,
)
from tests.in_attention import (
    CACHED,
    FEW,
    FEW_CACHED,
    FEW_PAIRS,
    KINDS,
    LENGTH,
    MIXED,
    MIXED_PAIRS,
    causal,
    length_for,
    named,
    patched_model,
    shared_model,
    shared_unpatched,
    text_for,
)

CAUSAL = causal(MIXED_PAIRS)
NEW_TOKENS = 8
SHORT = ("gpt2",)
"""Rows whose config goes on to say N tokens, of which transformers reminds whoever generates more."""


def prompt_for(row: str, batch: int = 1) -> Tensor:
    """Tokens with which generation begins within N and ends beyond it, but for rows that would be reminded."""
    return text(20 if row in SHORT else 29, batch=batch)


@pytest.mark.parametrize(("row", "kind"), MIXED)
def test_the_texts_of_these_tests_are_long_enough_to_show_a_difference(row: str, kind: str) -> None:
    # where `group_size` follows the length, short text is read as before
    tokens = text(LENGTH) if kind == "self_extend_dynamic" else text_for(row, kind)[:, :TRAINED_LENGTH]
    change = whole(shared_model(row, kind), tokens) - whole(shared_unpatched(row), tokens)
    assert change[:, -1].abs().amax() > 20 * TOLERANCE


EITHER_CACHE = [
    *(("dynamic of config", *pair) for pair in CAUSAL),
    *(("static", *pair) for pair in dict.fromkeys([*causal(FEW_PAIRS), *CAUSAL[1::2]])),
]


@pytest.mark.parametrize(("cache", "row", "kind"), EITHER_CACHE)
def test_single_steps_equal_one_pass(cache: str, row: str, kind: str) -> None:
    model, tokens = shared_model(row, kind), text(batch=2)
    assert_close(in_pieces(model, tokens, steps(), CACHES[cache](model, LENGTH)), whole(model, tokens))


@pytest.mark.parametrize(("cache", "row", "kind"), [
    *(("dynamic", *pair) for pair in CAUSAL), *(("static", *pair) for pair in CAUSAL[::2])
])  # fmt: skip
def test_a_text_in_pieces_equals_one_pass(cache: str, row: str, kind: str) -> None:
    model, tokens = shared_model(row, kind), text(batch=2)
    assert_close(in_pieces(model, tokens, pieces(LENGTH, 7), CACHES[cache](model, LENGTH)), whole(model, tokens))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(("row", "kind"), FEW_CACHED)
def test_a_second_turn_of_several_tokens(row: str, kind: str, cache: str) -> None:
    model, tokens = shared_model(row, kind), text()
    found = in_pieces(model, tokens, [PREFILL, 1, 1, 1, 1, 14, 1, 1, 8], CACHES[cache](model, LENGTH))
    assert_close(found, whole(model, tokens))


@pytest.mark.parametrize(("row", "kind"), CACHED)
def test_a_cropped_and_a_reordered_cache_continue_with_other_tokens(row: str, kind: str) -> None:
    model, kept, held = shared_model(row, kind), 30, CACHES["dynamic"](shared_model(row, kind), LENGTH)
    in_pieces(model, text(40, batch=3), [PREFILL, 18, 1, 1], held)
    held.crop(kept - 40)
    held.reorder_cache(torch.tensor([2, 0, 0]))
    new = text(8, batch=3, seed=1)
    found = in_pieces(model, new, [1, 1, 3, 1, 1, 1], held)
    assert_close(found, whole(model, torch.cat((text(40, batch=3)[[2, 0, 0], :kept], new), 1))[:, kept:])


@pytest.mark.parametrize(("row", "kind"), FEW_CACHED)
def test_two_continuations_of_one_cache_do_not_meet(row: str, kind: str) -> None:
    model, begin = shared_model(row, kind), 34
    first = text(40)
    second = torch.cat((first[:, :begin], text(6, seed=1)), dim=1)
    held = CACHES["dynamic"](model, LENGTH)
    in_pieces(model, first[:, :begin], [PREFILL, 13, 1], held)
    for tokens, cache in ((first, held), (second, copy.deepcopy(held))):
        assert_close(in_pieces(model, tokens[:, begin:], [1, 3, 1, 1], cache), whole(model, tokens)[:, begin:])


@pytest.mark.parametrize("first", ["leaky_rerope", "rerope"])
def test_a_cache_that_another_patch_filled_is_read_by_the_new_one(first: str) -> None:
    """Only a model of one layer has keys that do not depend on the patch."""
    second = {"leaky_rerope": "rerope", "rerope": "leaky_rerope"}[first]
    held = CACHES["dynamic"](None, LENGTH)
    tokens, one, other = text(), one_layer(first), one_layer(second)
    in_pieces(one, tokens[:, :40], [PREFILL, 18, 1, 1], held)
    assert_close(in_pieces(other, tokens[:, 40:], [1] * 8, held), whole(other, tokens)[:, 40:])


def one_layer(kind: str) -> Any:
    """A patched Llama whose second layer is taken out."""
    model = patched_model("llama", kind)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    return model


def generated(model: Any, tokens: Tensor, **options: Any) -> list[list[int]]:
    """What `generate` makes of prompts [B, L]: always as many new tokens, with the same seed."""
    torch.manual_seed(0)
    fixed = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    return model.generate(tokens, **{"attention_mask": torch.ones_like(tokens), **fixed, **options}).tolist()


@pytest.mark.parametrize(("row", "kind"), CACHED)
def test_generate_writes_what_passes_without_a_cache_write(row: str, kind: str) -> None:
    model, prompt = shared_model(row, kind), prompt_for(row)
    assert generated(model, prompt) == greedy(model, prompt, NEW_TOKENS).tolist()


@pytest.mark.parametrize("way", [{"num_beams": 3}, {"do_sample": True, "temperature": 1.5}], ids=["beams", "sampling"])
@pytest.mark.parametrize(("row", "kind"), FEW_CACHED)
def test_generate_in_other_ways_with_and_without_a_cache(row: str, kind: str, way: dict[str, Any]) -> None:
    model, prompt = shared_model(row, kind), prompt_for(row, 2)
    assert generated(model, prompt, **way) == generated(model, prompt, use_cache=False, **way)


@pytest.mark.parametrize(("row", "kind"), FEW_CACHED)
def test_generate_with_a_static_cache(row: str, kind: str) -> None:
    model, prompt = shared_model(row, kind), prompt_for(row)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert generated(model, prompt, **static) == generated(model, prompt)


@pytest.mark.parametrize(("row", "kind"), CACHED)
def test_generate_from_left_padded_prompts_is_that_of_each_alone(row: str, kind: str) -> None:
    lengths = (5, 13, 22) if row in SHORT else (5, 27, 40)
    model, rows = shared_model(row, kind), [text(length, seed=length)[0] for length in lengths]
    batch = padded(rows, "left")
    found = generated(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    for each, full_row in zip(rows, found, strict=True):
        assert full_row[-NEW_TOKENS:] == generated(model, each[None])[0][-NEW_TOKENS:]


@pytest.mark.parametrize("kind", ["alibi", "nope"])
def test_generating_beyond_n_is_silent_where_a_table_is_switched_off(kind: str) -> None:
    model, prompt = shared_model("gpt2", kind), text(29)
    assert generated(model, prompt) == greedy(model, prompt, NEW_TOKENS).tolist()


@pytest.mark.parametrize("with_positions", [True, False], ids=["positions", "slots"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("row", "kind"), MIXED)
def test_padded_rows_are_read_as_each_alone(row: str, kind: str, side: str, with_positions: bool) -> None:
    """A table numbers slots whatever the mask says, so its rows need their positions on the left."""
    rows = [text(length, seed=length)[0] for length in (20, length_for(row, kind))]
    model, batch = shared_model(row, kind), padded(rows, side)
    mask = batch["attention_mask"]
    has_table = row in ("bert", "gpt2") and kind.startswith("window")
    inputs = {"position_ids": positions(mask)} if with_positions or (has_table and side == "left") else {}
    found = whole(model, batch["input_ids"], attention_mask=mask, **inputs)
    assert_close(found[mask.bool()], torch.cat([whole(model, each[None])[0] for each in rows]))


@pytest.mark.parametrize("with_positions", [True, False], ids=["positions", "slots"])
@pytest.mark.parametrize(
    ("cache", "row", "kind"),
    [*(("dynamic", *pair) for pair in CAUSAL), *(("static", *pair) for pair in causal(FEW_PAIRS))],
)
def test_left_padded_rows_continue_as_each_alone(cache: str, row: str, kind: str, with_positions: bool) -> None:
    model, more, rows = shared_model(row, kind), 8, [text(length, seed=length)[0] for length in (12, 30)]
    batch, new = padded(rows, "left"), text(more, batch=2, seed=1)
    tokens = torch.cat((batch["input_ids"], new), dim=1)
    mask = torch.cat((batch["attention_mask"], torch.ones_like(new)), dim=1)
    held = CACHES[cache](model, LENGTH)
    found = in_pieces(model, tokens, [30, 1, 1, 1, 3, 1, 1], held, mask, axes=int(with_positions))
    for row_found, row_tokens, last in zip(found, rows, new, strict=True):
        assert_close(row_found[-more:], whole(model, torch.cat((row_tokens, last))[None])[0, -more:])


@pytest.mark.parametrize(("row", "kind"), FEW)
def test_what_was_read_before_leaves_no_trace(row: str, kind: str) -> None:
    unused = patched_model(row, kind)
    model = copy.deepcopy(unused)
    lengths = (32, 9, 20) if length_for(row, kind) == TRAINED_LENGTH else (32, 60, 9, 48)
    for length in lengths:
        fresh = copy.deepcopy(unused)
        assert torch.equal(whole(model, text(length)), whole(fresh, text(length)))
        if (row, kind) in CAUSAL:
            sizes = steps(length - 3, length)
            both = [in_pieces(each, text(length), sizes, CACHES["dynamic"](each, length)) for each in (model, fresh)]
            assert torch.equal(*both)


LONG = [*(("llama", kind) for kind in KINDS if kind != "nope"), ("modernbert", "alibi"), ("modernbert", "self_extend")]


@pytest.mark.parametrize(("row", "kind"), named(LONG))
def test_a_long_text_is_read_in_blocks_as_by_eager_attention(row: str, kind: str) -> None:
    """Long enough for every block of the kernels to have neighbours."""
    model, tokens = patched_model(row, kind, factor=32), text(400)
    found = whole(model, tokens)
    model.set_attn_implementation("eager")
    assert_close(found, whole(model, tokens))
