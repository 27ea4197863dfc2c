"""FinetuneConfig: what a YAML file may say, what overrides it, and what is refused with which words."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_posext import FinetuneConfig
from hf_posext.training.trainer import training_arguments

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
PRESETS = ("tiny.yaml", "llama-8b-32k.yaml", "neox.yaml", "bert.yaml")

REFUSED = {
    "unknown key": ({"patchs": {}}, ValueError, "Unknown key 'patchs'. Did you mean `patch`?"),
    "unknown key in a section": (
        {"data": {"lenght": 3}},
        ValueError,
        "Unknown key in `data` 'lenght'. Did you mean `length`?",
    ),
    "section without keys": ({"data": 3}, TypeError, "`data` must be a section with keys, got 3"),
    "patch without method": ({"patch": {"factor": 2}}, ValueError, "`patch` needs a `method`"),
    "positions": ({"data": {"positions": "poes"}}, ValueError, "'poes'. Did you mean `pose`?"),
    "one chunk": ({"data": {"positions": "pose", "chunks": 1}}, ValueError, "`data.chunks` must be at least 2"),
    "packing pose": (
        {"data": {"positions": "pose", "packing": True}},
        ValueError,
        "`data.packing` goes with positions: full",
    ),
    "share above one": (
        {"data": {"short_fraction": 1.5}},
        ValueError,
        "`data.short_fraction` must be a number from 0 to 1, got 1.5",
    ),
    "share of a word": (
        {"data": {"short_fraction": "x"}},
        TypeError,
        "`data.short_fraction` must be a number from 0 to 1",
    ),
    "shortest": (
        {"data": {"shortest": 9, "length": 8}},
        ValueError,
        "`data.shortest` must be at most `data.length` 8, got 9",
    ),
    "length of zero": ({"data": {"length": 0}}, ValueError, "`data.length` must be at least 1 token, got 0"),
    "trained": ({"adapter": {"train": "everything"}}, ValueError, "Unknown value of `adapter.train`: 'everything'"),
    "lora of full": (
        {"adapter": {"train": "full", "lora": {"r": 4}}},
        ValueError,
        "`adapter.lora` goes with train: lora only",
    ),
    "merged gate": (
        {"adapter": {"merge": True, "only_beyond_trained_length": True}},
        ValueError,
        "`adapter.merge` cannot go with only_beyond_trained_length",
    ),
    "targets": ({"evaluation": {"targets": 0}}, ValueError, "`evaluation.targets` must be at least 1"),
    "output_dir inside": (
        {"training": {"output_dir": "x"}},
        ValueError,
        "`training.output_dir` is `output_dir` at the top",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_meant_is_refused_by_name(case: str) -> None:
    data, kind, words = REFUSED[case]
    with pytest.raises(kind) as caught:
        FinetuneConfig.from_dict(data)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_config_that_the_trainer_takes(name: str, tmp_path: Path) -> None:
    config = FinetuneConfig.from_yaml(CONFIGS / name, [f"output_dir={tmp_path}", "training.bf16=false"])
    assert config.patch is not None
    assert config.model is not None
    assert training_arguments(config).max_steps == config.training["max_steps"]


@pytest.mark.parametrize("name", ["fsdp.yaml", "deepspeed.yaml"])
def test_an_accelerate_config_is_one_that_accelerate_reads(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(CONFIGS / name))
    assert config.distributed_type in ("FSDP", "DEEPSPEED")


def test_plain_data_gives_the_config_back() -> None:
    config = FinetuneConfig.from_yaml(CONFIGS / "tiny.yaml")
    assert FinetuneConfig.from_dict(config.to_dict()) == config
    assert FinetuneConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("word", "section", "key", "value"),
    [
        ("training.learning_rate=1e-4", "training", "learning_rate", 1e-4),
        ("training.max_steps=7", "training", "max_steps", 7),
        ("patch.factor=8", "patch", "factor", 8),
        ("patch.dynamic=true", "patch", "dynamic", True),
        ("patch.method=yarn", "patch", "method", "yarn"),
    ],
)
def test_a_word_overrides_the_file(word: str, section: str, key: str, value: Any) -> None:
    found = getattr(FinetuneConfig.from_yaml(CONFIGS / "tiny.yaml", [word]), section)[key]
    assert found == value
    assert type(found) is type(value)


def test_a_word_reaches_a_section_that_the_file_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: demo:llama\nadapter:\n")
    config = FinetuneConfig.from_yaml(tmp_path / "run.yaml", ["adapter.lora.r=2", "data.path=[a.txt, b.txt]"])
    assert config.adapter.lora == {"r": 2}
    assert config.data.path == ["a.txt", "b.txt"]


@pytest.mark.parametrize("word", ["training", "=3", "training..x=1", "model.x=1"])
def test_a_word_that_sets_nothing_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="--set"):
        FinetuneConfig.from_yaml(CONFIGS / "tiny.yaml", [word])


def test_numbers_that_yaml_takes_for_words_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("training: {learning_rate: 1e-4, other: [2E-5, x1e-4]}\n")
    found = FinetuneConfig.from_yaml(tmp_path / "run.yaml").training
    assert found == {"learning_rate": 1e-4, "other": [2e-5, "x1e-4"]}


def test_a_file_that_is_not_there_or_no_yaml_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="There is no file"):
        FinetuneConfig.from_yaml(tmp_path / "no.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match=r"bad\.yaml is no YAML"):
        FinetuneConfig.from_yaml(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="must hold keys and values, got list"):
        FinetuneConfig.from_yaml(tmp_path / "list.yaml")


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"label_smoothing_factor": 0.1}, "`training.label_smoothing_factor` must be 0.0 here"),
        ({"prediction_loss_only": False}, "`training.prediction_loss_only` must be True here"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "reentrant checkpointing"),
        ({"learning_rates": 1}, "`training` is handed to transformers.TrainingArguments"),
    ],
)
def test_arguments_that_the_run_cannot_live_with_are_refused(
    training: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        training_arguments(FinetuneConfig(output_dir=str(tmp_path), training=training))


def test_checkpointing_is_never_reentrant_and_evaluation_never_keeps_logits(tmp_path: Path) -> None:
    config = FinetuneConfig(output_dir=str(tmp_path), training={"gradient_checkpointing": True, "use_cpu": True})
    arguments = training_arguments(config)
    assert arguments.gradient_checkpointing
    assert arguments.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert arguments.prediction_loss_only


def test_every_field_is_documented_where_it_stands() -> None:
    for section in (FinetuneConfig, *(each.default_factory for each in fields(FinetuneConfig))):
        if isinstance(section, type) and section not in (dict, list):
            assert all(f"{each.name}:" in (section.__doc__ or "") for each in fields(section))
