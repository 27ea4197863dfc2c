"""The tiny models of the tests are what they are taken for: small, of every kind of layer, sensitive to position."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from tests import sweep
from tests.architectures import ARCHITECTURES, Architecture, tiny_inputs, tiny_model
from tests.shrink import sections, shrunken

foreign_advice = pytest.mark.transformers_logs("a default configuration of an encoder is built with a causal head")


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.id)
@torch.no_grad()
def test_row_is_sensitive_to_position(row: Architecture) -> None:
    model, inputs = tiny_model(row.id), tiny_inputs()
    logits = model(**inputs).logits
    if row.takes_position_ids:
        positions = torch.arange(16)[None].expand(2, -1)
        torch.testing.assert_close(model(**inputs, position_ids=positions).logits, logits)
        moved = model(**inputs, position_ids=2 * positions).logits
    else:
        moved = model(input_ids=inputs["input_ids"].flip(1)).logits.flip(1)
    assert (moved - logits).abs().max() > 0.02 * logits.std()


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.id)
def test_row_is_tiny(row: Architecture) -> None:
    assert tiny_model(row.id).num_parameters() < 150_000


def test_same_seed_gives_the_same_weights() -> None:
    one, other = tiny_model("llama", seed=3).state_dict(), tiny_model("llama", seed=3).state_dict()
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next", "deepseek_v3", "lfm2", "smollm3"])
def test_each_kind_of_layer_survives_shrinking(name: str) -> None:
    default = CONFIG_MAPPING[name]()
    lists = [key for key in ("layer_types", "mlp_layer_types", "no_rope_layers") if getattr(default, key, None)]
    tiny = shrunken(default)
    assert [set(getattr(tiny, key)) for key in lists] == [set(getattr(default, key)) for key in lists]


@pytest.mark.parametrize(
    ("old", "new"), [([16, 24, 24], [2, 3, 3]), ([22, 22, 20], [3, 3, 2]), ([11, 11, 10], [3, 3, 2]), ([1], [8])]
)
def test_position_axes_share_the_channels_as_before(old: list[int], new: list[int]) -> None:
    assert sections(old, 8) == new


def test_a_composite_is_built_with_its_tower_and_rotates_in_its_text_part() -> None:
    model = sweep.build("qwen3_vl")
    assert any("visual" in name for name, _ in model.named_modules())
    assert list(sweep.rotary_modules(model)) == ["model.language_model.rotary_emb"]


@foreign_advice
@pytest.mark.parametrize("name", ["llama", "esm", "roformer", "codegen"])
def test_each_form_of_rotary_module_is_seen(name: str) -> None:
    assert sweep.rotary_modules(sweep.build(name))


@foreign_advice
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "bloom", "marian"])
def test_other_encodings_are_not_taken_for_rotary(name: str) -> None:
    assert not sweep.rotary_modules(sweep.build(name))
