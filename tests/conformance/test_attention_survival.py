"""Invariant 9 for methods that act in attention: casts, copies, adapters, training, compilation and meta devices."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from hf_posext import PatchError, load_pretrained, patch_model, record_of, unpatch_model, write_record
from tests.architectures import TRAINED_LENGTH, tiny_config
from tests.copies import through_pickle, through_torch_save
from tests.dynamic import CACHES, assert_close, cache_name, has_cache, in_pieces, steps, text, whole
from tests.in_attention import (
    FEW,
    KINDS,
    auto_class,
    loaded_in,
    make,
    named,
    patch,
    patched_model,
    shared_model,
    shared_unpatched,
    text_for,
)
from tests.snapshots import snapshot


@pytest.mark.parametrize(("row", "kind"), FEW)
def test_copies_are_patched_and_go_their_own_way(row: str, kind: str) -> None:
    model, tokens = patched_model(row, kind), text_for(row, kind)
    expected, short = whole(model, tokens), tokens[:, :TRAINED_LENGTH]
    copies = [duplicate(model) for duplicate in (copy.deepcopy, through_pickle, through_torch_save)]
    unpatch_model(model)
    assert torch.equal(whole(model, short), whole(shared_unpatched(row), short))
    for copied in copies:
        assert torch.equal(whole(copied, tokens), expected)
        assert torch.equal(whole(unpatch_model(copied), short), whole(shared_unpatched(row), short))


# a window leaves frequencies to the model, which rounds them as ever
CAST = [case for case in FEW if "window" not in case.values[1]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("row", "kind"), CAST)
def test_a_cast_rounds_nothing_of_a_patch(row: str, kind: str, dtype: torch.dtype) -> None:
    changes = {"layers": "all"} if row in ("gemma3", "modernbert") else {}  # an unpatched layer is rounded as ever
    cast = patched_model(row, kind, **changes).to(dtype)
    loaded = patch(loaded_in(row, dtype), kind, **changes)
    found = whole(cast, text_for(row, kind))
    assert found.dtype is dtype
    assert torch.isfinite(found).all()
    assert torch.equal(found, whole(loaded, text_for(row, kind)))


@pytest.mark.parametrize(("row", "kind"), FEW)
def test_half_precision_is_near_float32_and_decodes_alike(row: str, kind: str) -> None:
    """The unpatched model shows how far half precision takes a model of random weights from float32."""
    tokens = text_for(row, kind)[:, :TRAINED_LENGTH]
    half = copy.deepcopy(shared_model(row, kind)).bfloat16()
    loss = (whole(half, tokens).float() - whole(shared_model(row, kind), tokens)).abs().mean()
    plain = copy.deepcopy(shared_unpatched(row)).bfloat16()
    ordinary = (whole(plain, tokens).float() - whole(shared_unpatched(row), tokens)).abs().mean()
    assert loss < 3 * ordinary
    if has_cache(half):
        once = in_pieces(half, tokens, steps(20, 32), CACHES["dynamic"](half, 32))
        assert (once - whole(half, tokens)).float().abs().mean() < 3 * ordinary


@pytest.mark.parametrize(("row", "kind"), FEW)
def test_an_adapter_may_come_before_or_after(row: str, kind: str) -> None:
    after, before = wrapped(patched_model(row, kind)), patch(wrapped(make(row)), kind)
    tokens = text_for(row, kind)
    expected = whole(before, tokens)
    assert record_of(after) == record_of(before)
    assert torch.equal(whole(after, tokens), expected)
    assert not torch.allclose(expected, whole(shared_model(row, kind), tokens), atol=0.1)
    short = tokens[:, :TRAINED_LENGTH]
    plain = whole(wrapped(make(row)), short)
    assert torch.equal(whole(unpatch_model(before), short), plain)
    merged = after.merge_and_unload()
    assert_close(whole(merged, tokens), expected, 1e-3)


def wrapped(model: Any) -> Any:
    """The model under an adapter that is not the identity."""
    torch.manual_seed(0)
    targets = ["c_attn"] if "GPT2" in type(model).__name__ else "all-linear"
    config = LoraConfig(r=2, init_lora_weights=False, target_modules=targets, fan_in_fan_out=targets == ["c_attn"])
    return get_peft_model(model, config).eval()


def test_a_saved_adapter_comes_back_with_its_patch(tmp_path: Any) -> None:
    make("llama").save_pretrained(tmp_path / "base")
    model = wrapped(patch(load_pretrained(tmp_path / "base"), "self_extend_uneven"))
    model.save_pretrained(tmp_path / "adapter")
    write_record(model, tmp_path / "adapter")
    assert_close(whole(load_pretrained(tmp_path / "adapter"), text()), whole(model, text()), 1e-5)


@pytest.mark.parametrize(("row", "kind"), FEW)
def test_gradients_are_those_without_checkpointing_and_those_of_eager_attention(row: str, kind: str) -> None:
    model, tokens = patched_model(row, kind).train(), text_for(row, kind, batch=2)
    expected = gradients(model, tokens)
    assert all(torch.isfinite(gradient).all() for gradient in expected.values())
    model.set_attn_implementation("eager")
    assert_same_gradients(gradients(model, tokens), expected)
    model.set_attn_implementation("sdpa")
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    assert_same_gradients(gradients(model, tokens), expected)
    other = text_for(row, kind, batch=2, seed=1)[:, :20]
    loss_of(model, other)
    assert_same_gradients(gradients(model, tokens), expected)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """How well the model says the tokens themselves."""
    model.config.use_cache = False
    return cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), tokens.flatten())


def gradients(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """Gradients of all weights for some tokens."""
    model.zero_grad()
    loss_of(model, tokens).backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Each as far as float32 allows, measured by its largest entry, or a hundredth of the largest of all."""
    assert found.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    for name in expected:  # those of key biases are zero but for rounding
        scale = max(float(expected[name].abs().max()), 1e-2 * largest)
        assert_close(found[name], expected[name], 1e-4 * scale)


