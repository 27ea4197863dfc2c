"""Twins in transformers' attention registry: the same attention with something before it, chosen per model."""

import copy

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_posext
from hf_posext.attention import interface
from hf_posext.configs import config_parts
from tests.architectures import tiny_config, tiny_inputs, tiny_model


def logits(model, length: int = 48) -> torch.Tensor:
    with torch.no_grad():
        return model(**tiny_inputs(length)).logits


def names_of(model) -> list[str]:
    return [config._attn_implementation for config in config_parts(model)]


IMPLEMENTATIONS = sorted(name for name in ("eager", *ALL_ATTENTION_FUNCTIONS) if not name.startswith(interface.PREFIX))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_every_implementation_has_a_twin_with_the_same_masks(name: str) -> None:
    twin = interface.PREFIX + name
    assert callable(ALL_ATTENTION_FUNCTIONS[twin])
    assert (twin in ALL_MASK_ATTENTION_FUNCTIONS) == (name in ALL_MASK_ATTENTION_FUNCTIONS)
    if name in ALL_MASK_ATTENTION_FUNCTIONS:
        assert ALL_MASK_ATTENTION_FUNCTIONS[twin] is ALL_MASK_ATTENTION_FUNCTIONS[name]


def test_an_implementation_registered_later_gets_a_twin_when_it_is_chosen() -> None:
    calls = []

    def own(module, query, key, value, attention_mask=None, **options):
        calls.append(query.shape[2])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)

    AttentionInterface.register("unit_own", own)
    try:
        model = tiny_model("llama")
        model.set_attn_implementation("unit_own")
        hf_posext.patch_model(model, "yarn", 2, dynamic=True)
        calls.clear()
        logits(model, 32)
        assert calls == [32, 32]
        assert names_of(model) == ["posext_unit_own"]
    finally:
        for name in ("unit_own", "posext_unit_own"):
            ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
@pytest.mark.parametrize("row", ["llama", "gemma3", "qwen2_vl"])
def test_choosing_and_giving_back_is_a_round_trip(row: str, name: str) -> None:
    configs = config_parts(tiny_model(row))
    for config in configs:
        config._attn_implementation_internal = name
    before = [copy.deepcopy(config.__dict__) for config in configs]
    interface.choose(configs)
    assert {config._attn_implementation for config in configs} == {interface.PREFIX + name}
    interface.choose(configs)  # twice is once
    assert {config._attn_implementation for config in configs} == {interface.PREFIX + name}
    interface.give_back(configs)
    assert [config.__dict__ for config in configs] == before
    interface.give_back(configs)
    assert [config.__dict__ for config in configs] == before


def test_a_config_that_names_none_stands_for_eager() -> None:
    config = tiny_config("llama")
    config._attn_implementation_internal = None
    interface.choose([config])
    assert config._attn_implementation == "posext_eager"


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_twin_without_an_adapter_is_the_implementation(name: str) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(name)
    before = logits(model)
    interface.choose([model.config])
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("with_a_forward", [False, True])
@pytest.mark.parametrize(("first", "then"), [("sdpa", "eager"), ("eager", "sdpa")])
def test_the_implementation_that_a_user_sets_survives_unpatching(first: str, then: str, with_a_forward: bool) -> None:
    plain, model = tiny_model("llama"), tiny_model("llama")
    plain.set_attn_implementation(then)
    model.set_attn_implementation(first)
    hf_posext.patch_model(model, "yarn", 2, dynamic=True)
    assert names_of(model) == [f"posext_{first}"]
    model.set_attn_implementation(then)
    if with_a_forward:
        logits(model)
        assert names_of(model) == [f"posext_{then}"]
    hf_posext.unpatch_model(model)
    assert names_of(model) == [then]
    assert torch.equal(logits(model), logits(plain))


def test_an_implementation_set_after_the_patch_is_the_one_that_runs() -> None:
    model = hf_posext.patch_model(tiny_model("llama"), "yarn", 2, dynamic=True)
    before = logits(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(**tiny_inputs(48), output_attentions=True)
    torch.testing.assert_close(output.logits, before, rtol=0, atol=1e-4)
    assert [tuple(each.shape) for each in output.attentions] == [(2, 4, 48, 48)] * 2
    for weights in output.attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 48))
        assert float(weights.triu(1).abs().max()) == 0


def test_a_patch_reaches_no_other_model_of_the_same_class() -> None:
    other = tiny_model("llama")
    before, name = logits(other), other.config._attn_implementation
    hf_posext.patch_model(tiny_model("llama"), "yarn", 2, dynamic=True)
    assert torch.equal(logits(other), before)
    assert other.config._attn_implementation == name
