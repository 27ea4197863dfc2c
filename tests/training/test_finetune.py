"""finetune: from a model in memory to an adapter on the disk, what it refuses, and what it leaves when it fails."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from hf_posext import PatchError, TrainingError, finetune, load_pretrained, patch_model, record_of
from hf_posext.gating import is_gated
from hf_posext.training.trainer import PosextTrainer
from tests.training.runs import VOCABULARY, N, T, config, documents, tiny_bert, tiny_gpt2, tiny_llama

ROOT = Path(__file__).parents[2]


def text(tokens: int, rows: int = 2) -> Tensor:
    """Token ids [rows, tokens]."""
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(5))


def logits(model: Any, ids: Tensor) -> Tensor:
    """What a model says."""
    with torch.no_grad():
        return model(input_ids=ids).logits


def saved_base(folder: Path, model: Any) -> Any:
    """A model from the disk, so that an adapter knows its base."""
    model.save_pretrained(folder)
    kind = AutoModelForMaskedLM if "MaskedLM" in type(model).__name__ else AutoModelForCausalLM
    return kind.from_pretrained(folder).eval()


def weights(folder: Path) -> dict[str, Tensor]:
    """What an adapter holds."""
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


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
        from tests.training.test_finetune import logits, text
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
    assert result.metrics["gain"]["against_before"]["difference"] < 0
    loaded = load_pretrained(tmp_path / "run").eval()
    assert torch.equal(logits(loaded, text(N)), expected)
    assert torch.equal(logits(loaded, text(T)), logits(result.model, text(T)))
    prompt = text(N - 4, rows=1)
    written = loaded.generate(input_ids=prompt, min_new_tokens=3 * N, max_new_tokens=3 * N, do_sample=False)
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


class FrameTokenizer:
    """What a masked LM needs of a tokenizer: its size, a mask, and a token before and after a text."""

    mask_token_id, all_special_ids, pad_token_id, eos_token_id, model_max_length = 1, [0, 1], 0, None, N

    def __call__(self, text: str, add_special_tokens: bool = True, **options: Any) -> dict[str, list[int]]:
        """One token per character."""
        ids = [2 + ord(letter) % (VOCABULARY - 2) for letter in text]
        return {"input_ids": [0, *ids, 0] if add_special_tokens else ids}

    def __len__(self) -> int:
        """Its tokens."""
        return VOCABULARY

    def save_pretrained(self, folder: str) -> None:
        """Nothing to save."""


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"patch": None}, PatchError, "The model is not patched"),
        ({"adapter": {"train": "new_rows"}}, PatchError, "needs a learned table of positions"),
        ({"adapter": {"only_beyond_trained_length": True}}, (PatchError, ValueError), "dynamic=True"),
        ({"adapter": {"lora": {"rank": 3}}}, ValueError, "`adapter.lora` is handed to peft.LoraConfig"),
        (
            {"patch": {"dynamic": True}, "data": {"short_fraction": 0.5}},
            ValueError,
            "`data.short_fraction` cannot go with only_beyond_trained_length",
        ),
        ({"data": {"length": 8 * T}}, ValueError, "data.length"),
    ],
)
def test_a_run_that_cannot_be_is_refused_and_the_model_is_as_it_was(
    changes: dict[str, Any], kind: Any, words: str, tmp_path: Path
) -> None:
    model = tiny_llama()
    before = logits(model, text(T))
    with pytest.raises(kind, match=words):
        finetune(model, None, documents(), config(tmp_path / "run", **changes))
    assert record_of(model) is None
    assert torch.equal(logits(model, text(T)), before)
    assert not any("lora" in name for name, _ in model.named_modules())


def test_a_model_that_is_patched_otherwise_is_refused(tmp_path: Path) -> None:
    model = patch_model(tiny_llama(), "ntk", 4)
    with pytest.raises(PatchError, match=r"patched with ntk x4 .* the config asks for"):
        finetune(model, None, documents(), config(tmp_path / "run"))
    assert record_of(model).method == "ntk"


def test_a_patch_that_is_not_in_force_is_refused(tmp_path: Path) -> None:
    model = patch_model(tiny_llama(), "pi", 4)
    model.model.rotary_emb = tiny_llama().model.rotary_emb
    with pytest.raises(PatchError, match="recorded and not in force"):
        finetune(model, None, documents(), config(tmp_path / "run", patch=None))


def test_a_control_is_trained_without_a_patch(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", patch=None, control_length=T)
    result = finetune(tiny_llama(), None, documents(), settings, evaluation_documents=documents(4, seed=9))
    assert result.evaluation.arms == ["none", "truncate", "none, tuned"]
    assert not (tmp_path / "run" / "posext.json").exists()


RUN = """
    import os, signal, sys
    from transformers import TrainerCallback
    from hf_posext import finetune
    from hf_posext.training import finetune as module
    from tests.training.runs import config, documents, tiny_llama

    class At(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == {step}:
                os.kill(os.getpid(), signal.{signal})

    own = module.GradientCheck
    class Check(own, At):
        pass
    module.GradientCheck = Check
    result = finetune(tiny_llama(), None, documents(), config({folder!r}, **{changes!r}), progress=False)
    sys.exit(7 if result.metrics["is_interrupted"] else 0)
"""


@pytest.mark.parametrize(("name", "step", "code", "left"), [("SIGKILL", 3, -9, 2), ("SIGTERM", 2, 7, 3)])
def test_a_run_that_was_ended_goes_on_to_the_weights_that_it_would_have_had(
    name: str, step: int, code: int, left: int, tmp_path: Path
) -> None:
    """Dropout is on, so the random state has to come back as well as weights, optimizer and place in the data."""
    changes = {"adapter": {"lora": {"lora_dropout": 0.2}}}
    whole = finetune(tiny_llama(), None, documents(), config(tmp_path / "whole", **changes))
    script = RUN.format(step=step, signal=name, folder=str(tmp_path / "cut"), changes=changes)
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, check=False)
    assert ended.returncode == code
    steps = sorted(path.name for path in (tmp_path / "cut").glob("checkpoint-*"))
    assert steps[-1] == f"checkpoint-{left}"
    again = finetune(tiny_llama(), None, documents(), config(tmp_path / "cut", **changes))
    assert again.metrics["steps"] == 6
    expected = weights(tmp_path / "whole")
    for name, value in weights(tmp_path / "cut").items():
        assert torch.equal(value, expected[name])
    losses = [[(each["step"], each["loss"]) for each in run.history if "loss" in each] for run in (whole, again)]
    assert losses[1] == losses[0]


def test_a_checkpoint_that_was_not_written_to_its_end_does_not_count(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", training={"max_steps": 4})
    finetune(tiny_llama(), None, documents(), settings)
    (tmp_path / "run" / "checkpoint-4" / "trainer_state.json").write_text('{"glo')
    again = finetune(tiny_llama(), None, documents(), settings)
    assert [each["step"] for each in again.history if "loss" in each] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    finetune(tiny_llama(), None, documents(), config(tmp_path / "run", training={"max_steps": 2}))
    with pytest.raises(ValueError, match=r"holds a run with another `training.learning_rate`"):
        finetune(
            tiny_llama(), None, documents(), config(tmp_path / "run", training={"learning_rate": 1e-3, "max_steps": 2})
        )
    anew = config(tmp_path / "run", training={"learning_rate": 1e-3, "max_steps": 2}, resume=False)
    assert finetune(tiny_llama(), None, documents(), anew).metrics["steps"] == 2


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = PosextTrainer.compute_loss

    def broken(self: PosextTrainer, *args: Any, **kwargs: Any) -> Tensor:
        loss = compute(self, *args, **kwargs)
        return loss * float("nan") if self.state.global_step == 3 else loss

    monkeypatch.setattr(PosextTrainer, "compute_loss", broken)
    with pytest.raises(TrainingError, match=r"The loss is nan in step 4\. The last good checkpoint is .*checkpoint-2"):
        finetune(tiny_llama(), None, documents(), config(tmp_path / "run"))
    assert all(value.isfinite().all() for value in weights(tmp_path / "run" / "checkpoint-2").values())


def test_a_full_disk_is_reported_and_the_last_checkpoint_kept(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-4").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-4" / "optimizer.pt").symlink_to("/dev/full")
    with pytest.raises(TrainingError, match=r"checkpoint-4' cannot be written: .*checkpoint-2"):
        finetune(tiny_llama(), None, documents(), config(tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoint-4").exists()
    (tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text()


def test_a_weight_that_nothing_reaches_is_an_error_that_names_it(tmp_path: Path) -> None:
    model = tiny_llama()
    model.model.layers[1].mlp.forward = lambda states: torch.zeros_like(states)  # of which nothing is learned
    settings = config(tmp_path / "run", adapter={"lora": {"target_modules": "all-linear"}})
    with pytest.raises(TrainingError, match=r"layers.1.mlp.*should be trained, but no gradient has reached it"):
        finetune(model, None, documents(), settings)


def test_a_signal_handler_is_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    finetune(tiny_llama(), None, documents(), config(tmp_path / "run", training={"max_steps": 1}))
    assert signal.getsignal(signal.SIGTERM) is before
    assert os.getpid()


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

    monkeypatch.setattr("hf_posext.training.finetune.GradientCheck.on_pre_optimizer_step", keep)
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
