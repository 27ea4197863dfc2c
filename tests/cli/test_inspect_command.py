"""`posext inspect` and `posext methods`."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

import hf_posext
from hf_posext.demo import load_demo
from tests.architectures import tiny_model

POSITION_KEYS = {
    "model",
    "trained_length",
    "usable_length",
    "record",
    "in_force",
    "sites",
    "left_alone",
    "notes",
}


@pytest.fixture
def learned(tmp_path: Path) -> Path:
    """A saved model with a table of 32 positions."""
    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "learned")
    return tmp_path / "learned"


def test_inspect_gives_the_report_as_json(posext: Any) -> None:
    outcome = posext("inspect", "demo:llama", "--json")
    assert outcome.code == 0
    assert set(outcome.data) == POSITION_KEYS
    assert outcome.data["trained_length"] == 256
    assert [site["site"] for site in outcome.data["sites"]] == ["model.rotary_emb"]


def test_inspect_shows_the_table_of_a_learned_model(posext: Any, learned: Path) -> None:
    out = posext("inspect", learned).out
    assert "trained for 32 tokens, not patched" in out
    assert [word for word in ("learned", "transformer.wpe", "32 rows") if word not in out] == []
    (site,) = posext("inspect", learned, "--json").data["sites"]
    assert (site["mechanism"], site["site"], site["rows"]) == ("learned", "transformer.wpe", 32)


def test_inspect_shows_a_table_that_is_switched_off(posext: Any, learned: Path, tmp_path: Path) -> None:
    words = ["--method", "alibi", "--target-length", "128", "--out", tmp_path / "out"]
    assert posext("patch", learned, *words).code == 0
    out = posext("inspect", tmp_path / "out").out
    assert "trained for 32, reads 128 tokens by alibi x4" in out
    assert "off" in out
    (site,) = posext("inspect", tmp_path / "out", "--json").data["sites"]
    assert (site["is_patched"], site["is_off"]) == (True, True)


def test_inspect_prints_a_table(posext: Any) -> None:
    out = posext("inspect", "demo:llama").out
    assert "trained for 256 tokens, not patched" in out
    assert "model.rotary_emb" in out


def test_inspect_shows_the_layer_type_of_a_site(posext: Any, tmp_path: Path) -> None:
    """`[full_attention]` is a name, and must not be taken for markup of the terminal."""
    tiny_model("gemma3").save_pretrained(tmp_path)
    assert "model.rotary_emb[full_attention]" in posext("inspect", tmp_path).out


def test_inspect_keeps_the_class_that_a_checkpoint_was_saved_from(posext: Any, tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    model = tiny_model("llama")
    LlamaForSequenceClassification(model.config).save_pretrained(tmp_path)
    assert posext("inspect", tmp_path, "--json").data["model"] == "LlamaForSequenceClassification"


@pytest.mark.parametrize("dynamic", [True, False])
def test_inspect_says_whether_a_patch_follows_the_length(posext: Any, tmp_path: Path, dynamic: bool) -> None:
    model, _, _ = load_demo("llama")
    hf_posext.patch_model(model, "yarn", 4, dynamic=dynamic).save_pretrained(tmp_path)
    line = "trained for 256, reads 1024 tokens by yarn (dynamic) x4"
    assert (line in posext("inspect", tmp_path).out) is dynamic
    data = posext("inspect", tmp_path, "--json").data
    assert (data["record"]["dynamic"], data["in_force"], data["usable_length"]) == (dynamic, True, 1024)


def test_methods_lists_options_with_defaults_and_those_required(posext: Any) -> None:
    methods = {method["name"]: method for method in posext("methods", "--json").data["methods"]}
    assert {"pi", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope", "abf"} <= set(methods)
    assert methods["yarn"]["options"]["beta_fast"] == 32.0
    assert methods["abf"]["required"] == ["rope_theta"]
    assert set(methods["pi"]) == {"name", "aliases", "mechanisms", "summary", "paper", "options", "required"}


@pytest.mark.parametrize("name", ["pi", "yarn", "abf"])
def test_methods_prints_names_and_papers(posext: Any, name: str) -> None:
    out = posext("methods").out
    assert f" {name} " in out
    assert "2309.00071" in out


def test_methods_says_which_follow_the_length_by_themselves(posext: Any) -> None:
    assert "--dynamic" in posext("methods").out
    methods = {method["name"]: method for method in posext("methods", "--json").data["methods"]}
    assert methods["dynamic_ntk"]["aliases"] == ["dynamic"]
    assert methods["dynamic_ntk"]["options"] == {}
    assert methods["longrope"]["options"]["short_factor"] is None


def test_methods_of_a_model_are_those_for_its_mechanisms(posext: Any) -> None:
    data = posext("methods", "demo:llama", "--json").data
    assert data["model"] == "demo:llama"
    assert data["methods"]
    assert all({"rotary", "attention"} & set(method["mechanisms"]) for method in data["methods"])


def test_methods_of_a_learned_table_are_those_that_switch_it_off(posext: Any, learned: Path) -> None:
    data = posext("methods", learned, "--json").data
    assert {"alibi", "nope", "window"} <= {method["name"] for method in data["methods"]}
    assert all({"learned", "attention"} & set(method["mechanisms"]) for method in data["methods"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("self_extend", {"group_size": None, "window": None, "logn": False}),
        ("rerope", {"window": None, "logn": False}),
        ("leaky_rerope", {"window": None, "slope": None, "logn": False}),
        ("alibi", {"slopes": None, "bias_max": 8.0, "asymmetric": False, "learned": False}),
        ("nope", {}),
        ("window", {"width": None, "sinks": 0}),
    ],
)
def test_methods_that_act_in_attention_are_listed_with_their_options(
    posext: Any, name: str, options: dict[str, Any]
) -> None:
    methods = {method["name"]: method for method in posext("methods", "--json").data["methods"]}
    assert methods[name]["options"] == options
    assert methods[name]["required"] == []
    assert f" {name} " in posext("methods").out
