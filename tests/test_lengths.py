"""The trained length is read right, and all fields that say it are kept in step as whole numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from hf_posext import patch_model, unpatch_model
from hf_posext.lengths import length_fields, original_length, trained_length
from tests import special_models
from tests.architectures import ARCHITECTURES, Architecture, tiny_config, tiny_model
from tests.methods import patch_row

DEEPSEEK_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.id)
def test_trained_length_of_a_row_is_n_times_what_it_is_stretched(row: Architecture) -> None:
    config = tiny_config(row.id)
    assert trained_length(config) == int(row.trained_length * row.native_factor)
    assert original_length(config, trained_length(config)) == row.trained_length


@pytest.mark.parametrize(
    ("length", "expected"),
    [pytest.param(163840, 163840, id="both fields raised"), pytest.param(4096, 163840, id="only the factor says it")],
)
def test_a_checkpoint_may_raise_one_field_only(length: int, expected: int) -> None:
    config = AutoConfig.for_model("llama", max_position_embeddings=length, rope_parameters=dict(DEEPSEEK_YARN))
    assert trained_length(config) == expected
    assert original_length(config, expected) == 4096


@pytest.mark.parametrize(
    ("model_type", "settings", "fields"),
    [
        ("llama", {"max_position_embeddings": 32}, ["max_position_embeddings"]),
        ("gptj", {"n_positions": 32}, ["n_positions"]),
        ("gpt2", {"n_positions": 32}, ["n_positions"]),
        ("mpt", {"max_seq_len": 32}, ["max_seq_len"]),
    ],
)
def test_length_fields_are_known_under_their_names(
    model_type: str, settings: dict[str, Any], fields: list[str]
) -> None:
    config = AutoConfig.for_model(model_type, **settings)
    assert set(fields) <= set(length_fields(config))
    assert trained_length(config) == 32


def test_a_config_without_a_length_has_none() -> None:
    assert trained_length(AutoConfig.for_model("t5")) is None


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.id)
def test_every_length_field_follows_the_patch_as_int(row: Architecture) -> None:
    model = tiny_model(row.id)
    text = model.config.get_text_config()
    fields, target = length_fields(text), int(row.trained_length * row.native_factor * 2)
    before = [getattr(text, name) for name in fields]
    patch_row(model, row.id, "pi")
    text = model.config.get_text_config()
    assert fields
    assert [(getattr(text, name), type(getattr(text, name))) for name in fields] == [(target, int)] * len(fields)
    unpatch_model(model)
    assert [getattr(model.config.get_text_config(), name) for name in fields] == before


def test_aliases_of_a_field_follow() -> None:
    model = patch_model(tiny_model("gptj"), "pi", 3)
    assert (model.config.n_positions, model.config.max_position_embeddings) == (96, 96)


@pytest.mark.parametrize("factor", [1.5, 1.0 + 1 / 32, 3.7, 2 + 1e-12])
def test_a_broken_factor_gives_a_whole_target(factor: float) -> None:
    model = patch_model(tiny_model("llama"), "pi", factor)
    length = model.config.max_position_embeddings
    assert type(length) is int
    assert length <= 32 * factor + 1e-6 < length + 1


def test_copies_of_the_config_in_modules_follow() -> None:
    model = patch_model(tiny_model("gemma3"), "pi", 2)
    found = {module.config.max_position_embeddings for module in model.modules() if hasattr(module, "config")}
    assert found == {64}


@pytest.mark.parametrize("build", [special_models.esm, special_models.codegen], ids=["esm", "codegen"])
def test_special_models_follow(build: Any) -> None:
    model = patch_model(build(), "pi", 2)
    assert {getattr(model.config, name) for name in length_fields(model.config)} == {64}


@pytest.mark.parametrize("given", [32, 10**30], ids=["set", "never set"])
def test_a_tokenizer_is_set_to_the_target_whatever_it_said(given: int) -> None:
    model, tokenizer = tiny_model("llama"), SimpleNamespace(model_max_length=given)
    patch_model(model, "pi", 2, tokenizer=tokenizer)
    assert (tokenizer.model_max_length, type(tokenizer.model_max_length)) == (64, int)
    unpatch_model(model)
    assert tokenizer.model_max_length == given


def test_a_given_length_wins_over_the_config() -> None:
    model = patch_model(tiny_model("llama"), "yarn", 2, original_max_position_embeddings=16)
    assert (model.config.max_position_embeddings, model.config.posext["trained_length"]) == (32, 16)


def test_both_sides_of_an_encoder_decoder_that_also_sees_are_text() -> None:
    from transformers import T5Gemma2Config

    from hf_posext.compat import text_configs

    config = T5Gemma2Config()
    found = {id(part) for part in text_configs(config)}
    assert {id(config.encoder.text_config), id(config.decoder)} <= found
    assert id(config.encoder.vision_config) not in found
