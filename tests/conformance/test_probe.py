"""Invariant 12: after every patch the model's own forward has shown that its positions changed; else it is undone."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_posext import NoSiteError, PatchError, inspect_model, patch_model, record_of
from tests import special_models
from tests.architectures import tiny_model
from tests.methods import METHOD, patch_row
from tests.snapshots import differences, logits_of, snapshot

has_beam = pytest.mark.skipif("beam" not in CONFIG_MAPPING, reason="the family came with a later transformers")


def blind(model: Any) -> Any:
    """A model whose attention does not use what the rotary module gives: as if a fused kernel had its own table."""
    for layer in model.model.layers:
        attention, forward = layer.self_attn, layer.self_attn.forward

        def fused(
            self: Any, hidden_states: Any, position_embeddings: Any, *rest: Any, inner: Any = forward, **named: Any
        ) -> Any:
            cosine, sine = position_embeddings
            return inner(hidden_states, (torch.ones_like(cosine), torch.zeros_like(sine)), *rest, **named)

        attention.forward = MethodType(fused, attention)
    return model


def deaf(model: Any) -> Any:
    """A model whose rotary module turns by a table of its own and not by its buffer."""
    rotary = model.model.rotary_emb
    table = rotary.inv_freq.clone()

    def fixed(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * table
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    rotary.forward = MethodType(fixed, rotary)
    return model


@pytest.mark.parametrize("spoil", [blind, deaf])
@pytest.mark.parametrize("method", list(METHOD))
def test_a_patch_without_effect_is_an_error_and_is_undone(method: str, spoil: Callable[[Any], Any]) -> None:
    model = spoil(tiny_model("llama"))
    before = snapshot(model)
    with pytest.raises(PatchError, match=r"no effect|does not turn") as error:
        patch_row(model, "llama", method)
    assert "left as it was" in str(error.value)
    assert "model.rotary_emb" in str(error.value)
    assert differences(before, snapshot(model)) == []
    assert record_of(model) is None


@pytest.mark.parametrize("method", list(METHOD))
def test_a_forward_that_ignores_its_buffer_is_handled(method: str) -> None:
    """PhiMoE recomputes its frequencies from the config in each forward."""
    model = special_models.phimoe()
    before = logits_of(model)
    options = METHOD[method].options(8)
    patch_model(model, method, 2, **options)
    (site,) = inspect_model(model).sites
    cosine, _ = model.model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([[3]]))
    expected = (3 * model.model.rotary_emb.inv_freq).cos() * site.attention_scaling
    torch.testing.assert_close(cosine.flatten()[:8], expected, rtol=0, atol=1e-6)
    assert (logits_of(model) - before).abs().max() > 1e-3


def test_layers_without_rotation_do_not_hide_the_effect() -> None:
    model = special_models.smollm3()
    before = logits_of(model)
    patch_model(model, "pi", 2)
    assert (logits_of(model) - before).abs().max() > 1e-3


@has_beam
def test_a_model_of_which_only_the_local_layers_rotate_is_refused_with_the_way_out() -> None:
    model = special_models.beam()
    before = snapshot(model)
    with pytest.raises(NoSiteError, match=r'Only layers with a sliding window rotate.*layers="all"'):
        patch_model(model, "pi", 2)
    assert differences(before, snapshot(model)) == []


@has_beam
def test_the_way_out_works() -> None:
    model = special_models.beam()
    before = logits_of(model)
    patch_model(model, "pi", 2, layers="all")
    assert (logits_of(model) - before).abs().max() > 1e-3


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen2_vl", "gptj"])
def test_the_random_state_is_as_it_was(architecture: str) -> None:
    model = tiny_model(architecture).train()
    torch.rand(7)  # a state that no seed gives
    before = torch.get_rng_state()
    patch_row(model, architecture, "yarn")
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_does_not_pass_for_an_effect() -> None:
    """In training mode two forwards differ by chance; a patch without effect must still be found out."""
    model = blind(tiny_model("llama")).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(PatchError, match="no effect"):
        patch_model(model, "pi", 2)
    assert model.training


def test_no_gradient_and_no_hook_is_left_behind() -> None:
    model = tiny_model("llama").train()
    patch_model(model, "pi", 2)
    assert [name for name, value in model.named_parameters() if value.grad is not None] == []
    assert [name for name, module in model.named_modules() if module._forward_hooks] == []
    assert all(value.requires_grad for value in model.parameters())
