"""Runs that cannot be: refused by name before anything is changed, or ended with what is left named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posext import PatchError, TrainingError, finetune, patch_model, record_of
from hf_posext.training.trainer import PosextTrainer
from tests.training.runs import (
    T,
    config,
    documents,
    logits,
    text,
    tiny_llama,
    weights,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"patch": {"dynamic": True}, "adapter": {"merge": True}}, ValueError, "`adapter.merge` cannot go with"),
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


@pytest.mark.parametrize(
    "patch",
    [{"method": "ntk"}, {"dynamic": True}, {"method": "yarn"}, {"factor": 2}, {"method": "yarn", "dynamic": True}],
)
def test_a_model_that_is_patched_otherwise_is_refused(patch: dict[str, Any], tmp_path: Path) -> None:
    whole = {"method": "pi", "factor": 4, **patch}
    model = patch_model(tiny_llama(), **whole, **({"beta_fast": 16} if whole["method"] == "yarn" else {}))
    asked = {"method": "yarn" if whole["method"] == "yarn" else "pi", "factor": 4}
    with pytest.raises(PatchError, match=r"The model is patched with .* the config asks for"):
        finetune(model, None, documents(), config(tmp_path / "run", patch=asked))
    assert record_of(model).method == whole["method"]


@pytest.mark.parametrize("patch", [{"method": "linear"}, {"method": "dynamic"}, {"method": "pi", "dynamic": True}])
def test_a_model_that_is_patched_as_the_config_says_is_trained_as_it_is(patch: dict[str, Any], tmp_path: Path) -> None:
    model = patch_model(tiny_llama(), factor=4, **patch)
    settings = config(tmp_path / "run", patch=patch, training={"max_steps": 1})
    assert finetune(model, None, documents(), settings).metrics["steps"] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adapter": {"merge": True}}, "`adapter.merge` cannot go with FSDP"),
        ({"patch": {"method": "alibi", "learned": True}}, "cannot be trained with FSDP"),
    ],
)
def test_what_no_process_could_save_alone_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_posext.training.run.is_sharded", lambda _: True)
    with pytest.raises(ValueError, match=words):
        finetune(tiny_llama(), None, documents(), config(tmp_path / "run", **changes))


def test_a_patch_that_is_not_in_force_is_refused(tmp_path: Path) -> None:
    model = patch_model(tiny_llama(), "pi", 4)
    model.model.rotary_emb = tiny_llama().model.rotary_emb
    with pytest.raises(PatchError, match="recorded and not in force"):
        finetune(model, None, documents(), config(tmp_path / "run", patch=None))


def test_a_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    finetune(tiny_llama(), None, documents(), config(tmp_path / "run", training={"max_steps": 2}))
    with pytest.raises(ValueError, match=r"holds a run with another `training.learning_rate`"):
        finetune(
            tiny_llama(), None, documents(), config(tmp_path / "run", training={"learning_rate": 1e-3, "max_steps": 2})
        )
    anew = config(tmp_path / "run", training={"learning_rate": 1e-3, "max_steps": 2}, resume=False)
    assert finetune(tiny_llama(), None, documents(), anew).metrics["steps"] == 2


@pytest.mark.parametrize("what", ["model", "text"])
def test_a_folder_with_a_run_of_another_model_or_text_is_refused(what: str, tmp_path: Path) -> None:
    finetune(tiny_llama(), None, documents(), config(tmp_path / "run"))
    other = tiny_llama()
    if what == "model":
        other.model.layers[1].mlp.up_proj.weight.data.mul_(2)
    with pytest.raises(ValueError, match=f"holds a run with another `digest of the {what}`"):
        finetune(other, None, documents(seed=1 if what == "model" else 2), config(tmp_path / "run"))
    assert record_of(other) is None
    assert not any("lora" in name for name, _ in other.named_modules())


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


def test_a_full_disk_is_reported_and_the_last_checkpoint_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_posext.training.run.clear", lambda *_, **__: None)  # it would take the trap away
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
