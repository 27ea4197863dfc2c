"""Invariant 9: adapters, training, compilation and hooks work on a patched model as on any other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounter

from hf_posext import patch_model, record_of, unpatch_model
from tests.architectures import tiny_inputs, tiny_model
from tests.methods import patch_row
from tests.snapshots import differences, logits_of, snapshot


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_neox", "gptj"])
def test_wrapping_by_peft_before_or_after_the_patch_is_the_same(architecture: str) -> None:
    after = wrapped(patch_row(tiny_model(architecture), architecture, "yarn"))
    before = patch_row(wrapped(tiny_model(architecture)), architecture, "yarn")
    assert record_of(after) == record_of(before)
    assert torch.equal(logits_of(after), logits_of(before))


def wrapped(model: Any) -> Any:
    """The model under an adapter that is not the identity."""
    adapter = LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear")
    torch.manual_seed(0)
    return get_peft_model(model, adapter).eval()


def test_unpatching_through_the_peft_wrapper_gives_back_every_bit() -> None:
    model = wrapped(tiny_model("llama"))
    before = snapshot(model)
    unpatch_model(patch_model(model, "yarn", 2))
    assert differences(before, snapshot(model)) == []


def test_merging_an_adapter_keeps_the_patch() -> None:
    model = wrapped(patch_model(tiny_model("llama"), "yarn", 2))
    expected = logits_of(model)
    merged = model.merge_and_unload()
    assert record_of(merged).method == "yarn"
    torch.testing.assert_close(logits_of(merged), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_neox"])
def test_gradients_are_those_without_checkpointing(architecture: str) -> None:
    model = patch_row(tiny_model(architecture), architecture, "yarn").train()
    expected = gradients(model)
    enable = (
        getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    )  # before 5.24
    enable({"use_reentrant": False})
    found = gradients(model)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.allclose(expected[name], found[name], rtol=1e-5, atol=1e-6)] == []


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Gradients of all weights for the same tokens."""
    model.zero_grad()
    tokens = tiny_inputs()["input_ids"]
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_neox", "llama_longrope"])
def test_a_patched_model_compiles_as_one_graph(architecture: str) -> None:
    model = patch_row(tiny_model(architecture), architecture, "yarn")
    expected, counter = logits_of(model), CompileCounter()
    with fresh_compiler(), torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        found = compiled(**tiny_inputs(), use_cache=False).logits
    assert counter.frame_count == 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@contextmanager
def fresh_compiler() -> Iterator[None]:
    """No graphs of earlier tests, none left to later ones."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def test_a_compiled_graph_does_not_outlive_the_patch() -> None:
    model = tiny_model("llama")
    before = logits_of(model)
    with fresh_compiler(), torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        compiled(**tiny_inputs(), use_cache=False)
        patch_model(model, "pi", 2)
        stretched = compiled(**tiny_inputs(), use_cache=False).logits
        torch.testing.assert_close(stretched, logits_of(model), rtol=1e-4, atol=1e-4)
        unpatch_model(model)
        torch.testing.assert_close(compiled(**tiny_inputs(), use_cache=False).logits, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("order", ["hook first", "patch first"])
def test_accelerate_hooks_and_patches_do_not_disturb_each_other(order: str) -> None:
    model = tiny_model("llama")
    expected = logits_of(patch_model(tiny_model("llama"), "yarn", 2))
    unpatched = logits_of(model)
    rotary, hook = model.model.rotary_emb, AlignDevicesHook(execution_device="cpu", io_same_device=True)
    if order == "hook first":
        add_hook_to_module(rotary, hook)
        patch_model(model, "yarn", 2)
    else:
        patch_model(model, "yarn", 2)
        add_hook_to_module(rotary, hook)
    assert torch.equal(logits_of(model), expected)
    unpatch_model(model)
    assert torch.equal(logits_of(model), unpatched)
    assert rotary._hf_hook is hook
    remove_hook_from_module(rotary)
    assert torch.equal(logits_of(model), unpatched)


def test_a_hook_on_every_module_survives() -> None:
    model = tiny_model("gemma3")
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    expected = logits_of(model)
    unpatch_model(patch_model(model, "yarn", 2))
    assert torch.equal(logits_of(model), expected)
    assert [name for name, module in model.named_modules() if not hasattr(module, "_hf_hook")] == []
