"""`posext suggest`: a table with the command to copy, or JSON; with text it measures."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from hf_posext.cli.suggest import run
from hf_posext.demo import held_out_documents

app = typer.Typer()
app.command("suggest")(run)


def posext(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """The beginning of two books, some 600 tokens each."""
    path = tmp_path / "books.jsonl"
    rows = [json.dumps({"body": text[:3000]}) for text in held_out_documents()[:2]]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def test_it_shows_the_reasons_and_the_command_to_copy() -> None:
    outcome = posext("demo:llama", "--target-length", 1024)
    assert outcome.exit_code == 0, outcome.output
    assert "LlamaForCausalLM, 256 -> 1024 (x4), rules: self_extend" in outcome.stdout
    command = "posext patch demo:llama --out OUT --method self_extend --target-length 1024 --option group_size=dynamic"
    assert outcome.stdout.splitlines()[-1] == command


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--portable"], {"beta_fast": "auto"}),
        (["--tuned"], {"dynamic": True}),
        (["--tuned", "--no-short-text"], {"beta_fast": "auto"}),
    ],
    ids=str,
)
def test_what_is_wanted_reaches_the_rules(words: list[str], options: dict[str, object]) -> None:
    data = json.loads(posext("demo:llama", "--target-length", 1024, "--json", *words).stdout)
    assert (data["method"], data["options"]) == ("yarn", options)


def test_nothing_to_do_shows_no_command() -> None:
    outcome = posext("demo:bert", "--target-length", 256)
    assert "leave the model as it is" in outcome.stdout
    assert "posext patch" not in outcome.stdout


def test_with_text_it_measures(texts: Path) -> None:
    words = ["--text", texts, "--text-column", "body", "--time-budget", 600, "--json"]
    data = json.loads(posext("demo:llama", "--target-length", 512, *words).stdout)
    assert data["basis"] == "measured"
    assert {row["documents"] for row in data["comparison"]["rows"]} == {2}
    assert data["versus_truncate"] in ("better", "worse", "not clearly different")


def test_too_short_a_text_is_refused(texts: Path) -> None:
    outcome = posext("demo:llama", "--target-length", 4096, "--text", texts, "--text-column", "body")
    assert isinstance(outcome.exception, ValueError)
    assert "`documents` must hold at least one of 4097 tokens" in str(outcome.exception)


def test_the_trained_length_can_be_given() -> None:
    words = ["--original-max-position-embeddings", 128, "--json"]
    data = json.loads(posext("demo:llama", "--target-length", 512, *words).stdout)
    assert data["trained_length"] == 128
    assert "--option original_max_position_embeddings=128" in data["command"]
