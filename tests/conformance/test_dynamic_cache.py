"""Invariants 6 and 7 for a factor that follows the length: any cache gives what one pass gives, in any batch."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_posext.compat import quiet
from tests.architectures import ARCHITECTURE, TRAINED_LENGTH, tiny_model
from tests.dynamic import (
    BROAD_CASES,
    CACHES,
    CORE_CASES,
    LENGTH,
    MIXED_CASES,
    MIXED_PAIRS,
    OTHER_PAIRS,
    PREFILL,
    SWITCHED_AT_N,
    TOLERANCE,
    assert_close,
    dynamic_model,
    greedy,
    in_pieces,
    keys_by_token,
    named,
    padded,
    pieces,
    positions,
    recorded,
    shared_model,
    shared_unpatched,
    short_reach,
    steps,
    text,
    whole,
)

OTHER_CACHED = named(pair for pair in OTHER_PAIRS if "no_cache" not in ARCHITECTURE[pair[0]].limits)
SLIDING = [("gemma3", "yarn"), ("gemma3", "pi_all"), ("gemma2", "yarn"), ("mistral_sliding", "pi")]
OTHER_CACHES = [
    *(("static", *pair) for pair in dict.fromkeys([*MIXED_PAIRS, *SLIDING])),
    *(("dynamic", *pair) for pair in SLIDING),  # elsewhere the same as with the config
]
EITHER_CACHE = [("dynamic", *pair) for pair in MIXED_PAIRS[::2]] + [("static", *pair) for pair in MIXED_PAIRS[1::2]]
WITH_CONFIG = [("dynamic of config", *pair) for pair in dict.fromkeys([*MIXED_PAIRS, *SLIDING, ("qwen2_vl", "yarn")])]
FINAL = 40
"""Tokens in all where the prompt and what follows are in several parts."""
NEW_TOKENS = 8
PROMPT = 29
"""Prompt length with which generation begins within N and ends beyond it."""


SHOWN = [case for case in CORE_CASES if case.values != ("gpt_neox", "ntk_by_parts")]
"""All but one: of the two channels that GPT-NeoX rotates, this method keeps one, and the other hardly turns."""


@pytest.mark.parametrize(("row", "kind"), SHOWN)
def test_the_texts_of_these_tests_are_long_enough_to_show_a_difference(row: str, kind: str) -> None:
    change = whole(shared_model(row, kind), text()) - whole(shared_unpatched(row), text())
    assert change[:, TRAINED_LENGTH + 1 :].abs().amax(-1).min() > 20 * TOLERANCE


@pytest.mark.parametrize(("row", "kind"), CORE_CASES)
def test_single_steps_equal_one_pass_in_logits_and_keys(row: str, kind: str) -> None:
    model, tokens = shared_model(row, kind), text()
    once, stepwise = (CACHES["dynamic of config"](model, LENGTH) for _ in range(2))
    with recorded() as one_pass:
        expected = in_pieces(model, tokens, [LENGTH], once)
    with recorded() as single_steps:
        found = in_pieces(model, tokens, steps(), stepwise)
    assert_close(found, expected)
    for one, other in zip(once.layers, stepwise.layers, strict=True):
        assert_close(one.keys, other.keys)
        assert_close(one.values, other.values)
    assert list(one_pass) == list(single_steps)
    for module in one_pass:
        one, other = keys_by_token(one_pass[module]), keys_by_token(single_steps[module])
        assert len(one) == len(other) == LENGTH
        kept = [all_keys[:, :, -keys.shape[2] :] for all_keys, keys in zip(one, other, strict=True)]
        assert_close(torch.cat(other, dim=2), torch.cat(kept, dim=2))


@pytest.mark.parametrize(("cache", "row", "kind"), OTHER_CACHES)
def test_single_steps_with_other_caches_equal_one_pass(cache: str, row: str, kind: str) -> None:
    model, tokens = shared_model(row, kind), text()
    assert_close(in_pieces(model, tokens, steps(28), CACHES[cache](model, LENGTH)), whole(model, tokens))


@pytest.mark.parametrize(("row", "kind"), OTHER_CACHED)
def test_single_steps_equal_one_pass_on_every_other_row(row: str, kind: str) -> None:
    model = shared_model(row, kind)
    before = short_reach(row, model) - TRAINED_LENGTH  # so much more text for those with a larger N
    tokens, cache = text(before + FINAL), "static" if kind == "pi" else "dynamic of config"
    sizes = steps(before + 30, before + FINAL)
    assert_close(in_pieces(model, tokens, sizes, CACHES[cache](model, before + LENGTH)), whole(model, tokens))


@pytest.mark.parametrize(("cache", "row", "kind"), [*OTHER_CACHES, ("dynamic of config", "qwen2_vl", "yarn")])
def test_a_text_in_pieces_equals_one_pass(cache: str, row: str, kind: str) -> None:
    model, tokens = shared_model(row, kind), text(batch=2)
    assert_close(in_pieces(model, tokens, pieces(LENGTH, 7), CACHES[cache](model, LENGTH)), whole(model, tokens))


@pytest.mark.parametrize(("row", "kind"), [case for case in MIXED_CASES if case.values[1] != SWITCHED_AT_N])
def test_the_cache_holds_what_the_unpatched_model_would_put_there(row: str, kind: str) -> None:
    """The first layer is the one whose input is the same with and without the patch."""
    patched_cache, plain_cache = DynamicCache(), DynamicCache()
    in_pieces(shared_model(row, kind), text(), [PREFILL, 20, 1, 7], patched_cache)
    in_pieces(shared_unpatched(row), text(), [PREFILL, 20, 1, 7], plain_cache)
    assert torch.equal(patched_cache.layers[0].keys, plain_cache.layers[0].keys)


# transformers cannot crop a static cache with sliding layers
@pytest.mark.parametrize(("cache", "row", "kind"), [case for case in EITHER_CACHE if case[:2] != ("static", "gemma3")])
def test_a_cropped_cache_continues_with_other_tokens(cache: str, row: str, kind: str) -> None:
    model, kept = shared_model(row, kind), 24
    other = torch.cat((text()[:, :kept], text(FINAL - kept, seed=1)), dim=1)
    held = CACHES[cache](model, LENGTH)
    in_pieces(model, text(), [PREFILL, 26, 1, 1], held)
    if not hasattr(held.layers[0], "crop"):
        pytest.skip("before transformers 5.24 a static cache cannot be cropped")
    held.crop(kept - LENGTH)
    assert_close(in_pieces(model, other[:, kept:], [1] * (FINAL - kept), held), whole(model, other)[:, kept:])


@pytest.mark.parametrize("cache", ["dynamic", "dynamic of config"])
@pytest.mark.parametrize(("row", "kind"), [*MIXED_CASES, *named([("qwen2_vl", "pi")])])
def test_a_reordered_cache_continues_every_row_at_its_own_length(row: str, kind: str, cache: str) -> None:
    model, order, more = shared_model(row, kind), [2, 0, 1], 6
    axes = 3 if row == "qwen2_vl" else 1
    rows = [text(length, seed=length)[0] for length in (9, 28, 36)]
    batch, held = padded(rows, "left"), CACHES[cache](model, LENGTH)
    in_pieces(model, batch["input_ids"], [30, 6], held, batch["attention_mask"], axes)
    held.reorder_cache(torch.tensor(order))
    new = text(more, batch=len(order), seed=1)
    mask = torch.cat((batch["attention_mask"][order], torch.ones_like(new)), dim=1)
    found = in_pieces(model, new, [1, 1, 3, 1], held, mask, axes)
    for place, index in enumerate(order):
        alone = torch.cat((rows[index], new[place]))[None]
        assert_close(found[place], whole(model, alone)[0, -more:])


@pytest.mark.parametrize(("cache", "row", "kind"), EITHER_CACHE)
def test_left_padded_rows_without_positions_continue_at_their_own_length(cache: str, row: str, kind: str) -> None:
    model, more, rows = shared_model(row, kind), 8, [text(length, seed=length)[0] for length in (12, 30)]
    batch, new = padded(rows, "left"), text(more, batch=2, seed=1)
    tokens = torch.cat((batch["input_ids"], new), dim=1)
    mask = torch.cat((batch["attention_mask"], torch.ones_like(new)), dim=1)
    found = in_pieces(model, tokens, [30, 1, 1, 1, 3, 1, 1], CACHES[cache](model, LENGTH), mask, axes=0)
    for row_found, row_tokens, last in zip(found, rows, new, strict=True):
        assert_close(row_found[-more:], whole(model, torch.cat((row_tokens, last))[None])[0, -more:])


@pytest.mark.parametrize(("row", "kind"), MIXED_CASES[::2])
def test_a_cache_of_which_some_rows_are_chosen_and_repeated(row: str, kind: str) -> None:
    model, more, held = shared_model(row, kind), 6, DynamicCache()
    rows = text(30, batch=3)
    in_pieces(model, rows, [29, 1], held)
    held.batch_select_indices(torch.tensor([2, 0]))
    held.batch_repeat_interleave(2)
    new = text(more, batch=4, seed=1)
    found = in_pieces(model, new, [1] * more, held)
    assert_close(found, whole(model, torch.cat((rows[[2, 2, 0, 0]], new), dim=1))[:, -more:])


@pytest.mark.parametrize(("cache", "row", "kind"), [*EITHER_CACHE, *WITH_CONFIG])
def test_a_second_turn_of_several_tokens(cache: str, row: str, kind: str) -> None:
    model, tokens = shared_model(row, kind), text()
    found = in_pieces(model, tokens, [PREFILL, 1, 1, 1, 1, 14, 1, 1, 8], CACHES[cache](model, LENGTH))
    assert_close(found, whole(model, tokens))


@pytest.mark.parametrize(("cache", "row", "kind"), [case for case in EITHER_CACHE if case[2] != SWITCHED_AT_N])
def test_a_cache_that_the_unpatched_model_filled(cache: str, row: str, kind: str) -> None:
    model, tokens = shared_model(row, kind), text(FINAL)
    held = CACHES[cache](model, LENGTH)
    in_pieces(shared_unpatched(row), tokens[:, :TRAINED_LENGTH], [TRAINED_LENGTH], held)
    found = in_pieces(model, tokens[:, TRAINED_LENGTH:], [1] * (FINAL - TRAINED_LENGTH), held)
    assert_close(found, whole(model, tokens)[:, TRAINED_LENGTH:])


def sharing(cache: Any) -> Any:
    """A cache whose layers hold the same tensors as those of another one."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


