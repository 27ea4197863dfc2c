"""`posext finetune`: from a YAML file to an adapter, one JSON document, one line for what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_posext import load_pretrained, record_of
from hf_posext.training.config import FinetuneConfig
from tests.cli.conftest import Outcome

SHORT = {
    "model": "demo:llama",
    "patch": {"method": "pi", "factor": 2},
    "data": {"path": "demo:training", "max_documents": 1},
    "evaluation": {"path": "demo:held_out", "max_documents": 2, "context_lengths": [256, 512], "targets": 16},
    "training": {"max_steps": 2, "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-3},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Two steps on one book."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**SHORT, "output_dir": str(tmp_path / "run")}))
    return path


def test_a_run_from_a_file_is_one_document_and_an_adapter(posext: Callable[..., Outcome], config: Path) -> None:
    outcome = posext("finetune", str(config), "--threads", "1", "--json")
    assert outcome.code == 0
    data = outcome.data
    assert data["metrics"]["steps"] == 2
    assert [row["arm"] for row in data["rows"]] == [*2 * ["pi"], *2 * ["none"], *2 * ["truncate"], *2 * ["pi, tuned"]]
    assert data["config"]["patch"] == {"method": "pi", "factor": 2}
    folder = Path(data["output_dir"])
    assert {"adapter_model.safetensors", "posext.json", "report.json", "plot.png"} <= {
        each.name for each in folder.iterdir()
    }
    assert json.loads((folder / "report.json").read_text())["rows"] == data["rows"]
    assert record_of(load_pretrained(folder)).factor == 2


def test_a_run_prints_what_it_cost_and_where_it_is(posext: Callable[..., Outcome], config: Path) -> None:
    outcome = posext("finetune", str(config), "--set", "training.max_steps=1", "--threads", "1")
    assert outcome.code == 0
    assert "1 steps on 512 tokens" in outcome.out
    assert "Short text, 256 tokens" in outcome.out
    assert f"saved {config.parent / 'run'}" in outcome.out


BAD: dict[str, tuple[list[str], str]] = {
    "no file": (["finetune", "nowhere.yaml"], "There is no file 'nowhere.yaml'"),
    "unknown key": (["finetune", "{config}", "--set", "trainig.max_steps=1"], "Did you mean `training`?"),
    "no word": (["finetune", "{config}", "--set", "training"], "`--set` must be KEY=VALUE"),
    "no model": (["finetune", "{config}", "--set", "model=null"], "names no `model`"),
    "no such data": (["finetune", "{config}", "--set", "data.path=./none.jsonl"], "none.jsonl"),
    "no such method": (["finetune", "{config}", "--set", "patch.method=yarm"], "Did you mean `yarn`?"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case: str, posext: Callable[..., Outcome], config: Path) -> None:
    words, message = BAD[case]
    outcome = posext(*(word.format(config=config) for word in words))
    assert outcome.code == 2
    assert outcome.out == ""
    assert message in outcome.err
    assert outcome.err.strip().count("\n") == 0
    assert "posext finetune --help" in outcome.err


def test_a_run_that_cannot_go_on_is_one_line_and_exit_code_1(posext: Callable[..., Outcome], config: Path) -> None:
    outcome = posext("finetune", str(config), "--set", "training.learning_rate=1e30", "--set", "training.max_steps=4")
    assert outcome.code == 1
    assert "is not finite" in outcome.err or "The loss is nan" in outcome.err
    assert outcome.err.strip().count("\n") == 0


def test_the_demo_tunes_with_the_settings_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel has no recipes, so the demo has its settings in code; they are to stay the same."""
    from hf_posext.cli import demo_tuning
    from hf_posext.demo import load_demo

    asked: list[Any] = []
    monkeypatch.setattr("hf_posext.training.finetune.finetune", lambda *arguments, **_: asked.append(arguments[3]))
    model, tokenizer, documents = load_demo("llama")
    demo_tuning.tune(model, tokenizer, documents, tmp_path)
    recipe = FinetuneConfig.from_yaml(Path(__file__).parents[2] / "recipes" / "configs" / "tiny.yaml")
    assert asked[0].patch == recipe.patch
    assert asked[0].adapter == recipe.adapter
    same = ("per_device_train_batch_size", "learning_rate", "lr_scheduler_type", "max_steps", "seed")
    assert [asked[0].training[name] for name in same] == [recipe.training[name] for name in same]
