"""`posext compare`: the numbers of `compare`, from files, as a table, as JSON, and as a folder with a page."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_posext.cli.compare import methods_for, parse_methods
from hf_posext.demo import held_out_documents, load_demo
from hf_posext.evaluation.comparison import compare

TEXTS = [text[:4000] for text in held_out_documents()[:2]]
FILES = ["report.html", "report.json", "plot.png", "report.csv", "report.md", "tradeoff.png"]
WORDS = ["--context-lengths", "256,512", "--endpoints", "1", "--text-column", "body"]


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """Two short documents, one per line."""
    path = tmp_path / "books.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


def test_the_report_is_that_of_compare(posext: Any, books: Path) -> None:
    methods = "pi,yarn:beta_fast=8:dynamic"
    outcome = posext("compare", "demo:llama", "--text", books, *WORDS, "--methods", methods, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    model, tokenizer, _ = load_demo("llama")
    report = compare(
        model,
        tokenizer,
        [{"body": text} for text in TEXTS],
        text_column="body",
        methods=["pi", {"method": "yarn", "beta_fast": 8, "dynamic": True}],
        context_lengths=[256, 512],
        endpoints_per_document=1,
    )
    assert outcome.data == report.to_dict()
    arms = ["none", "truncate", "window", "pi", "yarn beta_fast=8 (dynamic)"]
    assert [row["arm"] for row in outcome.data["rows"]] == [arm for arm in arms for _ in range(2)]


def test_out_gets_every_form_of_the_report(posext: Any, books: Path, tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    words = [*WORDS, "--methods", "pi", "--once", "--bars", "truncate", "--out", out]
    outcome = posext("compare", "demo:llama", "--text", books, *words)
    assert outcome.code == 0
    assert outcome.out.splitlines()[-len(FILES) :] == [f"saved {out / name}" for name in FILES]
    assert sorted(path.name for path in out.iterdir()) == sorted(FILES)
    assert "NLL minus that of `truncate`" in outcome.out
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["records"]["pi"]["factor"] == 2.0
    assert (out / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_the_settings_reach_the_comparison(posext: Any, books: Path) -> None:
    words = ["--context-lengths", "300", "--text-column", "body", "--methods", "pi", "--documents", "1"]
    more = [
        "--protocol",
        "sliding",
        "--stride",
        "100",
        "--batch-size",
        "2",
        "--bars",
        "none",
        "--prefill-chunk-size",
        "64",
    ]
    data = posext("compare", "demo:llama", "--text", books, *words, *more, "--json").data
    settings = ("protocol", "stride", "batch_size", "max_documents", "bars", "prefill_chunk_size")
    assert [data["protocol"][name] for name in settings] == ["sliding", 100, 2, 1, ["none"], 64]


def test_without_methods_all_that_apply_are_measured(posext: Any, books: Path) -> None:
    words = ["--context-lengths", "300", "--text-column", "body", "--targets", "8", "--endpoints", "1", "--bars", ""]
    data = posext("compare", "demo:llama", "--text", books, "--documents", "1", *words, "--json").data
    arms = {row["arm"] for row in data["rows"]}
    assert arms == set(methods_for(load_demo("llama")[0]))
    assert {"pi", "ntk", "yarn", "self_extend", "rerope", "alibi", "nope"} <= arms
    assert not {"window", "abf", "longrope", "tile"} & arms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pi, ntk,", [{"method": "pi"}, {"method": "ntk"}]),
        ("yarn:dynamic", [{"method": "yarn", "dynamic": True}]),
        ("yarn:beta_fast=8:truncate=false", [{"method": "yarn", "beta_fast": 8, "truncate": False}]),
        ("yarn:beta_fast=auto", [{"method": "yarn", "beta_fast": "auto"}]),
    ],
)
def test_methods_have_their_options_behind_colons(text: str, expected: list[dict[str, Any]]) -> None:
    assert parse_methods(text) == expected


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--methods", "yarn:fast"], "got 'fast' in 'yarn:fast'"),
        (["--methods", "yran"], "Did you mean `yarn`"),
        (["--methods", ""], "`methods` is empty"),
        (["--methods", "tile"], "`tile` is left out: `tile` has no meaning for a rotary encoding"),
        (["--methods", "yarn:beta=8"], "Unknown option of `yarn`"),
        (["--context-lengths", "256"], "beyond the trained length 256"),
        (["--context-lengths", "a"], "whole numbers between commas"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(posext: Any, books: Path, words: list[str], named: str) -> None:
    outcome = posext("compare", "demo:llama", "--text", books, *WORDS, *words)
    assert outcome.code == 2
    assert named in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_a_masked_lm_is_refused(posext: Any, books: Path) -> None:
    outcome = posext("compare", "demo:bert", "--text", books, *WORDS, "--methods", "pi")
    assert outcome.code == 2
    assert "BertForMaskedLM" in outcome.err