@pytest.mark.parametrize(
    ("cache", "duplicate"),
    [("dynamic of config", copy.deepcopy), ("static", copy.deepcopy), ("dynamic of config", sharing)],
)
@pytest.mark.parametrize(("row", "kind"), MIXED_CASES[::2])
def test_two_continuations_of_one_cache_do_not_meet(row: str, kind: str, cache: str, duplicate: Any) -> None:
    model, begin, half = shared_model(row, kind), 30, 5
    first = text(FINAL)
    second = torch.cat((first[:, :begin], text(FINAL - begin, seed=1)), dim=1)
    held = CACHES[cache](model, LENGTH)
    in_pieces(model, first[:, :begin], [PREFILL, 9, 1], held)
    both = ((first, held), (second, duplicate(held)))
    parts = [in_pieces(model, tokens[:, begin : begin + half], [1] * half, use) for tokens, use in both]
    for part, (tokens, use) in zip(parts, both, strict=True):
        rest = in_pieces(model, tokens[:, begin + half :], [1, 3, 1], use)
        assert_close(torch.cat((part, rest), dim=1), whole(model, tokens)[:, begin:])


@pytest.mark.parametrize("row", ["llama", "gemma3"])
def test_keys_once_handed_out_never_change(row: str) -> None:
    model, held = shared_model(row, "yarn"), DynamicCache()
    in_pieces(model, text()[:, :34], steps(32, 34), held)
    handed_out = [tensor for layer in held.layers for tensor in (layer.keys, layer.values)]
    before = [tensor.clone() for tensor in handed_out]
    in_pieces(model, text()[:, 34:40], [1] * 6, held)
    held.crop(-8)
    in_pieces(model, text(8, seed=1), [3, *[1] * 5], held)
    held.batch_repeat_interleave(2)
    in_pieces(model, text(3, batch=2, seed=2), [1, 1, 1], held)
    assert all(torch.equal(now, then) for now, then in zip(handed_out, before, strict=True))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("row", ["llama", "gemma3"])
