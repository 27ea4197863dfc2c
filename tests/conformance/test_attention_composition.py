"""Methods that act in attention on top of a patch of frequencies, and nothing on top of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_posext import PatchError, load_pretrained, patch_model, record_of, unpatch_model
from tests.dynamic import assert_close, text, whole
from tests.in_attention import KINDS, gpt2, make, patch, patched_model, text_for
from tests.snapshots import differences, snapshot


@pytest.mark.parametrize("kind", ["alibi", "nope", "self_extend", "rerope", "window_sinks"])
@pytest.mark.parametrize("row", ["llama", "gemma3"])
def test_a_patch_in_attention_on_top_of_a_static_one(row: str, kind: str) -> None:
    model = make(row)
    before = snapshot(model)
    patch_model(model, "pi", 2)
    with pytest.raises(PatchError, match=r"already patched: pi x2 .*compose=True"):
        patch(model, kind)
    stretched = whole(model, text())
    patch(model, kind, factor=2, compose=True)
    assert [step.method for step in record_of(model).steps()] == ["pi", KINDS[kind][0]]
    assert (record_of(model).total_factor, record_of(model).trained_length) == (4, 64)
    assert not torch.allclose(whole(model, text()), stretched, atol=1e-2)
    if KINDS[kind][0] == "self_extend":
        assert torch.equal(whole(model, text(8)), whole(patch_model(make(row), "pi", 2), text(8)))
    unpatch_model(model)
    assert differences(before, snapshot(model)) == []


def test_stretched_frequencies_are_those_of_the_far_view_too() -> None:
    """`pi` by 2, then ReRoPE: positions twice as far apart are read as ReRoPE alone reads the original ones."""
    alone = patch_model(make("gpt_neox"), "rerope", 4, window=8)
    both = patch_model(patch_model(make("gpt_neox"), "pi", 2), "rerope", 2, window=16, compose=True)
    tokens, places = text(), torch.arange(48)[None]
    mask = torch.ones_like(tokens)
    found = whole(both, tokens, position_ids=2 * places, attention_mask=mask)
    assert_close(found, whole(alone, tokens, position_ids=places, attention_mask=mask))


@pytest.mark.parametrize("kind", ["alibi", "self_extend", "window"])
@pytest.mark.parametrize("second", ["pi", "rerope", "window"])
def test_nothing_is_put_on_top_of_a_patch_in_attention(kind: str, second: str) -> None:
    model = patched_model("llama", kind)
    before = snapshot(model)
    with pytest.raises(PatchError, match=r"Nothing can be put on top of.*Unpatch first"):
        patch_model(model, second, 2, compose=True)
    with pytest.raises(PatchError, match=r"already patched"):
        patch_model(model, second, 2)
    assert differences(before, snapshot(model)) == []


def test_nothing_is_put_on_top_of_no_position() -> None:
    """There is nothing left to stretch."""
    model = patched_model("llama", "nope")
    before = snapshot(model)
    with pytest.raises(PatchError, match=r"Nothing can be put on top of nope.*Unpatch first"):
        patch_model(model, "pi", 2, compose=True)
    assert differences(before, snapshot(model)) == []


def test_a_failed_patch_on_top_of_another_leaves_the_implementation_alone() -> None:
    model = patch_model(make("llama"), "pi", 2)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="4 slopes are needed"):
        patch_model(model, "alibi", 2, compose=True, slopes=[0.1])
    assert model.config._attn_implementation == before
    assert unpatch_model(model).config._attn_implementation == before


def test_numbers_of_numpy_are_recorded_as_plain_ones() -> None:
    model = patch_model(make("llama"), "rerope", 2, window=np.int64(8))
    assert json.loads(model.config.to_json_string())["posext"]["options"] == {"window": 8}


def test_a_table_longer_than_the_length_that_is_given_can_be_saved_and_loaded(tmp_path: Path) -> None:
    model = patch_model(gpt2(), "nope", 4, original_max_position_embeddings=16)
    tokens = text_for("gpt2", "nope")
    model.save_pretrained(tmp_path)
    assert torch.equal(whole(load_pretrained(tmp_path), tokens), whole(model, tokens))
