"""Adapters, edited checkpoints, and configs for readers of another generation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from hf_posext import (
    PatchError,
    export_config,
    inspect_model,
    load_pretrained,
    patch_model,
    record_of,
    unpatch_model,
    write_record,
)
from tests.architectures import tiny_model
from tests.methods import METHOD, patch_row
from tests.snapshots import differences, logits_of, snapshot


def adapted(base: Path, method: str | None, folder: Path) -> Any:
    """A model with an adapter that is not the identity, its adapter saved with the record beside it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    if method is not None:
        patch_row(model, "llama", method)
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"])).eval()
    model.save_pretrained(folder)
    if method is not None:
        write_record(model, folder)
    return model


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """An unpatched checkpoint."""
    tiny_model("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("method", list(METHOD))
def test_an_adapter_of_a_patched_model_loads_with_its_patch(base: Path, method: str, tmp_path: Path) -> None:
    model = adapted(base, method, tmp_path / "adapter")
    loaded = load_pretrained(tmp_path / "adapter").eval()
    assert isinstance(loaded, PeftModel)
    assert record_of(loaded) == record_of(model)
    assert torch.equal(logits_of(loaded, 48), logits_of(model, 48))


def test_an_adapter_without_a_record_loads_without_a_patch(base: Path, tmp_path: Path) -> None:
    model = adapted(base, None, tmp_path / "adapter")
    loaded = load_pretrained(tmp_path / "adapter").eval()
    assert record_of(loaded) is None
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_a_loaded_adapter_can_be_unpatched(base: Path, tmp_path: Path) -> None:
    adapted(base, "yarn", tmp_path / "adapter")
    plain = adapted(base, None, tmp_path / "plain")
    assert torch.equal(logits_of(unpatch_model(load_pretrained(tmp_path / "adapter").eval())), logits_of(plain))


def test_a_base_that_is_saved_with_the_same_patch_is_not_patched_twice(tmp_path: Path) -> None:
    patch_model(tiny_model("llama"), "pi", 2).save_pretrained(tmp_path / "base")
    model = load_pretrained(tmp_path / "base")
    model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"])).eval()
    model.save_pretrained(tmp_path / "adapter")
    write_record(model, tmp_path / "adapter")
    loaded = load_pretrained(tmp_path / "adapter").eval()
    assert record_of(loaded).total_factor == 2
    assert torch.equal(logits_of(loaded), logits_of(model))


@pytest.mark.parametrize(("method", "factor"), [("yarn", 2), ("pi", 4)])
def test_a_base_with_another_patch_is_refused_with_both_named(
    base: Path, method: str, factor: float, tmp_path: Path
) -> None:
    adapted(base, "pi", tmp_path / "adapter")
    patch_model(tiny_model("llama"), method, factor).save_pretrained(base)
    with pytest.raises(PatchError, match=rf"trained with pi x2 .* base model has {method} x{factor} .* trained on"):
        load_pretrained(tmp_path / "adapter")


def test_arguments_reach_from_pretrained(base: Path, tmp_path: Path) -> None:
    adapted(base, "yarn", tmp_path / "adapter")
    assert load_pretrained(base, attn_implementation="eager").config._attn_implementation == "eager"
    assert load_pretrained(tmp_path / "adapter", dtype=torch.bfloat16).get_base_model().dtype is torch.bfloat16


def test_a_path_may_be_text(base: Path) -> None:
    assert torch.equal(logits_of(load_pretrained(str(base))), logits_of(tiny_model("llama")))


def edit(folder: Path, **changes: Any) -> None:
    """Changes keys of the rope block of a saved config."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] |= changes
    path.write_text(json.dumps(config))


def test_a_config_that_was_edited_against_its_record_is_refused(tmp_path: Path) -> None:
    patch_model(tiny_model("llama"), "pi", 2).save_pretrained(tmp_path)
    edit(tmp_path, factor=4.0)
    with pytest.raises(PatchError, match=r"model\.rotary_emb was loaded with frequencies .*\(pi x2 .*was edited"):
        load_pretrained(tmp_path)


def test_a_patch_that_plain_transformers_cannot_load_is_reported_and_put_in_force(tmp_path: Path) -> None:
    model = patch_row(tiny_model("gptj"), "gptj", "pi")
    model.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    report = inspect_model(plain)
    assert (report.in_force, report.usable_length, report.sites[0].is_patched) == (False, 32, False)
    assert "RECORDED BUT NOT IN FORCE" in str(report)
    assert any("load_pretrained" in note for note in report.notes)
    loaded = load_pretrained(tmp_path).eval()
    assert inspect_model(loaded).in_force is True
    assert torch.equal(logits_of(loaded, 48), logits_of(model, 48))


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "qwen2_vl", "llama_yarn"])
def test_export_changes_nothing_of_the_model(architecture: str) -> None:
    model = patch_row(tiny_model(architecture), architecture, "yarn")
    before = snapshot(model)
    export_config(model, layout="v4")
    export_config(model)
    assert differences(before, snapshot(model)) == []


def v4_frequencies(config: dict[str, Any]) -> torch.Tensor:
    """Frequencies as a reader of transformers 4 builds them from a JSON, for the types that need one line."""
    width = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
    theta = config.get("rope_theta", 10_000.0)
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    scaling = config.get("rope_scaling") or {"type": "default"}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "longrope":
        return frequencies / torch.tensor(scaling["long_factor"], dtype=torch.float64)
    return frequencies / {"default": 1.0, "linear": scaling.get("factor")}[kind]


@pytest.mark.parametrize("method", ["pi", "ntk", "abf", "longrope"])
def test_a_reader_of_the_old_layout_builds_the_frequencies_of_the_patch(method: str, tmp_path: Path) -> None:
    model = patch_row(tiny_model("llama"), "llama", method)
    export_config(model, layout="v4").save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    found = v4_frequencies(written)
    torch.testing.assert_close(found, model.model.rotary_emb.inv_freq.double(), rtol=1e-6, atol=0)
    assert written["max_position_embeddings"] == 64


@pytest.mark.parametrize("method", ["yarn", "llama3", "ntk_by_parts", "longrope"])
def test_both_layouts_say_the_same(method: str, tmp_path: Path) -> None:
    model = patch_row(tiny_model("llama"), "llama", method)
    export_config(model, layout="v4").save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    block = dict(written["rope_parameters"])
    assert written["rope_theta"] == block.pop("rope_theta") == 10_000.0
    assert written["rope_scaling"] == {"type": block["rope_type"], **block}
    assert written["rope_scaling"]["original_max_position_embeddings"] == 32


@pytest.mark.parametrize("method", list(METHOD))
def test_transformers_5_reads_the_file_of_both_layouts(method: str, tmp_path: Path) -> None:
    model = patch_row(tiny_model("llama"), "llama", method)
    model.save_pretrained(tmp_path)
    export_config(model, layout="v4").save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = logits_of(model, 64)
    assert (logits_of(plain, 64) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(logits_of(unpatch_model(plain)), logits_of(unpatch_model(model)))


def test_partial_rotation_is_said_in_both_layouts() -> None:
    config = export_config(patch_row(tiny_model("gpt_neox"), "gpt_neox", "pi"), layout="v4").to_dict()
    assert (config["partial_rotary_factor"], config["rope_parameters"]["partial_rotary_factor"]) == (0.25, 0.25)
    assert "partial_rotary_factor" not in config["rope_scaling"]


def test_an_unpatched_model_can_be_exported() -> None:
    config = export_config(tiny_model("llama"), layout="v4").to_dict()
    assert (config["rope_theta"], config["rope_scaling"], "posext" in config) == (10_000.0, None, False)


def test_the_new_layout_is_the_config_itself() -> None:
    model = patch_model(tiny_model("llama"), "yarn", 2)
    config = export_config(model)
    assert config is not model.config
    assert config.to_dict() == model.config.to_dict()


def test_an_unknown_layout_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"Unknown value of `layout`: 'v3'.* Allowed: `v4`, `v5`"):
        export_config(tiny_model("llama"), layout="v3")


def test_the_old_layout_has_no_words_for_layer_types() -> None:
    with pytest.raises(ValueError, match="for each layer type; transformers 4 has no layout for that"):
        export_config(patch_model(tiny_model("gemma3"), "pi", 2), layout="v4")


def test_a_patch_without_words_is_refused_with_the_way_out() -> None:
    model = patch_model(tiny_model("llama"), "yarn", 2, temperature="logits")
    with pytest.raises(PatchError, match=r"yarn x2 .* cannot be said in a config.*`hf_posext.load_pretrained`"):
        export_config(model)


def test_something_else_than_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`model` must be .* got Linear"):
        export_config(torch.nn.Linear(2, 2))


def test_a_temperature_on_the_logits_is_put_back_by_load_pretrained(tmp_path: Path) -> None:
    model = patch_model(tiny_model("gpt_neox"), "yarn", 4, temperature="logits")
    model.save_pretrained(tmp_path)
    assert record_of(model).native is None
    assert torch.equal(logits_of(load_pretrained(tmp_path).eval(), 64), logits_of(model, 64))


def test_a_composition_is_put_back_by_load_pretrained(tmp_path: Path) -> None:
    model = patch_model(patch_model(tiny_model("llama"), "pi", 2), "yarn", 2, compose=True)
    expected = logits_of(model, 64)
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path).eval()
    assert [step.method for step in record_of(loaded).steps()] == ["pi", "yarn"]
    assert (logits_of(loaded, 64) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(logits_of(unpatch_model(loaded)), logits_of(tiny_model("llama")))
