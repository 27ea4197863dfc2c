"""Invariant 9: casts, copies, moves, loading and initialisation keep the patch right."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_posext import patch_model, record_of, unpatch_model
from hf_posext.mechanisms import find_sites
from tests import special_models
from tests.architectures import tiny_config, tiny_model
from tests.copies import through_pickle, through_torch_save
from tests.methods import patch_row
from tests.snapshots import differences, logits_of, snapshot

KINDS = ("llama", "gemma3", "gpt_neox", "gptj", "roformer", "llama_longrope", "deepseek_v3")
"""One row for each way in which a position encoding is kept."""
BUFFERS = ("llama", "gemma3", "gpt_neox", "llama_longrope", "qwen2_vl")


def exact_frequencies(architecture: str, method: str = "yarn") -> dict[str, torch.Tensor]:
    """Frequency buffers of a patched row that nothing was done to."""
    return frequencies(patch_row(tiny_model(architecture), architecture, method))


def frequencies(model: Any) -> dict[str, torch.Tensor]:
    """The live buffers of the sites that are patched."""
    return {
        str(site): getattr(site.module, site.field) for site in find_sites(model) if str(site) in record_of(model).sites
    }


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("architecture", KINDS)
def test_a_copy_is_the_same_patched_model(architecture: str, duplicate: Callable[[Any], Any]) -> None:
    model = patch_row(tiny_model(architecture), architecture, "yarn")
    before = snapshot(model)
    assert differences(before, snapshot(duplicate(model))) == []


@pytest.mark.parametrize("architecture", KINDS)
def test_a_pickled_copy_can_be_unpatched(architecture: str) -> None:
    model = tiny_model(architecture)
    before = snapshot(model)
    copied = through_pickle(patch_row(model, architecture, "yarn"))
    assert differences(before, snapshot(unpatch_model(copied))) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("architecture", BUFFERS)
def test_frequencies_are_exact_float32_after_a_cast(architecture: str, dtype: torch.dtype) -> None:
    model = patch_row(tiny_model(architecture), architecture, "yarn").to(dtype)
    expected = exact_frequencies(architecture)
    assert [name for name, value in frequencies(model).items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("architecture", ["gptj", "roformer"])
def test_a_table_is_rounded_once_however_often_it_is_cast(architecture: str) -> None:
    model = patch_row(tiny_model(architecture), architecture, "pi")
    before = snapshot(model)
    model.to(torch.bfloat16).to(torch.float16).float()
    after = snapshot(model)
    table = [name for name in before.tensors if name.endswith(("embed_positions", "embed_positions.weight"))]
    assert table
    assert [name for name in table if not torch.equal(before.tensors[name], after.tensors[name])] == []


@pytest.mark.parametrize("architecture", BUFFERS)
def test_a_model_that_was_cast_before_the_patch_has_exact_frequencies(architecture: str) -> None:
    model = patch_row(tiny_model(architecture).to(torch.bfloat16), architecture, "yarn")
    expected = exact_frequencies(architecture)
    assert [name for name, value in frequencies(model).items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_neox"])
def test_a_patched_bfloat16_model_runs_in_bfloat16(architecture: str) -> None:
    assert logits_of(patch_row(tiny_model(architecture), architecture, "yarn").bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "deepseek_v3"])
def test_angles_hold_where_mixed_precision_casts_buffer_data(architecture: str) -> None:
    """FSDP and others assign `buffer.data`; the angle at position 4095 must still be that of float64."""
    model = patch_row(tiny_model(architecture), architecture, "pi")
    (site,) = find_sites(model)
    angle = 4095 * old_frequencies(site.module.config) / 2
    for buffer in model.buffers():
        buffer.data = buffer.data.to(torch.bfloat16)
    cosine, sine = (value.flatten().double() for value in site.module(torch.zeros(1, 1, 1), torch.tensor([[4095]])))
    live = torch.atan2(sine, cosine)[: len(angle)]
    assert ((live - angle + torch.pi).remainder(2 * torch.pi) - torch.pi).abs().max() < 1e-3


def old_frequencies(config: Any) -> torch.Tensor:
    """b^(-2i/d) in float64 for what a row rotates, [F]."""
    width = int(16 * config.rope_parameters.get("partial_rotary_factor", 1.0))
    return 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_neox", "qwen2_vl", "gptj", "llama_longrope"])
def test_a_patched_model_on_meta_is_filled_by_to_empty_and_a_state_dict(architecture: str) -> None:
    model = patch_row(tiny_model(architecture), architecture, "yarn")
    expected, state = logits_of(model), {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta")
    model.to_empty(device="cpu")
    refill(model, state, tiny_model(architecture))
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=0)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_neox", "llama_longrope"])
def test_a_model_that_is_patched_on_meta_is_right_after_to_empty(architecture: str) -> None:
    exact = patch_row(tiny_model(architecture), architecture, "yarn")
    with torch.device("meta"):
        model = type(exact)(tiny_config(architecture)).eval()
    patch_row(model, architecture, "yarn")
    model.to_empty(device="cpu")
    refill(model, exact.state_dict(), tiny_model(architecture))
    assert torch.equal(logits_of(model), logits_of(exact))
    assert torch.equal(logits_of(unpatch_model(model)), logits_of(unpatch_model(exact)))


def refill(model: Any, state: dict[str, torch.Tensor], origin: Any) -> None:
    """Loads weights, and the buffers that are in no state dict and are not frequencies, as transformers does."""
    model.load_state_dict(state)
    held = set(model.state_dict())
    for name, value in origin.named_buffers():
        if name not in held and "inv_freq" not in name and model.get_buffer(name).shape == value.shape:
            model.get_buffer(name).copy_(value)


@pytest.mark.parametrize("architecture", BUFFERS)
def test_weight_initialisation_keeps_the_frequencies(architecture: str) -> None:
    model = patch_row(tiny_model(architecture), architecture, "yarn")
    expected = exact_frequencies(architecture)
    model.init_weights()
    for module in model.modules():
        model._init_weights(module)
    logits_of(model)
    assert [name for name, value in frequencies(model).items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("architecture", ["gptj", "roformer"])
def test_weight_initialisation_keeps_the_table(architecture: str) -> None:
    model = patch_row(tiny_model(architecture), architecture, "pi")
    before = snapshot(model).tensors
    model.init_weights()
    for module in model.modules():
        model._init_weights(module)
    logits_of(model)
    after = snapshot(model).tensors
    table = [name for name in before if name.endswith(("embed_positions", "embed_positions.weight"))]
    assert table
    assert [name for name in table if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("architecture", KINDS)
def test_patching_under_a_half_precision_default_dtype_gives_exact_frequencies(architecture: str) -> None:
    expected = snapshot(patch_row(tiny_model(architecture), architecture, "yarn"))
    model = tiny_model(architecture)
    torch.set_default_dtype(torch.bfloat16)
    try:
        patch_row(model, architecture, "yarn")
    finally:
        torch.set_default_dtype(torch.float32)
    assert differences(expected, snapshot(model)) == []


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_stale_frequency_keys_of_old_checkpoints_do_no_harm(architecture: str) -> None:
    model = patch_row(tiny_model(architecture), architecture, "yarn")
    expected, state = logits_of(model), model.state_dict()
    stale = {f"{name}.self_attn.rotary_emb.inv_freq": torch.ones(8) for name in ("model.layers.0", "model.layers.1")}
    outcome = model.load_state_dict({**state, **stale}, strict=False)
    assert (outcome.missing_keys, sorted(outcome.unexpected_keys)) == ([], sorted(stale))
    assert torch.equal(logits_of(model), expected)


@pytest.mark.parametrize("architecture", KINDS)
def test_loading_a_state_dict_keeps_the_patch(architecture: str) -> None:
    """The weights are those of the patched model itself; an unpatched table of another size is refused by torch."""
    model = patch_row(tiny_model(architecture), architecture, "yarn")
    before = snapshot(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    assert differences(before, snapshot(model)) == []


def test_loading_unpatched_frequencies_keeps_the_patch() -> None:
    """ESM saves its frequencies: those of an unpatched checkpoint must not creep in under the record of a patch."""
    model = special_models.esm()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    patch_model(model, "pi", 2)
    before = snapshot(model)
    model.load_state_dict(state)
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "llama_longrope", "llama_dynamic", "gpt_neox", "gptj"])
def test_buffers_keep_names_and_shapes_whatever_the_length(architecture: str) -> None:
    """State that grows with the input is what breaks sharded and captured forwards; 64 tokens are 2 N or N of these."""
    model = patch_row(tiny_model(architecture), architecture, "pi")
    shapes = {name: buffer.shape for name, buffer in model.named_buffers()}
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for length in (8, 32, 64):
        logits_of(model, length)
    assert {name: buffer.shape for name, buffer in model.named_buffers()} == shapes
    assert [name for name, buffer in model.named_buffers() if not torch.equal(buffer, values[name])] == []
