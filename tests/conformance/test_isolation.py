"""Invariant 4: a patch changes one model, and nothing that other models share with it."""

import inspect
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from hf_posext import patch_model, unpatch_model
from tests.architectures import ARCHITECTURES, tiny_config, tiny_model
from tests.methods import patch_row
from tests.snapshots import described, differences, logits_of, snapshot

EVERY_ROW = [row.id for row in ARCHITECTURES]


def twins(config: Any) -> tuple[Any, Any]:
    """Two models built from one configuration object, with different weights."""
    return LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("architecture", EVERY_ROW)
def test_another_model_of_the_family_keeps_every_bit(architecture: str) -> None:
    model, other = tiny_model(architecture), tiny_model(architecture, seed=1)
    before = snapshot(other)
    patch_row(model, architecture, "yarn")
    assert differences(before, snapshot(other)) == []
    unpatch_model(model)
    assert differences(before, snapshot(other)) == []


@pytest.mark.parametrize("architecture", EVERY_ROW)
def test_a_model_built_from_the_same_config_object_keeps_every_bit(architecture: str) -> None:
    config = tiny_config(architecture)
    kind = type(tiny_model(architecture))
    model, other = kind(config).eval(), kind(config).eval()
    text, before = described(config), snapshot(other)
    patch_row(model, architecture, "yarn")
    assert differences(before, snapshot(other)) == []
    assert described(config) == text


def test_a_model_built_after_the_patch_from_the_same_config_object_is_not_patched() -> None:
    config = tiny_config("llama")
    model, _ = twins(config)
    patch_model(model, "pi", 4)
    later = LlamaForCausalLM(config)
    assert torch.equal(later.model.rotary_emb.inv_freq, later.model.rotary_emb.original_inv_freq)
    assert later.config.max_position_embeddings == 32


def test_both_twins_may_be_patched_differently() -> None:
    one, other = twins(tiny_config("llama"))
    old = one.model.rotary_emb.inv_freq.clone()
    patch_model(one, "pi", 2)
    patch_model(other, "pi", 4)
    torch.testing.assert_close(one.model.rotary_emb.inv_freq, old / 2, rtol=0, atol=0)
    torch.testing.assert_close(other.model.rotary_emb.inv_freq, old / 4, rtol=0, atol=0)
    assert (one.config.max_position_embeddings, other.config.max_position_embeddings) == (64, 128)


@pytest.mark.parametrize("architecture", EVERY_ROW)
def test_no_class_is_touched(architecture: str) -> None:
    model = tiny_model(architecture)
    classes = {each for module in model.modules() for each in type(module).__mro__}
    before = {each: dict(vars(each)) for each in classes}
    with torch.no_grad():
        patch_row(model, architecture, "yarn")
        logits_of(model)
    assert [each.__name__ for each in classes if dict(vars(each)) != before[each]] == []


def test_no_function_of_the_modelling_file_is_replaced() -> None:
    before = dict(inspect.getmembers(modeling_llama))
    patch_model(tiny_model("llama"), "yarn", 2)
    assert dict(inspect.getmembers(modeling_llama)) == before


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen2_vl"])
def test_modules_of_a_patched_model_still_share_one_config(architecture: str) -> None:
    """transformers relies on it: `set_attn_implementation` writes in one place."""
    model = tiny_model(architecture)
    holders = [module for module in model.modules() if "config" in vars(module)]
    shared = [[one.config is other.config for other in holders] for one in holders]
    patch_row(model, architecture, "yarn")
    assert [[one.config is other.config for other in holders] for one in holders] == shared


def test_attention_implementation_is_chosen_per_model_after_a_patch() -> None:
    one, other = twins(tiny_config("llama"))
    patch_model(one, "pi", 2)
    one.set_attn_implementation("eager")
    assert one.model.layers[0].self_attn.config._attn_implementation == "eager"
    assert other.model.layers[0].self_attn.config._attn_implementation == "sdpa"
    unpatch_model(one)
    assert one.model.layers[0].self_attn.config._attn_implementation == "eager"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementations_agree_on_a_patched_model(implementation: str) -> None:
    model = patch_model(tiny_model("llama"), "yarn", 2)
    expected = logits_of(model)
    model.set_attn_implementation(implementation)
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)


def test_options_of_the_caller_are_not_kept_by_reference() -> None:
    factors = [1.0 + 0.5 * channel for channel in range(8)]
    model = patch_model(tiny_model("llama"), "longrope", 2, long_factor=factors)
    before = snapshot(model)
    factors[0] = 99.0
    assert differences(before, snapshot(model)) == []
