"""A patched model is an ordinary model: transformers' Trainer and TRL's SFTTrainer train it with no code of ours."""

import math
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from hf_posext import patch_model
from hf_posext.demo import load_demo, training_documents
from tests.training.runs import TRAINING, T, documents, tiny_llama

CASES = {
    "pi": {"method": "pi", "factor": 4},
    "yarn, dynamic": {"method": "yarn", "factor": 4, "dynamic": True},
    "self_extend": {"method": "self_extend", "factor": 4},
    "alibi": {"method": "alibi", "target_length": T},
}


def rows() -> list[dict[str, Any]]:
    """The same two windows of T tokens in every step, so that the loss has to fall."""
    return 6 * [{"input_ids": ids[:T], "labels": ids[:T]} for ids in documents(count=2)]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_patched_model_trains_under_plain_trainer(case: str, checkpointing: bool, tmp_path: Path) -> None:
    base = patch_model(tiny_llama(), **CASES[case])
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]))
    arguments = TRAINING | {"activation_checkpointing": checkpointing, "save_strategy": "no", "disable_tqdm": True}
    if checkpointing:
        arguments["activation_checkpointing_kwargs"] = {"use_reentrant": False}
    trainer = Trainer(model, TrainingArguments(str(tmp_path / "run"), **supported(arguments)), train_dataset=rows())
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert losses[-1] < losses[0]
    reached = {name: each.abs().max() for name, each in model.named_parameters() if "lora_B" in name}
    assert len(reached) == 4
    assert all(value > 0 for value in reached.values())


def supported(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same in the words of the transformers that is installed."""
    word = "activation_checkpointing"
    if word in TrainingArguments.__dataclass_fields__:
        return arguments
    return {name.replace("activation", "gradient"): value for name, value in arguments.items()}


@pytest.mark.trl
@pytest.mark.filterwarnings("ignore")  # what TRL does not keep up with in transformers
@pytest.mark.transformers_logs("what TRL says of its own arguments")
@pytest.mark.parametrize("case", CASES)
def test_a_patched_model_trains_under_sft_trainer(case: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="opt-in: pip install trl")
    model, tokenizer, _ = load_demo("llama")
    patch = CASES[case] | ({"target_length": 4 * 256} if "target_length" in CASES[case] else {})
    patch_model(model, **patch, tokenizer=tokenizer)
    arguments = TRAINING | {"save_strategy": "no", "max_length": 512, "bf16": False, "max_steps": 4}
    trainer = trl.SFTTrainer(
        model,
        args=trl.SFTConfig(str(tmp_path / "run"), **arguments),
        train_dataset=Dataset.from_dict({"text": 16 * [training_documents()[0][:3000]]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    reached = [each.abs().max() for name, each in trainer.model.named_parameters() if "lora_B" in name]
    assert len(reached) == 8
    assert all(value > 0 for value in reached)
