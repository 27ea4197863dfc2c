"""finetune: what a run learns, what it saves, and what it says of both."""

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from hf_posext import finetune, load_pretrained, patch_model
from hf_posext.gating import is_gated
from tests.training.runs import (
    VOCABULARY,
    FrameTokenizer,
    N,
    T,
    config,
    documents,
    logits,
    saved_base,
    text,
    tiny_bert,
    tiny_gpt2,
    tiny_llama,
    weights,
)

ROOT = Path(__file__).parents[2]


def test_a_run_learns_saves_and_says_what_it_cost(tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base", tiny_llama())
    result = finetune(base, None, documents(), config(tmp_path / "run"), evaluation_documents=documents(4, seed=9))
    losses = [each["loss"] for each in result.history if "loss" in each]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert result.metrics["steps"] == 6
    assert result.metrics["tokens"] == 6 * 2 * T
    trained = sum(each.numel() for each in result.model.parameters() if each.requires_grad)
    assert result.metrics["trainable"] == trained
    assert result.metrics["trainable_share"] == trained / sum(each.numel() for each in result.model.parameters())
    assert result.evaluation is not None
    assert result.evaluation.arms == ["pi", "none", "truncate", "pi, tuned"]
    assert result.evaluation.protocol["context_lengths"] == [N // 2, N, 2 * N, T]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["metrics"]["retention"]["context_length"] == N
    assert report["metrics"]["gain"]["context_length"] == T
    assert report["metrics"]["gain"]["against_before"]["difference"] < 0
    assert (tmp_path / "run" / "plot.png").read_bytes()[:4] == b"\x89PNG"
    assert "6 steps on 768 tokens" in str(result)


@pytest.mark.parametrize(
    ("adapter", "is_saved"),
    [
        ({"norms": False, "embeddings": False}, ("lora_A", "lora_B")),
        ({"norms": True, "embeddings": True}, ("lora_A", "lora_B", "embed_tokens", "layernorm", "model.norm")),
        ({"lora": {"target_modules": "all-linear"}}, ("lora_A", "down_proj", "embed_tokens")),
        ({"lora": {"trainable_token_indices": [3, 7]}, "embeddings": False}, ("lora_A", "token_adapter")),
    ],
)
def test_all_that_was_trained_comes_back_in_another_process(
    adapter: dict[str, Any], is_saved: tuple[str, ...], tmp_path: Path
) -> None:
    base = saved_base(tmp_path / "base", tiny_llama())
    result = finetune(base, None, documents(), config(tmp_path / "run", adapter=adapter))
    torch.save(logits(result.model, text(T)), tmp_path / "expected.pt")
    assert all(any(word in name for name in weights(tmp_path / "run")) for word in is_saved)
    assert json.loads((tmp_path / "run" / "posext.json").read_text())["method"] == "pi"
    script = f"""
        import torch
        from hf_posext import load_pretrained
        from tests.training.runs import logits, text
        model = load_pretrained({str(tmp_path / "run")!r}).eval()
        assert torch.equal(logits(model, text({T})), torch.load({str(tmp_path / "expected.pt")!r}))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, cwd=ROOT)


def test_slopes_that_were_learned_are_saved_beside_the_adapter_and_resumed(tmp_path: Path) -> None:
    patch = {"method": "alibi", "factor": 4, "learned": True}
    base = saved_base(tmp_path / "base", tiny_llama())
    result = finetune(base, None, documents(), config(tmp_path / "run", patch=patch))
    slopes = {name: each for name, each in result.model.named_parameters() if name.endswith("posext_slopes")}
    fresh = dict(patch_model(tiny_llama(), **patch).named_parameters())
    assert len(slopes) == 2
    assert not any(torch.equal(each, fresh[name.removeprefix("base_model.model.")]) for name, each in slopes.items())
    loaded = load_pretrained(tmp_path / "run").eval()
    assert torch.equal(logits(loaded, text(T)), logits(result.model, text(T)))
    for name in ("checkpoint-6", "report.json"):
        path = tmp_path / "run" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = finetune(
        saved_base(tmp_path / "base", tiny_llama()), None, documents(), config(tmp_path / "run", patch=patch)
    )
    assert torch.equal(logits(again.model, text(T)), logits(result.model, text(T)))


def test_an_adapter_that_is_off_for_short_text_leaves_not_one_bit_changed(tmp_path: Path) -> None:
    """With a patch that follows the length this is the default, also of the model that is loaded again."""
    original = saved_base(tmp_path / "base", tiny_llama())
    expected = logits(original, text(N))
    settings = config(tmp_path / "run", patch={"method": "yarn", "dynamic": True})
    result = finetune(original, None, documents(), settings, evaluation_documents=documents(4, seed=9))
    assert is_gated(result.model)
    assert torch.equal(logits(result.model, text(N)), expected)
    assert result.metrics["retention"]["ratio"] == 1.0
    assert result.metrics["gain"]["against_before"]["difference"] != 0
    loaded = load_pretrained(tmp_path / "run").eval()
    assert torch.equal(logits(loaded, text(N)), expected)
    assert torch.equal(logits(loaded, text(T)), logits(result.model, text(T)))
    prompt = text(N - 4, rows=1)
    written = loaded.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=3 * N,
        max_new_tokens=3 * N,
        do_sample=False,
    )
    allowed = torch.arange(VOCABULARY) != 1  # all but the end
    for end in (N - 4, N, N + 1, 3 * N):
        assert written[0, end] == logits(loaded, written[:, :end])[0, -1].where(allowed, -torch.inf).argmax()


def test_an_adapter_in_bf16_comes_back_with_equal_logits(tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base", tiny_llama().to(torch.bfloat16))
    result = finetune(base, None, documents(), config(tmp_path / "run", training={"bf16": True}))
    loaded = load_pretrained(tmp_path / "run", dtype=torch.bfloat16).eval()
    assert torch.equal(logits(loaded, text(T)), logits(result.model, text(T)))


def test_every_checkpoint_has_its_patch(tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base", tiny_llama())
    finetune(base, None, documents(), config(tmp_path / "run"))
    for step in (4, 6):
        record = json.loads((tmp_path / "run" / f"checkpoint-{step}" / "posext.json").read_text())
        assert (record["method"], record["factor"]) == ("pi", 4)


def test_a_merged_run_is_a_plain_checkpoint(tmp_path: Path) -> None:
    result = finetune(tiny_llama(), None, documents(), config(tmp_path / "run", adapter={"merge": True}))
    expected = logits(result.model, text(T))
    assert not (tmp_path / "run" / "adapter_config.json").exists()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    torch.testing.assert_close(logits(plain, text(T)), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(load_pretrained(tmp_path / "run").eval(), text(T)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_merged_model_whose_embedding_was_trained_is_a_plain_checkpoint(family: str, tmp_path: Path) -> None:
    """PEFT keeps head and embedding one weight in Llama, and parts them in GPT-2."""
    model = tiny_llama(tie_word_embeddings=True) if family == "llama" else tiny_gpt2()
    patch = {"method": "pi", "factor": 4}
    settings = config(tmp_path / "run", patch=patch, adapter={"merge": True, "embeddings": True})
    result = finetune(model, None, documents(), settings)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    torch.testing.assert_close(logits(plain, text(T)), logits(result.model, text(T)), rtol=0, atol=1e-5)


def test_full_tuning_is_a_plain_checkpoint_in_bf16_too(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", adapter={"train": "full"}, training={"bf16": True, "learning_rate": 1e-3})
    result = finetune(tiny_llama().to(torch.bfloat16), None, documents(), settings)
    assert result.metrics["trainable_share"] == 1
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.bfloat16).eval()
    assert torch.equal(logits(plain, text(T)), logits(result.model, text(T)))


def test_new_rows_alone_are_trained_and_short_text_is_read_as_before(tmp_path: Path) -> None:
    model = tiny_bert()
    before = logits(model, text(N))
    settings = config(
        tmp_path / "run",
        patch={"method": "tile", "frozen_rows": True},
        adapter={"train": "new_rows"},
        data={"mask_share": 0.3},
    )
    result = finetune(model, FrameTokenizer(), documents(), settings)
    assert torch.equal(logits(result.model, text(N)), before)
    trained = [name for name, each in result.model.named_parameters() if each.requires_grad]
    assert trained == ["bert.embeddings.position_embeddings.weight"]
    table = result.model.bert.embeddings.position_embeddings.weight
    assert (table[N:] != table[:N].repeat(T // N - 1, 1)).any(-1).all()
    loaded = load_pretrained(tmp_path / "run", AutoModelForMaskedLM).eval()
    assert torch.equal(logits(loaded, text(T)), logits(result.model, text(T)))


def test_a_control_is_trained_without_a_patch(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", patch=None, control_length=T)
    result = finetune(tiny_llama(), None, documents(), settings, evaluation_documents=documents(4, seed=9))
    assert result.evaluation.arms == ["none", "truncate", "none, tuned"]
    assert not (tmp_path / "run" / "posext.json").exists()


@pytest.mark.parametrize(
    ("make", "patch", "adapter"),
    [
        (tiny_gpt2, {"method": "pi", "factor": 4}, {}),
        (tiny_gpt2, {"method": "nope", "factor": 4}, {"train": "full"}),
        (tiny_bert, {"method": "tile", "factor": 4}, {}),
    ],
)
def test_a_model_that_could_not_read_long_text_before_is_measured_too(
    make: Any, patch: dict[str, Any], adapter: dict[str, Any], tmp_path: Path
) -> None:
    """Where a table ends there is no bar `none` beyond it."""
    settings = config(tmp_path / "run", patch=patch, adapter=adapter, evaluation={"targets": 8})
    tokenizer = FrameTokenizer() if make is tiny_bert else None
    result = finetune(make(), tokenizer, documents(), settings, evaluation_documents=documents(4, seed=9))
    assert result.metrics["retention"]["context_length"] == N
    assert "Short text" in str(result)


@pytest.mark.parametrize("train", ["lora", "full"])
def test_what_is_trained_moves_under_autocast_by_less_than_bf16_can_tell(train: str, tmp_path: Path) -> None:
    """Steps of 1e-4 of a number: in bf16, which has 8 bits, it would stay where it is."""
    model = tiny_llama().to(torch.bfloat16)
    adapter = {"train": train} if train == "full" else {"norms": True, "embeddings": True}
    training = {"bf16": True, "learning_rate": 1e-4, "max_steps": 60, "save_strategy": "no", "logging_steps": 60}
    before = model.model.norm.weight.detach().clone()
    result = finetune(model, None, documents(), config(tmp_path / "run", adapter=adapter, training=training))
    after = result.model.get_base_model().model.norm if train == "lora" else result.model.model.norm
    weight = after.modules_to_save["default"].weight if train == "lora" else after.weight
    assert weight.dtype == torch.bfloat16
    assert (weight != before).float().mean() > 0.5
    with torch.no_grad():
        result.model(input_ids=text(T))


def test_the_perplexity_of_the_end_is_logged_under_a_plain_key(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", evaluation={"every": 3, "targets": 8})
    result = finetune(tiny_llama(), None, documents(), settings, evaluation_documents=documents(4, seed=9))
    logged = {each["step"]: each[f"eval_perplexity_{T}"] for each in result.history if f"eval_perplexity_{T}" in each}
    row = next(row for row in result.evaluation.rows if (row["arm"], row["context_length"]) == ("pi, tuned", T))
    assert list(logged) == [3, 6]
    assert logged[6] == pytest.approx(row["perplexity"], rel=1e-6)


def test_gradients_with_and_without_checkpointing_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Tensor]] = []

    def keep(self: Any, *args: Any, **kwargs: Any) -> None:
        named: nn.Module = kwargs["model"]
        found.append({name: each.grad.clone() for name, each in named.named_parameters() if each.grad is not None})

    monkeypatch.setattr("hf_posext.training.run.GradientCheck.on_pre_optimizer_step", keep)
    for name, changes in {"plain": {}, "checkpointed": {"gradient_checkpointing": True}}.items():
        finetune(tiny_llama(), None, documents(), config(tmp_path / name, training={"max_steps": 2, **changes}))
    plain, checkpointed = found[1], found[3]
    assert plain.keys() == checkpointed.keys()
    assert sum("lora_B" in name for name in plain) == 8
    for name, gradient in plain.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-6, atol=1e-6)


def test_a_token_weighs_the_same_however_a_batch_is_cut(tmp_path: Path) -> None:
    """Rows of unequal lengths, so that a mean of means would be another loss."""
    data = {"positions": "random_length", "shortest": N, "length": T}
    runs = {
        "whole": {"per_device_train_batch_size": 4},
        "cut": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    }
    found = {}
    for name, changes in runs.items():
        settings = config(tmp_path / name, data=data, training={**changes, "max_steps": 4})
        finetune(tiny_llama(), None, documents(), settings)
        found[name] = weights(tmp_path / name)
    for name, value in found["whole"].items():
        torch.testing.assert_close(found["cut"][name], value, rtol=1e-4, atol=1e-5)
