"""Nothing is wrong with healthy models of every mechanism, and what could not be checked is said."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_posext import patch_model, unpatch_model
from hf_posext.diagnosis import CHECKS, diagnose
from tests import special_models
from tests.architectures import tiny_config
from tests.diagnosis.healthy import MODELS, PATCHES
from tests.snapshots import differences, logits_of, snapshot

NAMES = [check.__name__ for check in CHECKS]
RAN = {
    "llama": {
        "config", "collisions", "angles", "turns", "channels", "rotation", "order", "ablation", "position_ids",
        "cache", "padding",
    },
    "gpt2": {"rows", "magnitudes", "collisions", "order", "ablation", "position_ids", "cache"},
    "bert": {"rows", "magnitudes", "collisions", "order", "ablation", "position_ids"},
    "bloom": {"collisions", "order", "ablation", "cache", "padding"},
    "t5": {"order", "ablation", "cache", "padding"},
    "gptj": {"collisions", "turns", "rotation", "order", "ablation", "position_ids", "cache", "padding"},
    "llama_yarn_dynamic": {
        "patch", "collisions", "angles", "turns", "rotation", "order", "ablation", "position_ids", "cache", "padding",
    },
    "llama_alibi": {"patch", "order", "ablation", "cache", "padding"},
    "bart": {"rows", "magnitudes", "collisions", "order", "ablation", "cache"},
}  # fmt: skip
"""Model -> checks that run on it and find all well."""


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_wrong_with_a_healthy_model(name: str) -> None:
    report = diagnose(MODELS[name]())
    assert [finding.name for finding in report.findings] == NAMES
    assert report.wrong == [], str(report)
    assert [finding for finding in report.findings if finding.action == "Report the model."] == []
    assert all(finding.meaning for finding in report.findings)


@pytest.mark.parametrize("name", RAN)
def test_the_checks_run_on_a_model_for_which_they_have_a_meaning(name: str) -> None:
    report = diagnose(MODELS[name]())
    assert {finding.name for finding in report.findings if finding.status == "ok"} == RAN[name]


@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "llama_longrope", "gptj", "roformer", "bert", "opt", "bloom", "t5", "llama_pi",
             "gemma3_yarn", "llama_yarn_dynamic", "llama_self_extend", "llama_alibi", "bert_alibi", "llama_nope",
             "gptj_pi", "gpt2_tile", "bloom_pi"]
)  # fmt: skip
def test_the_model_is_as_before_to_the_last_bit(name: str) -> None:
    model = MODELS[name]()
    torch.rand(3)
    config, state, attention = model.config, torch.get_rng_state(), model.config._attn_implementation
    before = snapshot(model, 0)
    diagnose(model)
    assert differences(before, snapshot(model, 0)) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config is config
    assert config._attn_implementation == attention


def test_a_patch_of_some_layers_holds_no_more_than_before() -> None:
    model = MODELS["gemma3_yarn"]()
    holder = vars(model.model.rotary_emb)["_posext"]
    held = {name: value.clone() for name, value in holder.inv_freq.items()}
    diagnose(model)
    assert list(held) == list(holder.inv_freq) == ["full_attention_inv_freq"]
    assert torch.equal(held["full_attention_inv_freq"], holder.inv_freq["full_attention_inv_freq"])


@pytest.mark.parametrize("name", ["llama_pi", "gemma3_yarn", "llama_yarn_dynamic", "gptj_pi", "llama_self_extend"])
def test_a_patch_comes_off_after_a_diagnosis_as_without_one(name: str) -> None:
    plain, model = MODELS[PATCHES[name][0]](), MODELS[name]()
    diagnose(model)
    assert torch.equal(logits_of(unpatch_model(model)), logits_of(plain))


def test_flags_of_training_and_dropout_are_as_before() -> None:
    model = special_models.gpt2().train()  # with the dropout of its class
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    assert diagnose(model).is_healthy
    assert [module.training for module in model.modules()] == modes


def test_a_second_diagnosis_says_the_same() -> None:
    model = MODELS["llama_yarn_dynamic"]()
    assert diagnose(model).to_dict() == diagnose(model).to_dict()


def test_a_model_in_an_adapter_is_diagnosed_with_it() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(patch_model(MODELS["llama"](), "yarn", 2), LoraConfig(target_modules=["q_proj", "v_proj"]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = diagnose(model)
    assert report.wrong == [], str(report)
    assert (report["patch"].status, report["rotation"].status, report["cache"].status) == ("ok", "ok", "ok")
    assert [name for name, value in model.state_dict().items() if not torch.equal(before[name], value)] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_loaded_in_16_bits_is_healthy(dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=dtype).eval()
    report = diagnose(model)
    assert report.wrong == [], str(report)
    assert report["order"].status == "ok"


@pytest.mark.transformers_logs("says that faster kernels are not installed")
def test_a_model_without_positions_is_not_judged() -> None:
    report = diagnose(special_models.mamba())
    assert report.wrong == []
    assert report["order"].status == "not applicable"
    assert "No position encoding" in report["order"].meaning


def test_a_model_without_weights_is_not_judged() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    report = diagnose(model)
    assert {finding.status for finding in report.findings} == {"not applicable"}, str(report)


def test_what_is_no_transformers_model_is_refused() -> None:
    with pytest.raises(TypeError, match="transformers model"):
        diagnose(nn.Linear(2, 2))


def test_a_check_that_fails_says_so_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(subject: Any) -> Any:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("hf_posext.diagnosis.CHECKS", (broken, *CHECKS))
    report = diagnose(MODELS["llama"]())
    assert report["broken"].status == "not applicable"
    assert "ZeroDivisionError: by zero" in report["broken"].meaning
    assert report["order"].status == "ok"


def test_a_patched_checkpoint_that_plain_transformers_loaded_is_healthy(tmp_path: Path) -> None:
    MODELS["llama_yarn_patched"]().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    report = diagnose(model)
    assert report.wrong == [], str(report)
    assert {report[name].status for name in ("patch", "config", "rotation", "ablation", "cache")} == {"ok"}
    assert report.usable_length == 64
