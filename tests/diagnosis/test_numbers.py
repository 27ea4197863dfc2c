"""The numbers behind findings, against closed forms and transformers' own path."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_posext import patch_model
from hf_posext.diagnosis import diagnose
from tests import special_models
from tests.architectures import TRAINED_LENGTH, tiny_model
from tests.diagnosis.faults import FAULTS
from tests.diagnosis.healthy import MODELS

N = TRAINED_LENGTH
SENTENCE = list(range(5, 25))


class Words:
    """A tokenizer that reads the same text in everything."""

    model_max_length = N

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": SENTENCE}


@torch.no_grad()
def test_the_loss_is_that_of_transformers_with_and_without_rotation() -> None:
    model, ids = tiny_model("llama"), torch.tensor([SENTENCE])
    found = diagnose(model, Words())["ablation"].measured
    expected = float(model(input_ids=ids, labels=ids).loss)
    model.model.rotary_emb.inv_freq.zero_()
    without = float(model(input_ids=ids, labels=ids).loss)
    assert found["nll"] == pytest.approx(expected, abs=1e-4)
    assert found["nll_without_position"] == pytest.approx(without, abs=1e-4)
    assert abs(expected - without) > 0.01


def test_an_encoder_has_no_loss_over_the_next_token() -> None:
    assert set(diagnose(MODELS["bert"]())["ablation"].measured) == {"change_of_output"}


def test_layers_without_rotation_are_named() -> None:
    finding = diagnose(special_models.smollm3())["order"]
    assert finding.status == "note"
    assert finding.measured["layers_without"] == [0]


@pytest.mark.parametrize(("name", "layers"), [("llama", 2), ("gemma3", 2), ("bloom", 2), ("t5", 2)])
def test_every_layer_that_reads_distances_hears_its_shuffled_input(name: str, layers: int) -> None:
    moved = diagnose(MODELS[name]())["order"].measured["layer_input_shuffled"]
    assert len(moved) == layers
    assert min(moved) > 0.01


def test_a_table_is_heard_in_the_shuffled_text_and_not_in_the_layers() -> None:
    measured = diagnose(MODELS["bert"]())["order"].measured
    assert measured["input_shuffled"] > 0.01
    assert max(measured["layer_input_shuffled"]) < 1e-4


def test_without_position_the_order_of_tokens_has_no_effect() -> None:
    measured = diagnose(MODELS["llama_nope"]())["order"].measured
    assert measured["input_shuffled"] < 1e-4
    assert max(measured["layer_input_shuffled"]) < 1e-4


def test_the_error_of_a_rounded_angle_is_that_of_its_frequency_times_the_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = MODELS["llama"]()
    theta = 10000.0 ** -(torch.arange(8) / 8.0)
    FAULTS["frequencies in bf16"].plant(model, monkeypatch)
    expected = float((theta.to(torch.bfloat16).double() - theta.double()).abs().max()) * (N - 1)
    assert diagnose(model)["angles"].measured["angle_error_at_target"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("factor", [2, 4])
def test_channels_with_new_angles_are_counted_as_by_the_formula_of_ntk(factor: float) -> None:
    channel = torch.arange(8, dtype=torch.float64)
    before = 10000.0 ** -(channel / 8)
    after = (10000.0 * factor ** (16 / 14)) ** -(channel / 8)
    new = (before * N < 2 * math.pi) & (after * factor * N > before * N * (1 + 1e-6))
    model = patch_model(tiny_model("llama"), "ntk", factor)
    finding = diagnose(model)["channels"]
    assert finding.measured["unseen"] == {"model.rotary_emb": int(new.sum())}
    assert finding.status == ("note" if new.any() else "ok")


def test_magnitudes_are_norms_of_rows() -> None:
    model = MODELS["gpt2"]()
    finding = diagnose(model)["magnitudes"].measured
    table, words = model.transformer.wpe.weight.detach(), model.transformer.wte.weight.detach()
    assert finding["token_norm"] == pytest.approx(float(words.norm(dim=1).mean()), rel=1e-5)
    assert finding["tables"]["transformer.wpe"]["norm"] == pytest.approx(float(table.norm(dim=1).mean()), rel=1e-5)


def test_a_row_that_was_never_trained_is_noted() -> None:
    model = MODELS["gpt2"]()
    with torch.no_grad():
        model.transformer.wpe.weight[-3:] = 0
    finding = diagnose(model)["magnitudes"]
    assert finding.status == "note"
    assert finding.measured["tables"]["transformer.wpe"]["zero_rows"] == 3


@pytest.mark.parametrize(("longest", "collides"), [(256, False), (258, True)])
def test_a_bias_in_bf16_collides_beyond_256(longest: int, collides: bool) -> None:
    """bf16 has eight significant bits: 256 is the last whole number whose neighbour is another one."""
    model = MODELS["bloom"]()
    model.config.seq_length = longest
    assert (diagnose(model.to(torch.bfloat16))["collisions"].status == "wrong") is collides
    assert (torch.tensor(longest - 1.0).bfloat16() == torch.tensor(longest - 2.0).bfloat16()) == collides


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("gpt2", {"transformer.wpe": N}),
        ("opt", {"model.decoder.embed_positions": N + 2}),
        ("bart", {"model.encoder.embed_positions": N + 2, "model.decoder.embed_positions": N + 2}),
        ("gpt2_tile", {"transformer.wpe": 2 * N}),
    ],
)
def test_tables_that_a_text_takes_rows_of_are_counted(name: str, rows: dict[str, int]) -> None:
    assert diagnose(MODELS[name]())["rows"].measured["rows"] == rows


@pytest.mark.parametrize("name", ["gpt2", "bert", "bart"])
def test_padding_that_takes_positions_by_design_is_noted(name: str) -> None:
    assert diagnose(MODELS[name]())["padding"].status == "note"


@pytest.mark.parametrize("name", ["llama_dynamic", "llama_longrope"])
def test_a_type_that_turns_with_the_length_is_noted_with_a_cache(name: str) -> None:
    finding = diagnose(MODELS[name]())["cache"]
    assert finding.status == "note"
    assert "dynamic=True" in finding.action


@pytest.mark.parametrize(
    ("limit", "status"), [(N - 1, "wrong"), (N, "ok"), (N + 1, "note"), (10**30, "ok"), (None, "not applicable")]
)
def test_a_tokenizer_is_judged_by_its_limit(limit: int | None, status: str) -> None:
    assert diagnose(tiny_model("llama"), SimpleNamespace(model_max_length=limit))["tokenizer"].status == status


def test_a_patch_that_has_no_words_is_not_compared_with_the_config() -> None:
    finding = diagnose(MODELS["llama_yarn_dynamic"]())["config"]
    assert (finding.status, "no words" in finding.meaning) == ("not applicable", True)


def test_the_report_is_a_table_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]()
    FAULTS["not rotated"].plant(model, monkeypatch)
    report = diagnose(model)
    text = str(report)
    assert "LlamaForCausalLM, 32 tokens: 4 wrong" in text
    assert [name for name in ("order", "ablation", "rotation", "padding") if name not in text] == []
    data = json.loads(report.to_json(tmp_path / "report.json"))
    assert data == json.loads((tmp_path / "report.json").read_text())
    assert data["is_healthy"] is False
    assert set(data) == {"model", "trained_length", "usable_length", "record", "findings", "is_healthy"}


def test_a_check_that_does_not_exist_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="no_such_check"):
        diagnose(tiny_model("llama"))["no_such_check"]
