"""A fixed scale equals a fixed factor: in `generate` of a frozen model, and in a block for one length."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_posext
from hf_posext import PatchError, fixed_length, load_pretrained, patch_model, record_of, scale_for, unpatch_model
from tests.architectures import TRAINED_LENGTH, tiny_inputs, tiny_model
from tests.dynamic import REFUSED, cache_name

FACTOR, PROMPT, NEW = 4.0, 24, 40  # prompt and new tokens are twice the trained length
GENERATE: dict[str, Any] = {
    "max_new_tokens": NEW,
    "min_new_tokens": NEW,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "yarn", {}),
    ("llama", "yarn", {"temperature": "logits"}),
    ("gpt_neox", "pi", {}),
    ("gemma3", "ntk", {}),
    ("qwen2_vl", "yarn", {}),
    *(() if "gptj" in REFUSED else [("gptj", "pi", {})]),
]


def frozen(row: str, method: str, **options: Any) -> Any:
    return patch_model(tiny_model(row), method, FACTOR, dynamic=True, scale="frozen", **options)


def generated(model: Any, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits [B, new, V] of greedy generation."""
    mask = torch.ones_like(tokens) if mask is None else mask
    return torch.stack(model.generate(tokens, attention_mask=mask, **GENERATE).logits, dim=1)


@pytest.mark.parametrize(("row", "method", "options"), CASES)
def test_generation_at_a_frozen_scale_is_that_of_a_fixed_factor(row: str, method: str, options: dict[str, Any]) -> None:
    tokens = tiny_inputs(PROMPT)["input_ids"]
    fixed = patch_model(tiny_model(row), method, (PROMPT + NEW) / TRAINED_LENGTH, **options)
    torch.testing.assert_close(
        generated(frozen(row, method, **options), tokens), generated(fixed, tokens), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(("row", "method", "options"), CASES[:3])
def test_rows_of_unequal_length_have_scales_of_their_own(row: str, method: str, options: dict[str, Any]) -> None:
    model, tokens = frozen(row, method, **options), tiny_inputs(PROMPT)["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, :12] = 0
    both = generated(model, tokens, mask)
    short, long = generated(model, tokens[:1, 12:]), generated(model, tokens[1:])
    torch.testing.assert_close(both, torch.cat((short, long)), atol=1e-4, rtol=0)


def test_beams_and_rows_of_unequal_length() -> None:
    model, tokens = frozen("llama", "yarn"), tiny_inputs(PROMPT)["input_ids"]
    mask = torch.ones_like(tokens)
    mask[0, :12] = 0
    beams: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    both = model.generate(tokens, attention_mask=mask, **beams)
    alone = model.generate(tokens[:1, 12:], attention_mask=mask[:1, 12:], **beams)
    assert both[0, PROMPT:].tolist() == alone[0, 12:].tolist()


def test_nothing_is_left_of_a_frozen_generation() -> None:
    model, tokens = frozen("llama", "yarn"), tiny_inputs(60)["input_ids"]
    before = model(tokens).logits
    generated(model, tokens[:, :PROMPT])
    assert torch.equal(model(tokens).logits, before)
    unpatch_model(model)
    assert "generate" not in model.__dict__
    assert torch.equal(model(tokens).logits, tiny_model("llama")(tokens).logits)


def test_a_cache_belongs_to_its_scale() -> None:
    model, tokens = frozen("llama", "yarn"), tiny_inputs(PROMPT)["input_ids"]
    cache = model.generate(tokens, attention_mask=torch.ones_like(tokens), **GENERATE)[cache_name(model)]
    with pytest.raises(ValueError, match=r"filled at scale 2 and would be read at live scales"):
        model(tokens[:, :1], **{cache_name(model): cache})


def test_a_loop_of_ones_own_within_a_fixed_length() -> None:
    model = patch_model(tiny_model("llama"), "yarn", FACTOR, dynamic=True)
    fixed = patch_model(tiny_model("llama"), "yarn", 1.5)
    tokens = tiny_inputs(48)["input_ids"]
    with torch.no_grad(), fixed_length(model, 48):
        output = model(tokens[:, :20], use_cache=True)
        for place in range(20, 48):
            held = {cache_name(model): output[cache_name(model)]}
            output = model(tokens[:, place : place + 1], **held)
    torch.testing.assert_close(output.logits[:, -1], fixed(tokens).logits[:, -1], atol=1e-4, rtol=0)


def test_a_fixed_length_ends_with_its_block() -> None:
    model, tokens = patch_model(tiny_model("llama"), "pi", FACTOR, dynamic=True), tiny_inputs(20)["input_ids"]
    with pytest.raises(RuntimeError, match="stop"), fixed_length(model, 100):
        raise RuntimeError("stop")
    assert torch.equal(model(tokens).logits, tiny_model("llama")(tokens).logits)
    with fixed_length(model, 100), pytest.raises(PatchError, match="fixed already"), fixed_length(model, 50):
        pass
    with pytest.raises(ValueError, match="at least 1 token, got 0"), fixed_length(model, 0):
        pass
    with pytest.raises(PatchError, match="dynamic=True"), fixed_length(tiny_model("llama"), 100):
        pass


def test_scale_for_a_length() -> None:
    model = patch_model(tiny_model("llama"), "pi", FACTOR, dynamic=True)
    scales = {1: 1.0, 32: 1.0, 33: 33 / 32, 48: 1.5, 64: 2.0, 65: 66 / 32, 128: 4.0, 1000: 4.0}
    assert {length: scale_for(model, length) for length in scales} == scales
    assert scale_for(patch_model(tiny_model("llama"), "pi", 3), 10) == 3.0
    with pytest.raises(PatchError, match="not patched"):
        scale_for(tiny_model("llama"), 10)
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        scale_for(model, 0)


def test_a_frozen_model_comes_back_frozen(tmp_path: Path) -> None:
    model, tokens = frozen("llama", "yarn"), tiny_inputs(PROMPT)["input_ids"]
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path)
    record = record_of(loaded)
    assert record is not None
    assert (record.dynamic, record.scale) == (True, "frozen")
    assert torch.equal(generated(loaded, tokens), generated(model, tokens))


def test_a_scale_needs_a_factor_that_follows_the_length() -> None:
    with pytest.raises(ValueError, match="`scale`='frozen' has a meaning only"):
        patch_model(tiny_model("llama"), "pi", 2, scale="frozen")
    with pytest.raises(ValueError, match="value of `scale`"):
        patch_model(tiny_model("llama"), "pi", 2, dynamic=True, scale="cold")
    with pytest.raises(TypeError, match="`dynamic` must be True or False, got 1"):
        patch_model(tiny_model("llama"), "pi", 2, dynamic=1)  # type: ignore[arg-type]


def test_nothing_is_composed_on_a_factor_that_follows_the_length() -> None:
    model = patch_model(tiny_model("llama"), "pi", 2, dynamic=True)
    with pytest.raises(PatchError, match="follows the length"):
        patch_model(model, "pi", 2, compose=True)
    assert hf_posext.inspect_model(model).record is not None
