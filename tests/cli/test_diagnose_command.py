"""`posext diagnose`: a table or JSON, and exit code 1 where something is wrong."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from hf_posext import patch_model
from hf_posext.cli.diagnose import run
from tests.architectures import tiny_model
from tests.diagnosis.healthy import MODELS

app = typer.Typer()
app.command("diagnose")(run)


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "healthy")
    return tmp_path / "healthy"


@pytest.fixture
def silent(tmp_path: Path) -> Path:
    """A table of zeros."""
    model = MODELS["gpt2"]()
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
    model.save_pretrained(tmp_path / "silent")
    return tmp_path / "silent"


def test_a_healthy_model_is_0(healthy: Path) -> None:
    outcome = CliRunner().invoke(app, [str(healthy)])
    assert outcome.exit_code == 0, outcome.output
    assert "LlamaForCausalLM, 32 tokens: nothing wrong" in outcome.stdout


def test_a_faulty_model_is_1_and_its_faults_are_shown(silent: Path) -> None:
    outcome = CliRunner().invoke(app, [str(silent)])
    assert outcome.exit_code == 1
    assert "magnitudes" in outcome.stdout
    assert "wrong" in outcome.stdout


def test_json_is_one_document_also_with_faults(silent: Path) -> None:
    outcome = CliRunner().invoke(app, [str(silent), "--json"])
    assert outcome.exit_code == 1
    data = json.loads(outcome.stdout)
    assert data["is_healthy"] is False
    assert "wrong" in {finding["status"] for finding in data["findings"] if finding["name"] == "magnitudes"}


@pytest.mark.parametrize("method", ["pi", "self_extend"])
def test_a_saved_patch_is_diagnosed_in_force(tmp_path: Path, method: str) -> None:
    patch_model(tiny_model("llama"), method, 2).save_pretrained(tmp_path)
    outcome = CliRunner().invoke(app, [str(tmp_path), "--json"])
    assert outcome.exit_code == 0, outcome.output
    data = json.loads(outcome.stdout)
    assert data["usable_length"] == 64
    assert {finding["status"] for finding in data["findings"] if finding["name"] == "patch"} == {"ok"}