def test_a_cache_that_was_reset_starts_again(row: str, cache: str) -> None:
    model = shared_model(row, "yarn")
    held = CACHES[cache](model, LENGTH)
    in_pieces(model, text(seed=1), [PREFILL, 27, 1], held)
    held.reset()
    if any(layer.keys is not None and not layer.is_compileable for layer in held.layers):
        pytest.skip("before transformers 5.24 a reset leaves zeros in a dynamic cache")
    assert_close(in_pieces(model, text(FINAL), steps(30, FINAL), held), whole(model, text(FINAL)))


def generated(model: Any, tokens: Tensor, **options: Any) -> list[list[int]]:
    """What `generate` makes of prompts [B, L]: always as many new tokens, with the same seed."""
    torch.manual_seed(0)
    fixed = {"min_new_tokens": NEW_TOKENS, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    return model.generate(tokens, **{"attention_mask": torch.ones_like(tokens), **fixed, **options}).tolist()


@functools.cache
def generates_with_a_cache(row: str) -> bool:
    """Whether the unpatched model does beyond N: before transformers 5.24 Phi-3 loses its prompt there."""
    model, prompt = shared_unpatched(row), text(PROMPT)
    with quiet():  # transformers warns of reading past the length of the model, and rightly
        return generated(model, prompt) == generated(model, prompt, use_cache=False)


def model_that_generates(row: str, kind: str) -> Any:
    """The shared patched model, if the unpatched one can be relied upon."""
    if not generates_with_a_cache(row):
        pytest.skip("the unpatched model of this release does not generate with a cache beyond N")
    return shared_model(row, kind)


@pytest.mark.parametrize(("row", "kind"), MIXED_CASES)
def test_generate_with_a_cache_writes_what_passes_without_one_write(row: str, kind: str) -> None:
    model, prompt = model_that_generates(row, kind), text(PROMPT)
    expected = greedy(model, prompt, NEW_TOKENS).tolist()
    assert generated(model, prompt) == expected
    assert generated(model, prompt, use_cache=False) == expected


WAYS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "temperature": 1.5},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("row", "kind"), MIXED_CASES[::2])
def test_generate_with_and_without_a_cache(row: str, kind: str, way: str) -> None:
    model, prompt = model_that_generates(row, kind), text(PROMPT, batch=2)
    assert generated(model, prompt, **WAYS[way]) == generated(model, prompt, use_cache=False, **WAYS[way])


