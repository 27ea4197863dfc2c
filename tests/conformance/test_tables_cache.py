"""Invariants 6 and 7 for tables of positions: decoding equals one pass, and a padded row equals the row alone."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from hf_posext import patch_model
from tests.dynamic import CACHES, assert_close, cache_name, in_pieces, pieces, positions, steps, text, whole
from tests.special_models import build
from tests.tables import (
    EVERY_PAIR,
    FAMILIES,
    N,
    T,
    generated,
    make,
    named,
    padded,
    patch,
    patched_model,
    read,
    shared_model,
    tables_of,
)

STATIC = [pair for pair in EVERY_PAIR if pair[1] in ("pi", "pi_cubic", "tile", "hierarchical", "sinusoidal")]
DECODERS = [pair for pair in STATIC if FAMILIES[pair[0]].kind == "decoder"]
PAIRS = [("bart", "pi"), ("bart", "tile"), ("bart", "sinusoidal"), ("m2m_100", "pi"), ("marian", "pi")]
FROM_MASK = [pair for pair in STATIC if FAMILIES[pair[0]].from_mask]


@pytest.mark.parametrize(("row", "kind"), named(DECODERS))
def test_a_prompt_and_single_tokens_are_one_pass(row: str, kind: str) -> None:
    model, tokens = shared_model(row, kind), text(T, 2)
    assert_close(in_pieces(model, tokens, steps(20, T), DynamicCache()), whole(model, tokens))


@pytest.mark.parametrize("cache", ["dynamic of config", "static"])
@pytest.mark.parametrize(("row", "kind"), named([("gpt2", "pi"), ("gpt2", "hierarchical"), ("opt", "tile")]))
def test_pieces_of_any_size_with_any_cache_are_one_pass(row: str, kind: str, cache: str) -> None:
    model, tokens = shared_model(row, kind), text(T, 2)
    assert_close(in_pieces(model, tokens, pieces(T, 7), CACHES[cache](model, T)), whole(model, tokens))


@pytest.mark.parametrize("kind", ["tile", "pi"])
@pytest.mark.parametrize("row", ["bert", "roberta"])
def test_an_encoder_that_is_used_as_a_decoder_decodes_too(row: str, kind: str) -> None:
    family, tokens = FAMILIES[row], text(T, 2)
    model = build("AutoModelForCausalLM", family.model_type, {**family.settings, "is_decoder": True})
    patch(model, kind)
    assert_close(in_pieces(model, tokens, steps(20, T), DynamicCache()), whole(model, tokens))


@pytest.mark.parametrize(("row", "kind"), named(PAIRS))
def test_the_decoder_of_a_pair_decodes_as_in_one_pass(row: str, kind: str) -> None:
    model, tokens = shared_model(row, kind), text(T, 2)
    assert_close(decoded(model, tokens, steps(20, T)), read(model, tokens))


@torch.no_grad()
def decoded(model: Any, tokens: Tensor, sizes: list[int]) -> Tensor:
    """Logits of a decoder that reads in pieces what its encoder has read at once, [B, L, V]."""
    encoded = model.get_encoder()(tokens, attention_mask=torch.ones_like(tokens), return_dict=True)
    cache, found, begin = EncoderDecoderCache(DynamicCache(), DynamicCache()), [], 0
    for size in sizes:
        piece = {"decoder_input_ids": tokens[:, begin : begin + size], "encoder_outputs": encoded, "use_cache": True}
        found.append(model(**piece, **{cache_name(model): cache}).logits)
        begin += size
    return torch.cat(found, 1)


@pytest.mark.parametrize("row", ["gpt2", "gpt_neo", "opt", "xglm"])
def test_one_token_more_than_2_n_over_a_cache_is_refused_with_the_number(row: str) -> None:
    model, tokens = shared_model(row, "pi"), text(T + 1)
    for cache in ("dynamic", "static") if row in ("gpt2", "opt") else ("dynamic",):  # others know no static cache
        with pytest.raises(ValueError, match=rf"({T + 1} tokens.*{T} at most|is {T - 1} \({T} tokens\))"):
            in_pieces(model, tokens, [40, T - 40, 1], CACHES[cache](model, T + 1))
    assert_close(in_pieces(model, tokens[:, :T], [40, T - 40], DynamicCache()), whole(model, tokens[:, :T]))


@pytest.mark.parametrize(("row", "kind"), named([("gpt2", "tile"), ("opt", "pi"), ("xglm", "pi"), ("gpt_neo", "pi")]))
def test_generation_across_n_is_the_same_with_and_without_a_cache(row: str, kind: str) -> None:
    model, tokens = shared_model(row, kind), text(28, 2)
    assert torch.equal(generated(model, tokens), generated(model, tokens, use_cache=False))


@pytest.mark.transformers_logs("transformers says that generation goes beyond the length in the config")
@pytest.mark.parametrize("row", ["gpt2", "opt"])
def test_generation_ends_with_the_table(row: str) -> None:
    """The last new token is read by nobody, so that 2 N + 1 tokens are the most that there can be."""
    model = shared_model(row, "tile")
    assert generated(model, text(T - 4), 5).shape[1] == 5
    with pytest.raises(ValueError, match=rf"{T} at most|\({T} tokens\)"):
        generated(model, text(T - 4), 6)


@pytest.mark.parametrize(("row", "kind"), named(FROM_MASK))
def test_rows_padded_on_the_left_are_read_as_alone(row: str, kind: str) -> None:
    """Families whose padding takes no position."""
    model = shared_model(row, kind)
    texts = [text(T)[0], text(40, seed=1)[0], text(9, seed=2)[0]]
    batch = padded(texts, "left", model.config.pad_token_id)
    found = read(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    for index, each in enumerate(texts):
        assert_close(found[index, -len(each) :], read(model, each[None])[0])


@pytest.mark.parametrize("row", ["roberta", "opt", "m2m_100"])
def test_padding_that_takes_no_position_takes_no_room(row: str) -> None:
    """2 N + 6 columns with 2 N tokens in them are not too long, on whichever side the padding stands."""
    model, tokens = shared_model(row, "pi"), text(T)[0]
    for side in ("left", "right"):
        batch = padded([tokens, torch.full((T + 6,), 5)], side, model.config.pad_token_id)
        one = {name: value[:1] for name, value in batch.items()}
        found = read(model, one["input_ids"], attention_mask=one["attention_mask"])
        place = slice(6, None) if side == "left" else slice(0, T)
        assert_close(found[:, place], read(model, tokens[None]))


@pytest.mark.parametrize("row", ["bert", "electra", "distilbert", "deberta", "bart", "gpt2"])
def test_padding_that_takes_a_position_takes_room(row: str) -> None:
    """These number slots: 2 N + 6 columns need as many rows, whatever the mask says."""
    batch = padded([text(T)[0], text(T + 6)[0]], "right", 1)
    one = {name: value[:1] for name, value in batch.items()}
    with pytest.raises(ValueError, match=rf"{T}"):
        read(shared_model(row, "tile"), one["input_ids"], attention_mask=one["attention_mask"])


@pytest.mark.parametrize("row", ["gpt2", "gpt_neo", "xglm"])
def test_positions_that_are_given_are_used_as_they_are(row: str) -> None:
    """A row padded on the left with positions of its own; and a token at 2 N - 1 behind one at 0."""
    model = shared_model(row, "pi")
    batch = padded([text(40)[0], text(9, seed=1)[0]], "left", 1)
    places = positions(batch["attention_mask"])
    found = read(model, batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=places)
    assert_close(found[1, -9:], read(model, text(9, seed=1))[0])
    seen: list[Tensor] = []
    handle = model.get_submodule(FAMILIES[row].tables[0]).register_forward_hook(lambda _, __, out: seen.append(out))
    read(model, text(2), position_ids=torch.tensor([[0, T - 1]]))
    handle.remove()
    first = FAMILIES[row].reserved
    assert torch.equal(seen[0].reshape(2, -1), tables_of(model)[0][[first, first + T - 1]])


@pytest.mark.parametrize("kind", ["tile", "hierarchical", "pi_dynamic"])
def test_a_cache_that_was_filled_before_the_patch_goes_on_where_short_text_is_kept(kind: str) -> None:
    model, cache, tokens = make("gpt2"), DynamicCache(), text(N)
    first = in_pieces(model, tokens[:, :20], [20], cache)
    patch(model, kind)
    rest = in_pieces(model, tokens[:, 20:], [1] * (N - 20), cache)
    assert_close(torch.cat((first, rest), 1), whole(model, tokens))


def test_generation_of_a_pair_goes_on_beyond_n() -> None:
    model, tokens = patched_model("bart", "tile"), text(40, 2)
    found = generated(model, tokens, 40)
    logits = read_pair(model, tokens, torch.cat((torch.full((2, 1), 2), found[:, :-1]), 1))
    logits[..., 2] = -torch.inf  # the end comes last, and is no choice
    assert torch.equal(logits.argmax(-1)[:, :-1], found[:, :-1])


@torch.no_grad()
def read_pair(model: Any, tokens: Tensor, written: Tensor) -> Tensor:
    """Logits of what the decoder says after each of its tokens, [B, L, V]."""
    return model(input_ids=tokens, decoder_input_ids=written, use_cache=False).logits


def test_composed_tables_decode_too() -> None:
    model = patch_model(patched_model("opt", "tile"), "pi", 2, compose=True)
    tokens = text(2 * T)
    assert_close(in_pieces(model, tokens, pieces(2 * T, 40), DynamicCache()), whole(model, tokens))
