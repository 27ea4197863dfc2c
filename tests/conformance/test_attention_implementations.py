"""Attention implementations that cannot carry a patch in attention give way to sdpa, with a notice, and come back."""

import logging
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_posext import unpatch_model
from tests.architectures import TRAINED_LENGTH
from tests.dynamic import assert_close, in_pieces, steps, text, whole
from tests.in_attention import FEW_PAIRS, make, patch, patched_model, shared_model, shared_unpatched, text_for

LOGGER = "hf_posext.attention.interface"
IN_ATTENTION = [*(pair for pair in FEW_PAIRS if pair[1] != "nope"), ("gpt2", "alibi")]
REPLACED = [
    *(("flex_attention", *pair) for pair in IN_ATTENTION[::2]),
    *(("flash_attention_2", *pair) for pair in IN_ATTENTION[1::2]),
]


@pytest.mark.transformers_logs("older releases remark on float32 for flash attention, which is only named here")
@pytest.mark.parametrize(("name", "row", "kind"), REPLACED)
def test_an_implementation_that_cannot_carry_the_patch_is_replaced_with_a_notice(
    name: str, row: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No test machine has flash attention: its name is written into the config as loading would do."""
    tokens, model = text_for(row, kind, batch=2), make(row)
    expected = whole(shared_model(row, kind), tokens)
    set_name(model, name)
    with caplog.at_level(logging.WARNING, LOGGER):
        patch(model, kind)
        found = whole(model, tokens)
        whole(model, tokens)
    lines = [line.getMessage() for line in caplog.records if line.name == LOGGER]
    assert len(lines) == 1
    assert f"`{name}`" in lines[0]
    assert "sdpa" in lines[0]
    assert_close(found, expected)
    unpatch_model(model)
    assert model.config._attn_implementation == name
    assert {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")} == {name}
    set_name(model, "sdpa")
    short = tokens[:, :TRAINED_LENGTH]
    assert torch.equal(whole(model, short), whole(shared_unpatched(row), short))


def set_name(model: Any, name: str) -> None:
    """Writes the name of an implementation into the config that all modules share."""
    model.config._attn_implementation_internal = name


@pytest.mark.parametrize("kind", ["alibi", "self_extend", "window"])
def test_an_implementation_that_is_chosen_later_is_replaced_too(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model, tokens = patched_model("llama", kind), text()
    expected = whole(model, tokens)
    with caplog.at_level(logging.WARNING, LOGGER):
        model.set_attn_implementation("flex_attention")
        assert_close(whole(model, tokens), expected)
        assert_close(in_pieces(model, tokens, steps(40), DynamicCache()), expected)
    assert len([line for line in caplog.records if line.name == LOGGER]) == 1
    unpatch_model(model)
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.transformers_logs("older releases remark on float32 for flash attention, which is only named here")
def test_generation_goes_on_where_flash_attention_was_replaced() -> None:
    model, expected = make("llama"), patched_model("llama", "alibi")
    set_name(model, "flash_attention_2")
    patch(model, "alibi")
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    mask = torch.ones_like(text(29))
    assert torch.equal(
        model.generate(text(29), attention_mask=mask, **options),
        expected.generate(text(29), attention_mask=mask, **options),
    )
