"""A record is plain data that says all that is needed to redo a patch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posext import PatchError, PatchRecord, patch_model, record_of, unpatch_model, write_record
from hf_posext.records import FILE_NAME, read_record
from tests.architectures import tiny_model
from tests.methods import METHOD, options_for, pairs, patch_row
from tests.snapshots import logits_of


@pytest.mark.parametrize(("architecture", "method"), pairs(("llama", "gemma3", "gptj", "deepseek_v3", "llama_yarn")))
def test_a_record_says_all_that_is_needed_to_redo_the_patch(architecture: str, method: str) -> None:
    model = patch_row(tiny_model(architecture), architecture, method, 3)
    said = json.loads(json.dumps(record_of(model).to_dict()))
    again = patch_model(
        tiny_model(architecture),
        said["method"],
        said["factor"],
        original_max_position_embeddings=said["trained_length"],
        layers=said["layers"],
        **said["options"],
    )
    assert record_of(again).to_dict() == said
    assert torch.equal(logits_of(again), logits_of(model))


@pytest.mark.parametrize("method", list(METHOD))
def test_the_fields_are_what_was_asked(method: str) -> None:
    record = record_of(patch_row(tiny_model("gemma3"), "gemma3", method, 4, layers="all"))
    assert (record.method, record.factor, record.total_factor) == (method, 4, 4)
    assert (record.trained_length, record.target_length, record.original_max_position_embeddings) == (32, 128, 32)
    assert (record.layers, record.options) == ("all", options_for("gemma3", method))
    assert record.sites == ["model.rotary_emb[full_attention]", "model.rotary_emb[sliding_attention]"]
    assert (record.schema, bool(record.version), record.previous) == (1, True, [])


def test_an_alias_is_recorded_under_the_canonical_name() -> None:
    assert record_of(patch_model(tiny_model("llama"), "linear", 2)).method == "pi"


def test_it_stands_in_the_config_as_plain_json() -> None:
    model = patch_model(tiny_model("llama"), "longrope", 2, long_factor=tuple(range(1, 9)))
    assert json.loads(json.dumps(model.config.posext)) == model.config.posext
    assert json.loads(model.config.to_json_string())["posext"] == record_of(model).to_dict()


def test_it_says_what_the_config_was_before() -> None:
    model = tiny_model("gemma3")
    before = dict(model.config.rope_parameters)
    record = record_of(patch_model(model, "yarn", 2))
    assert record.before[""]["rope_parameters"] == before
    assert record.before[""]["max_position_embeddings"] == 32


def test_an_unpatched_model_has_none() -> None:
    model = tiny_model("llama")
    assert record_of(model) is None
    assert record_of(unpatch_model(patch_model(model, "pi", 2))) is None
    assert record_of(torch.nn.Linear(2, 2)) is None


def test_a_composition_lists_its_steps_oldest_first() -> None:
    model = patch_model(tiny_model("llama"), "pi", 2)
    patch_model(model, "ntk", 2, compose=True)
    patch_model(model, "yarn", 2, compose=True)
    assert [step.method for step in record_of(model).steps()] == ["pi", "ntk", "yarn"]
    assert [step.total_factor for step in record_of(model).steps()] == [2, 4, 8]


def test_a_record_is_not_shared_with_the_model() -> None:
    model = patch_model(tiny_model("llama"), "longrope", 2, long_factor=[1.0] * 8)
    record_of(model).to_dict()["options"]["long_factor"][0] = 99.0
    assert record_of(model).options["long_factor"][0] == 1.0


def test_writing_and_reading_a_file_is_the_identity(tmp_path: Path) -> None:
    model = patch_model(tiny_model("llama"), "yarn", 2, beta_fast="auto", beta_slow=0.5)
    path = write_record(model, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / FILE_NAME
    assert read_record(path.parent) == record_of(model)
    assert [each.name for each in path.parent.iterdir()] == [FILE_NAME]


def test_a_folder_without_a_record_gives_none(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None


def test_an_unpatched_model_has_no_record_to_write(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match=r"not patched, so there is no record to write. Call `patch_model` first"):
        write_record(tiny_model("llama"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def data(**changes: Any) -> dict[str, Any]:
    """A record's data with some fields changed."""
    return {**record_of(patch_model(tiny_model("llama"), "pi", 2)).to_dict(), **changes}


@pytest.mark.parametrize("schema", [2, None, "1"])
def test_another_schema_is_refused_with_its_number(schema: Any) -> None:
    with pytest.raises(PatchError, match=f"has schema {schema!r}, this version reads 1"):
        PatchRecord.from_dict(data(schema=schema))


def test_fields_of_a_later_version_of_the_same_schema_are_passed_over() -> None:
    assert PatchRecord.from_dict(data(colour="blue")) == PatchRecord.from_dict(data())


def test_a_missing_field_is_named() -> None:
    whole = data()
    del whole["factor"]
    with pytest.raises(PatchError, match=r"incomplete .*'factor'.* Patch the model again"):
        PatchRecord.from_dict(whole)


def test_it_describes_itself_in_a_few_words() -> None:
    assert PatchRecord.from_dict(data()).describe() == "pi x2 (32 -> 64 tokens)"
