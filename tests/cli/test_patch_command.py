"""`posext patch`: what it saves is the patched model, also for a process that has no hf_posext."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, FalconConfig, FalconForCausalLM

import hf_posext
from hf_posext.demo import demo_path, load_demo

PLAIN = """
import sys
sys.modules["hf_posext"] = None  # an import would now fail
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
torch.save(model(torch.arange(600)[None]).logits.detach(), sys.argv[2])
"""


def expected(method: str, factor: float, **options: Any) -> torch.Tensor:
    """Logits of the demo model patched in memory, [1, 600, V]."""
    model, _, _ = load_demo("llama")
    hf_posext.patch_model(model, method, factor, **options)
    with torch.no_grad():
        return model(torch.arange(600)[None]).logits


def test_plain_transformers_loads_it_with_the_same_logits(posext: Any, tmp_path: Path) -> None:
    words = ["--method", "yarn", "--factor", "4", "--option", "beta_fast=auto", "--out", tmp_path / "m", "--json"]
    outcome = posext("patch", "demo:llama", *words)
    assert outcome.code == 0
    assert outcome.data["loads_with"].startswith("plain transformers")
    subprocess.run([sys.executable, "-c", PLAIN, tmp_path / "m", tmp_path / "logits.pt"], check=True, timeout=120)
    torch.testing.assert_close(
        torch.load(tmp_path / "logits.pt"), expected("yarn", 4, beta_fast="auto"), rtol=0, atol=1e-5
    )


def test_the_record_is_in_the_json_and_in_the_config(posext: Any, tmp_path: Path) -> None:
    data = posext("patch", "demo:llama", "--method", "pi", "--target-length", "640", "--out", tmp_path, "--json").data
    assert set(data) == {"model", "out", "loads_with", "has_tokenizer", "record", "inspect"}
    assert (data["record"]["method"], data["record"]["factor"]) == ("pi", 2.5)
    assert data["inspect"]["usable_length"] == 640
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.posext == data["record"]
    assert config.max_position_embeddings == 640


def test_tokenizer_and_precision_go_along(posext: Any, tmp_path: Path) -> None:
    assert posext("patch", "demo:llama", "--method", "ntk", "--factor", "4", "--out", tmp_path).code == 0
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 1024
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_a_patch_that_config_words_cannot_say_names_load_pretrained(posext: Any, tmp_path: Path) -> None:
    outcome = posext("patch", "demo:llama", "--factor", "2", "--option", "temperature=logits", "--out", tmp_path)
    assert f"load it with hf_posext.load_pretrained({str(tmp_path)!r})" in outcome.out
    model = hf_posext.load_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.arange(600)[None]).logits
    torch.testing.assert_close(logits, expected("yarn", 2, temperature="logits"), rtol=0, atol=1e-5)


def test_a_dynamic_patch_reads_short_text_as_before_and_names_load_pretrained(posext: Any, tmp_path: Path) -> None:
    outcome = posext("patch", "demo:llama", "--factor", "4", "--dynamic", "--out", tmp_path)
    assert outcome.code == 0
    assert "trained for 256, reads 1024 tokens by yarn (dynamic) x4" in outcome.out
    assert f"load it with hf_posext.load_pretrained({str(tmp_path)!r})" in outcome.out
    model = hf_posext.load_pretrained(tmp_path, dtype=torch.float32).eval()
    unpatched, _, _ = load_demo("llama")
    ids = torch.arange(600)[None]
    with torch.no_grad():
        assert torch.equal(model(ids[:, :256]).logits, unpatched(ids[:, :256]).logits)
        long, before = model(ids).logits, unpatched(ids).logits
    torch.testing.assert_close(long[:, :256], before[:, :256], rtol=0, atol=1e-4)
    assert (long - before)[:, 256:].abs().max() > 1
    torch.testing.assert_close(long, expected("yarn", 4, dynamic=True), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("self_extend", {"group_size": 8, "window": 32}),
        ("leaky_rerope", {"slope": 0.25}),
        ("alibi", {"bias_max": 16}),
        ("nope", {}),
        ("window", {"sinks": 2}),
    ],
)
def test_a_patch_that_acts_in_attention_is_brought_back_by_load_pretrained(
    posext: Any, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    words = [word for name, value in options.items() for word in ("--option", f"{name}={value}")]
    outcome = posext("patch", "demo:llama", "--method", method, "--factor", "4", *words, "--out", tmp_path)
    assert outcome.code == 0
    assert f"trained for 256, reads 1024 tokens by {method} x4" in outcome.out
    assert f"load it with hf_posext.load_pretrained({str(tmp_path)!r})" in outcome.out
    model = hf_posext.load_pretrained(tmp_path, dtype=torch.float32).eval()
    assert model.config.posext["options"] == options
    with torch.no_grad():
        logits = model(torch.arange(600)[None]).logits
    torch.testing.assert_close(logits, expected(method, 4, **options), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "dynamic"),
    [([], False), (["--dynamic"], True), (["--no-dynamic"], False), (["--method", "dynamic"], True)],
)
def test_the_record_says_whether_the_factor_follows_the_length(
    posext: Any, tmp_path: Path, words: list[str], dynamic: bool
) -> None:
    data = posext("patch", "demo:llama", "--factor", "2", *words, "--out", tmp_path, "--json").data
    assert data["record"]["dynamic"] is dynamic
    assert data["loads_with"].startswith("hf_posext.load_pretrained" if dynamic else "plain transformers")


def test_dynamic_is_refused_on_one_line_where_attention_is_not_in_the_registry(posext: Any, tmp_path: Path) -> None:
    config = FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    FalconForCausalLM(config).save_pretrained(tmp_path / "model")
    words = ["--method", "pi", "--factor", "2", "--dynamic", "--out", tmp_path / "out"]
    outcome = posext("patch", tmp_path / "model", *words)
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1].startswith("error: No attention of FalconModel")
    assert not (tmp_path / "out").exists()


def test_a_model_without_tokenizer_is_saved_and_that_is_said(posext: Any, tmp_path: Path) -> None:
    load_demo("llama")[0].save_pretrained(tmp_path / "bare")
    outcome = posext("patch", tmp_path / "bare", "--method", "pi", "--factor", "2", "--out", tmp_path / "out")
    assert "without a tokenizer, since none was found" in outcome.out


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks transformers
def test_an_adapter_is_saved_with_its_record(posext: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base, _, _ = load_demo("llama")
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(base, lora)
    adapted.peft_config["default"].base_model_name_or_path = str(demo_path("llama"))
    adapted.save_pretrained(tmp_path / "adapter")
    outcome = posext("patch", tmp_path / "adapter", "--method", "pi", "--factor", "4", "--out", tmp_path / "out")
    assert "hf_posext.load_pretrained" in outcome.out
    hf_posext.patch_model(adapted, "pi", 4)
    reloaded = hf_posext.load_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.arange(600)[None]
    with torch.no_grad():
        torch.testing.assert_close(reloaded(ids).logits, adapted.eval()(ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("place", ["model", "file"])
def test_nothing_is_written_over(posext: Any, tmp_path: Path, place: str) -> None:
    load_demo("llama")[0].save_pretrained(tmp_path / "model")
    (tmp_path / "file").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    outcome = posext("patch", tmp_path / "model", "--factor", "2", "--out", tmp_path / place)
    assert outcome.code == 2
    assert "Name another place" in outcome.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