@pytest.mark.parametrize("row", ["llama", "modernbert"])
def test_a_backward_pass_after_another_forward_is_that_of_its_own_text(row: str) -> None:
    """Checkpointed layers run again while the model has read another text in between."""
    model = patched_model(row, "self_extend_uneven").train()
    expected = gradients(model, text())
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.zero_grad()
    loss = loss_of(model, text())
    whole(model, text(20, seed=1))
    loss.backward()
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert_same_gradients(found, expected)


@pytest.mark.parametrize(("row", "kind"), FEW)
def test_weight_initialisation_keeps_the_patch(row: str, kind: str) -> None:
    model = patched_model(row, kind)
    expected, tokens = {name: buffer.clone() for name, buffer in model.named_buffers()}, text_for(row, kind)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.init_weights()
    for module in model.modules():
        model._init_weights(module)
    whole(model, tokens)
    changed = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, expected[name])]
    assert [name for name in changed if not name.endswith("original_inv_freq")] == []
    model.load_state_dict(state)
    assert torch.equal(whole(model, tokens), whole(shared_model(row, kind), tokens))


@pytest.mark.parametrize(("row", "kind"), FEW)
def test_a_model_on_meta_is_filled_by_to_empty_and_a_state_dict(row: str, kind: str) -> None:
    model = patched_model(row, kind)
    tokens, state = text_for(row, kind), {name: value.clone() for name, value in model.state_dict().items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = whole(model, tokens)
    model.to("meta")
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    for name, buffer in model.named_buffers():  # what transformers itself fills when it loads
        if "inv_freq" not in name or "window" in kind:
            buffer.copy_(buffers[name])
    assert torch.equal(whole(model, tokens), expected)
    short = tokens[:, :TRAINED_LENGTH]
    assert torch.equal(whole(unpatch_model(model), short), whole(shared_unpatched(row), short))


@pytest.mark.parametrize("kind", ["alibi", "self_extend", "rerope", "window"])
def test_attention_on_meta_is_patched_or_refused_without_a_trace(kind: str) -> None:
    """A model without weights cannot be watched; what cannot be proved is refused, and nothing is left behind."""
    with torch.device("meta"):
        model = auto_class("llama").from_config(tiny_config("llama")).eval()
    before = snapshot(model, 0).classes
    try:
        patch(model, kind)
    except PatchError:
        assert snapshot(model, 0).classes == before
        assert record_of(model) is None
        return
    model.to_empty(device="cpu")
    model.load_state_dict(shared_unpatched("llama").state_dict())
    assert torch.equal(whole(model, text()), whole(shared_model("llama", kind), text()))


@pytest.mark.parametrize("kind", KINDS)
def test_training_mode_changes_nothing_where_nothing_is_dropped(kind: str) -> None:
    model = patched_model("llama", kind)
    expected = whole(model, text())
    assert_close(whole(model.train(), text()), expected)


@pytest.mark.parametrize("kind", ["alibi", "self_extend", "window"])
def test_dropout_of_attention_weights_is_that_of_training_alone(kind: str) -> None:
    config = tiny_config("llama")
    config.attention_dropout = 0.5
    model = auto_class("llama").from_config(config, dtype=torch.float32)
    patch(model, kind)
    torch.manual_seed(0)
    model.train()
    one, two = (whole(model, text()) for _ in range(2))
    assert not torch.allclose(one, two, atol=1e-2)
    model.eval()
    assert torch.equal(whole(model, text()), whole(model, text()))
    mean = torch.stack([whole(model.train(), text()) for _ in range(2)])
    assert torch.isfinite(mean).all()


@pytest.mark.parametrize("kind", ["alibi", "nope"])
def test_a_frozen_table_is_saved_and_loaded_as_any_other(kind: str, tmp_path: Any) -> None:
    model = patch(make("bert").requires_grad_(False), kind)
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, auto_class("bert"))
    assert_close(whole(loaded, text()), whole(model, text()), 1e-5)
    before, after = make("bert").state_dict(), unpatch_model(model).state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_hooks_of_the_patch_are_the_only_ones_that_go() -> None:
    model, seen = make("llama"), []
    model.model.register_forward_pre_hook(lambda module, args: seen.append("mine"))
    patch_model(model, "alibi", 4)
    whole(model, text(8))
    unpatch_model(model)
    whole(model, text(8))
    assert len(seen) >= 2
    assert len(model.model._forward_pre_hooks) == 1
    assert len(model.model._forward_hooks) == 0


