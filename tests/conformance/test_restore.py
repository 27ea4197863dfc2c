"""Invariant 3: unpatching gives back every bit, whatever happened in between."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hf_posext import NoSiteError, PatchError, patch_model, patched, probe, record_of, suspended, unpatch_model
from tests import special_models
from tests.architectures import ARCHITECTURES, tiny_model
from tests.methods import pairs, patch_row
from tests.snapshots import differences, logits_of, snapshot


def frequencies(model: Any) -> dict[str, torch.Tensor]:
    """Frequency buffers by path, cloned."""
    return {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


@pytest.mark.parametrize(("architecture", "method"), pairs())
def test_unpatch_gives_back_every_bit(architecture: str, method: str) -> None:
    model = tiny_model(architecture)
    before = snapshot(model)
    patch_row(model, architecture, method)
    logits_of(model, 16)
    assert unpatch_model(model) is model
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize(("architecture", "method"), pairs(("gemma3", "modernbert"), ("pi", "yarn")))
def test_unpatch_gives_back_every_bit_of_all_layers(architecture: str, method: str) -> None:
    model = tiny_model(architecture)
    before = snapshot(model)
    unpatch_model(patch_row(model, architecture, method, layers="all"))
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize("architecture", [row.id for row in ARCHITECTURES])
def test_unpatch_gives_back_every_bit_of_a_model_that_never_ran(architecture: str) -> None:
    """The proof that a patch acts runs the model; modules that keep state in their forward must not show it."""
    model = tiny_model(architecture)
    before = snapshot(model, 0)
    unpatch_model(patch_row(model, architecture, "pi"))
    assert differences(before, snapshot(model, 0)) == []


LENGTH_DEPENDENT = ["llama_dynamic", "llama_longrope", "phi3_longrope"]


@pytest.mark.parametrize("architecture", LENGTH_DEPENDENT)
def test_unpatch_gives_back_a_module_that_changes_itself_with_length(architecture: str) -> None:
    model = tiny_model(architecture)
    before = snapshot(model, 48)
    patch_row(model, architecture, "pi")
    logits_of(model, 48)
    unpatch_model(model)
    assert differences(before, snapshot(model, 48)) == []


@pytest.mark.parametrize("make", special_models.ROTARY.values(), ids=special_models.ROTARY)
def test_unpatch_gives_back_every_bit_of_a_special_case(make: Callable[[], Any]) -> None:
    model = make()
    before = snapshot(model)
    unpatch_model(patch_model(model, "pi", 2))
    assert differences(before, snapshot(model)) == []


def test_unpatch_of_an_unpatched_model_returns_it_as_it_is() -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    assert unpatch_model(model) is model
    assert differences(before, snapshot(model)) == []


def test_unpatch_takes_off_every_patch_of_a_composition() -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    patch_model(model, "pi", 2)
    patch_model(model, "yarn", 2, compose=True, temperature="logits")
    unpatch_model(model)
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gptj", "roformer", "llama_longrope"])
def test_patching_again_gives_the_same_model(architecture: str) -> None:
    model = patch_row(tiny_model(architecture), architecture, "pi")
    first = snapshot(model)
    patch_row(unpatch_model(model), architecture, "pi")
    assert differences(first, snapshot(model)) == []


def test_a_with_block_unpatches_on_the_way_out() -> None:
    model = tiny_model("gpt_neox")
    before = snapshot(model)
    with patched(model, "yarn", 4) as inside:
        assert inside is model
        assert record_of(model).factor == 4
    assert differences(before, snapshot(model)) == []


def test_a_with_block_unpatches_after_an_error() -> None:
    model = tiny_model("gemma3")
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), patched(model, "yarn", 4):
        raise ZeroDivisionError
    assert differences(before, snapshot(model)) == []


def test_a_with_block_may_be_used_again_and_again() -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    with patched(model, "pi", 2):
        pass
    with patched(model, "yarn", 3):
        pass
    assert differences(before, snapshot(model)) == []


def test_suspended_shows_the_unpatched_model_and_puts_the_patch_back() -> None:
    model = tiny_model("gemma3")
    logits, tokenizer = logits_of(model), SimpleNamespace(model_max_length=32)
    patch_model(model, "yarn", 2, tokenizer=tokenizer)
    patched_picture = snapshot(model)
    with suspended(model):
        assert torch.equal(logits_of(model), logits)
    assert differences(patched_picture, snapshot(model)) == []
    assert tokenizer.model_max_length == 64


def test_suspended_is_nothing_on_an_unpatched_model() -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    with suspended(model):
        assert differences(before, snapshot(model)) == []
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("yarn", {"beta_fast": -1}),
        ("yarn", {"beta_fats": 32}),
        ("pi", {"layers": "sliding"}),
        ("longrope", {"long_factor": [1.0, 2.0]}),
    ],
)
def test_a_patch_that_is_refused_leaves_every_bit(method: str, arguments: dict[str, Any]) -> None:
    model = tiny_model("llama")
    before = snapshot(model)
    with pytest.raises((TypeError, ValueError)):
        patch_model(model, method, 2, **arguments)
    assert differences(before, snapshot(model)) == []


def test_a_refused_model_keeps_every_bit() -> None:
    model = special_models.gpt2()
    before = snapshot(model)
    with pytest.raises(NoSiteError):
        patch_model(model, "yarn", 2)
    assert differences(before, snapshot(model)) == []


def test_a_second_patch_that_has_no_effect_leaves_the_first_with_all_that_it_gives_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = tiny_model("llama"), SimpleNamespace(model_max_length=32)
    unpatched = snapshot(model)
    patch_model(model, "pi", 2, tokenizer=tokenizer)
    before = snapshot(model)
    monkeypatch.setattr(probe, "check_effect", Mock(side_effect=[PatchError("refused here"), None]))
    with pytest.raises(PatchError, match="refused here"):
        patch_model(model, "yarn", 2, compose=True)
    assert differences(before, snapshot(model)) == []
    unpatch_model(model)
    assert differences(unpatched, snapshot(model)) == []
    assert tokenizer.model_max_length == 32


def test_a_failed_second_patch_leaves_the_first_in_force() -> None:
    model = patch_model(tiny_model("llama"), "pi", 2)
    before = snapshot(model)
    with pytest.raises(TypeError):
        patch_model(model, "yarn", 2, compose=True, nonsense=1)
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_neox", "llama_longrope", "qwen2_vl"])
def test_a_cast_and_back_leaves_the_frequencies_exact(architecture: str, dtype: torch.dtype) -> None:
    model = tiny_model(architecture)
    before = frequencies(model.model.language_model if architecture == "qwen2_vl" else model)
    patch_row(model, architecture, "yarn").to(dtype).float()
    unpatch_model(model)
    after = frequencies(model.model.language_model if architecture == "qwen2_vl" else model)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gptj", "roformer", "llama_yarn"])
def test_unpatching_a_copy_leaves_the_original_patched(architecture: str) -> None:
    model = tiny_model(architecture)
    unpatched = snapshot(model)
    patch_row(model, architecture, "pi")
    before, twin = snapshot(model), copy.deepcopy(model)
    unpatch_model(twin)
    assert differences(before, snapshot(model)) == []
    assert differences(unpatched, snapshot(twin)) == []


def test_unpatching_the_original_leaves_a_copy_patched() -> None:
    model = patch_model(tiny_model("llama"), "yarn", 2)
    before, twin = snapshot(model), copy.deepcopy(model)
    unpatch_model(model)
    assert differences(before, snapshot(twin)) == []


def test_a_tokenizer_gets_its_length_back() -> None:
    model, tokenizer = tiny_model("llama"), SimpleNamespace(model_max_length=32)
    patch_model(model, "pi", 4, tokenizer=tokenizer)
    assert tokenizer.model_max_length == 128
    unpatch_model(model)
    assert tokenizer.model_max_length == 32


def test_the_tokenizer_of_a_failed_patch_is_untouched() -> None:
    tokenizer = SimpleNamespace(model_max_length=32)
    with pytest.raises(ValueError, match="factor"):
        patch_model(tiny_model("llama"), "pi", 0.5, tokenizer=tokenizer)
    assert tokenizer.model_max_length == 32


@pytest.mark.parametrize("training", [True, False])
def test_the_training_flags_are_kept(training: bool) -> None:
    model = tiny_model("llama").train(training)
    patch_model(model, "yarn", 2)
    assert {module.training for module in model.modules()} == {training}
    unpatch_model(model)
    assert {module.training for module in model.modules()} == {training}