OTHER_WAYS: dict[str, dict[str, Any]] = {
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("way", OTHER_WAYS)
@pytest.mark.parametrize(("row", "kind"), MIXED_CASES[::2])
def test_other_ways_to_generate_write_the_same(row: str, kind: str, way: str) -> None:
    model, prompt = model_that_generates(row, kind), text(14).repeat(1, 2)
    assert generated(model, prompt, **OTHER_WAYS[way]) == generated(model, prompt)


@pytest.mark.transformers_logs("assisted generation hands arguments on in a way that transformers itself warns about")
@pytest.mark.parametrize("is_patched", [True, False])
@pytest.mark.parametrize(("row", "kind"), MIXED_CASES[::3])
def test_a_draft_model_changes_nothing(row: str, kind: str, is_patched: bool) -> None:
    draft = dynamic_model(row, kind) if is_patched else tiny_model(row)
    for parameter in draft.parameters():
        parameter.data *= 1.02
    model, prompt = model_that_generates(row, kind), text(PROMPT)
    assert generated(model, prompt, assistant_model=draft) == generated(model, prompt)


@pytest.mark.parametrize(("row", "kind"), MIXED_CASES[::2])
def test_generate_from_left_padded_prompts_is_that_of_each_alone(row: str, kind: str) -> None:
    model, rows = model_that_generates(row, kind), [text(length, seed=length)[0] for length in (5, 27, 40)]
    batch = padded(rows, "left")
    found = generated(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    for each, full_row in zip(rows, found, strict=True):
        assert full_row[-NEW_TOKENS:] == generated(model, each[None])[0][-NEW_TOKENS:]


@pytest.mark.parametrize(("row", "kind"), [*BROAD_CASES, *named([("modernbert", "pi"), ("modernbert", "yarn")])])
def test_padded_rows_are_read_as_each_alone(row: str, kind: str) -> None:
    model, rows = shared_model(row, kind), [text(length, seed=length)[0] for length in (5, 40)]
    alone = [whole(model, each[None])[0] for each in rows]
    for side in ("left", "right"):
        batch = padded(rows, side)
        tokens, mask = batch["input_ids"], batch["attention_mask"]
        for options in ({}, {"position_ids": positions(mask)}):
            found = whole(model, tokens, attention_mask=mask, **options)
            assert_close(found[mask.bool()], torch.cat(alone))