@pytest.mark.parametrize("kind", ["alibi", "self_extend"])
def test_embeddings_may_be_given_in_place_of_tokens(kind: str) -> None:
    model, tokens = shared_model("llama", kind), text()
    with torch.no_grad():
        embedded = model.get_input_embeddings()(tokens)
        found = model(inputs_embeds=embedded, use_cache=False).logits
    assert_close(found, whole(model, tokens))


@pytest.mark.parametrize(("row", "kind"), named([("llama", "rerope"), ("gpt_neox", "self_extend"), ("llama", "alibi")]))
def test_autocast_mixes_no_dtypes(row: str, kind: str) -> None:
    """Rotated queries and keys come in float32 beside values in half precision."""
    model, tokens = patched_model(row, kind), text_for(row, kind)
    expected = whole(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(input_ids=tokens, use_cache=False).logits
        found.float().square().mean().backward()
    assert (found.float() - expected).abs().mean() < 0.1 * expected.abs().mean()


@pytest.mark.parametrize("kind", ["self_extend_dynamic", "rerope"])
def test_one_cache_can_be_read_with_and_without_inference_mode(kind: str) -> None:
    model, tokens = patched_model("llama", kind), text_for("llama", kind)
    expected, cache = whole(model, tokens), DynamicCache()
    found = []
    for place, mode in ((slice(0, 30), torch.no_grad), (slice(30, 31), torch.no_grad)):
        with mode():
            found.append(model(input_ids=tokens[:, place], **{cache_name(model): cache}, use_cache=True).logits)
    for place in range(31, tokens.shape[1]):
        mode = torch.no_grad if place == tokens.shape[1] - 1 else torch.inference_mode
        with mode():
            step = model(input_ids=tokens[:, place : place + 1], **{cache_name(model): cache}, use_cache=True).logits
            found.append(step.clone())
    assert_close(torch.cat(found, 1), expected)
