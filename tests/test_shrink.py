"""The tiny models of the tests are what they are taken for: small, of every kind of layer, sensitive to position."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from tests import sweep
from tests.architectures import ARCHITECTURES, Architecture, tiny_inputs, tiny_model
from tests.position_encodings import bias_builders, encodings, rotary_modules, with_bias_times
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
    assert list(rotary_modules(model)) == ["model.language_model.rotary_emb"]


def test_text_part_without_a_list_is_found_beside_its_configuration() -> None:
    assert type(sweep.build("blip")).__name__ == "BlipTextLMHeadModel"


@foreign_advice
@pytest.mark.parametrize("name", ["llama", "esm", "roformer", "codegen"])
def test_each_form_of_rotary_module_is_seen(name: str) -> None:
    model = sweep.build(name)
    assert rotary_modules(model)
    assert encodings(model).mechanisms == {"rotary"}


TABLES = {
    "bert": {"bert.embeddings.position_embeddings": "learned"},
    "gpt2": {"transformer.wpe": "learned"},
    "opt": {"model.decoder.embed_positions": "learned"},
    "mpnet": {"mpnet.embeddings.position_embeddings": "learned"},
    "marian": {f"model.{side}.embed_positions": "sinusoidal" for side in ("encoder", "decoder")},
    "ctrl": {"transformer": "sinusoidal"},
    "xlm, sinusoidal": {"transformer.position_embeddings": "sinusoidal"},
    "t5": {},
    "bloom": {},
    "jamba": {},
}
BIASES = {"mpnet": "relative_bias", "t5": "relative_bias", "bloom": "alibi"}


@foreign_advice
@pytest.mark.parametrize("name", TABLES)
def test_each_other_encoding_is_seen(name: str) -> None:
    seen = encodings(sweep.build(name))
    assert seen.tables == TABLES[name]
    assert seen.mechanisms == {*TABLES[name].values(), *([BIASES[name]] if name in BIASES else [])}


def test_a_table_of_which_other_rows_are_taken_is_told_apart() -> None:
    seen = encodings(sweep.build("layoutlm"))
    assert list(seen.tables) == ["layoutlm.embeddings.position_embeddings"]
    assert {"layoutlm.embeddings.x_position_embeddings", "layoutlm.embeddings.word_embeddings"} <= seen.others


def test_a_table_of_as_many_rows_as_tokens_may_be_no_table_of_positions() -> None:
    """Sizes say nothing: only which rows a text takes does."""
    model = sweep.build("bert")
    types = torch.nn.Embedding(32, 64)
    model.bert.embeddings.token_type_embeddings = types
    assert "bert.embeddings.token_type_embeddings" in encodings(model).others


@foreign_advice
@pytest.mark.parametrize("name", ["bloom", "falcon, alibi", "mpt"])
def test_a_steeper_bias_is_a_steeper_bias(name: str) -> None:
    """Halving what is doubled gives the model as it is, to the last bit; doubling alone does not."""
    model = sweep.build(name)
    own = with_bias_times(model, 1)
    assert not torch.equal(with_bias_times(model, 2), own)
    with bias_builders(model, lambda bias: bias / 2):
        torch.testing.assert_close(with_bias_times(model, 2), own, rtol=0, atol=0)
    torch.testing.assert_close(with_bias_times(model, 1), own, rtol=0, atol=0)
