"""A factor is relative to the model as given: what a checkpoint or an earlier patch did already is multiplied."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posext import PatchError, patch_model, record_of, unpatch_model
from tests.architectures import TRAINED_LENGTH, tiny_config, tiny_model
from tests.methods import METHOD, patch_row
from tests.snapshots import differences, logits_of, snapshot


def stretched(factor: int) -> Any:
    """A Llama whose checkpoint says linear scaling."""
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": float(factor)}
    config.max_position_embeddings = factor * TRAINED_LENGTH
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**config.to_dict())).eval()


def test_two_patches_of_factor_2_are_one_of_factor_4() -> None:
    model = patch_model(patch_model(tiny_model("llama"), "pi", 2), "pi", 2, compose=True)
    record = record_of(model)
    assert (record.factor, record.total_factor, record.original_max_position_embeddings) == (2, 4, TRAINED_LENGTH)
    assert (record.trained_length, record.target_length, len(record.previous)) == (64, 128, 1)
    assert (model.config.max_position_embeddings, model.config.rope_parameters["factor"]) == (128, 4.0)
    assert torch.equal(logits_of(model), logits_of(patch_model(tiny_model("llama"), "pi", 4)))


@pytest.mark.parametrize("second", list(METHOD))
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gptj"])
def test_a_composition_is_taken_off_bit_by_bit(architecture: str, second: str) -> None:
    model = tiny_model(architecture)
    before = snapshot(model)
    patch_row(model, architecture, "pi")
    patch_row(model, architecture, second, compose=True)
    assert record_of(model).total_factor == 4
    unpatch_model(model)
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize("compose", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gptj"])
def test_a_second_patch_needs_compose(architecture: str, compose: bool) -> None:
    model = patch_row(tiny_model(architecture), architecture, "pi")
    if compose:
        patch_row(model, architecture, "pi", compose=True)
        return
    before = snapshot(model)
    with pytest.raises(PatchError, match=r"already patched: pi x2 \(32 -> 64 tokens\).*unpatch_model.*compose=True"):
        patch_row(model, architecture, "pi")
    assert differences(before, snapshot(model)) == []


def test_linear_2_in_the_checkpoint_and_pi_2_is_linear_4_exactly() -> None:
    model = patch_model(stretched(2), "pi", 2)
    record = record_of(model)
    assert (record.factor, record.total_factor, record.original_max_position_embeddings) == (2, 4, TRAINED_LENGTH)
    assert model.config.rope_parameters == {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    assert torch.equal(logits_of(model, 100), logits_of(stretched(4), 100))


def test_gemma3_of_factor_8_and_pi_2_is_a_sixteenth_and_local_layers_are_untouched() -> None:
    model = tiny_model("gemma3_linear")
    before = {name: buffer.clone() for name, buffer in model.model.rotary_emb.named_buffers()}
    theta = 1e6 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    patch_model(model, "pi", 2)
    after = dict(model.model.rotary_emb.named_buffers())
    torch.testing.assert_close(after["full_attention_inv_freq"].double(), theta / 16, rtol=1e-6, atol=0)
    assert torch.equal(after["sliding_attention_inv_freq"], before["sliding_attention_inv_freq"])
    block = model.config.rope_parameters
    assert (block["full_attention"]["factor"], block["sliding_attention"]["rope_type"]) == (16.0, "default")
    assert (record_of(model).total_factor, model.config.max_position_embeddings) == (16, 512)


def test_all_layers_of_gemma3_are_stretched_when_asked() -> None:
    model = tiny_model("gemma3")
    before = {name: buffer.clone() for name, buffer in model.model.rotary_emb.named_buffers()}
    patch_model(model, "pi", 2, layers="all")
    after = dict(model.model.rotary_emb.named_buffers())
    names = ["full_attention_inv_freq", "sliding_attention_inv_freq"]
    assert [torch.equal(after[name], before[name] / 2) for name in names] == [True, True]


def test_pi_over_a_yarn_checkpoint_keeps_its_temperature() -> None:
    model = tiny_model("llama_yarn")
    rotary = model.model.rotary_emb
    scaling, theta = rotary.attention_scaling, rotary.inv_freq.clone()
    patch_model(model, "pi", 2)
    assert rotary.attention_scaling == scaling
    assert torch.equal(rotary.inv_freq, theta / 2)
    assert record_of(model).total_factor == 8


def test_a_target_length_counts_from_the_checkpoint_as_given() -> None:
    model = patch_model(tiny_model("llama_yarn"), "pi", target_length=512)
    assert (record_of(model).factor, record_of(model).trained_length, record_of(model).total_factor) == (4, 128, 16)
