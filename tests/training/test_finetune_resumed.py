"""Runs that were stopped, killed or finished: where they go on, and to which weights."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from hf_posext import finetune
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


RUN = """
    import os, signal, sys
    from transformers import TrainerCallback
    from hf_posext import finetune
    from hf_posext.training import run as module
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


def test_a_run_that_is_finished_is_not_trained_on(tmp_path: Path) -> None:
    first = finetune(tiny_llama(), None, documents(), config(tmp_path / "run"))
    again = finetune(tiny_llama(), None, documents(), config(tmp_path / "run"))
    assert (again.metrics["steps"], again.metrics["seconds"]) == (6, 0)
    assert torch.equal(logits(again.model, text(T)), logits(first.model, text(T)))


def test_the_seed_of_a_run_decides_its_adapter_whatever_was_drawn_before(tmp_path: Path) -> None:
    found = []
    for index, seed in enumerate((3, 3, 4)):
        model = tiny_llama()
        torch.rand(index + 1)
        settings = config(tmp_path / str(index), training={"seed": seed, "max_steps": 1, "learning_rate": 0.0})
        finetune(model, None, documents(), settings)
        found.append({name: value for name, value in weights(tmp_path / str(index)).items() if "lora_A" in name})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not any(torch.equal(found[0][name], found[2][name]) for name in found[0])


def test_losses_of_an_interrupted_run_are_those_of_one_that_was_not_however_seldom_they_are_logged(
    tmp_path: Path,
) -> None:
    often = {"logging_steps": 4}
    whole = finetune(tiny_llama(), None, documents(), config(tmp_path / "whole", training=often))
    finetune(tiny_llama(), None, documents(), config(tmp_path / "cut", training=often))
    for step in (4, 6):
        shutil.rmtree(tmp_path / "cut" / f"checkpoint-{step}", ignore_errors=True)
    again = finetune(tiny_llama(), None, documents(), config(tmp_path / "cut", training=often))
    losses = [[(each["step"], each["loss"]) for each in run.history if "loss" in each] for run in (whole, again)]
    assert losses[0] == losses[1]


def test_the_best_checkpoint_is_that_of_the_lowest_perplexity(tmp_path: Path) -> None:
    training = {"load_best_model_at_end": True, "save_total_limit": 3, "metric_for_best_model": f"eval_perplexity_{T}"}
    settings = config(tmp_path / "run", evaluation={"every": 2, "targets": 8}, training=training)
    result = finetune(tiny_llama(), None, documents(), settings, evaluation_documents=documents(4, seed=9))
    logged = {each["step"]: each[f"eval_perplexity_{T}"] for each in result.history if f"eval_perplexity_{T}" in each}
    best = min(logged, key=logged.__getitem__)
    expected, found = weights(tmp_path / "run" / f"checkpoint-{best}"), weights(tmp_path / "run")
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_beginning_anew_leaves_nothing_of_the_run_before(tmp_path: Path) -> None:
    finetune(tiny_llama(), None, documents(), config(tmp_path / "run"))
    anew = config(tmp_path / "run", resume=False, training={"max_steps": 2, "learning_rate": 1e-3})
    finetune(tiny_llama(), None, documents(), anew)
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    went_on = config(tmp_path / "run", training={"max_steps": 2, "learning_rate": 1e-3})
    assert finetune(tiny_llama(), None, documents(), went_on).metrics["seconds"] == 0


def test_a_checkpoint_that_was_not_written_to_its_end_does_not_count(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", training={"max_steps": 4})
    finetune(tiny_llama(), None, documents(), settings)
    (tmp_path / "run" / "checkpoint-4" / "trainer_state.json").write_text('{"glo')
    again = finetune(tiny_llama(), None, documents(), settings)
    assert [each["step"] for each in again.history if "loss" in each] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "run" / "checkpoint-4" / "trainer_state.json").read_text())["global_step"] == 4


def test_a_signal_handler_is_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    finetune(tiny_llama(), None, documents(), config(tmp_path / "run", training={"max_steps": 1}))
    assert signal.getsignal(signal.SIGTERM) is before
