"""`posext demo`: one set of targets for every number, and sentences that follow the numbers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hf_posext
from hf_posext.cli import demo
from hf_posext.cli.demo import (
    ABLATIONS,
    DYNAMIC,
    METHODS,
    PATCHED,
    Scope,
    measure,
    price_of_dynamic,
    read,
    verdict,
)
from hf_posext.demo import load_demo
from hf_posext.evaluation.comparison_report import ComparisonReport
from hf_posext.evaluation.perplexity_report import Measurement

TINY = Scope(factors=(1, 2), documents=2, endpoints=3, targets=32)


@pytest.fixture(scope="module")
def story() -> ComparisonReport:
    """Two documents, 256 and 512 tokens."""
    model, tokenizer, documents = load_demo("llama")
    return measure(model, tokenizer, documents, TINY)


def row_of(rows: list[dict[str, Any]], arm: str, context_length: int) -> dict[str, Any]:
    """The row of one arm at one length."""
    (row,) = [row for row in rows if (row["arm"], row["context_length"]) == (arm, context_length)]
    return row


@pytest.mark.parametrize("method", METHODS)
def test_each_method_is_measured_on_the_targets_of_the_bars(story: ComparisonReport, method: str) -> None:
    """One call of `perplexity` at both lengths chooses the targets; the demo patches anew for each length."""
    model, tokenizer, documents = load_demo("llama")
    hf_posext.patch_model(model, method, 2)
    report = hf_posext.perplexity(
        model, tokenizer, documents[:2], context_lengths=[256, 512], endpoints_per_document=3, targets=32
    )
    assert row_of(story.rows, method, 512) == row_of(report.rows, method, 512)
    assert row_of(story.price.rows, method, 256) == row_of(report.rows, method, 256)
    for bar in ("truncate", "window"):
        assert row_of(story.rows, bar, 512) == row_of(report.rows, bar, 512)


def test_the_dynamic_arm_is_patched_once_for_the_longest_context(story: ComparisonReport) -> None:
    model, tokenizer, documents = load_demo("llama")
    hf_posext.patch_model(model, "yarn", 2, dynamic=True)
    report = hf_posext.perplexity(
        model,
        tokenizer,
        documents[:2],
        context_lengths=[256, 512],
        endpoints_per_document=3,
        targets=32,
        arm=DYNAMIC,
    )
    found = [row_of(story.rows, DYNAMIC, length) for length in (256, 512)]
    assert found == [row_of(report.rows, DYNAMIC, length) for length in (256, 512)]
    record = story.records[DYNAMIC]
    assert record is not None
    assert (record["method"], record["factor"], record["dynamic"]) == ("yarn", 2.0, True)


@pytest.mark.parametrize("method", ABLATIONS)
def test_ablations_are_patched_once_for_the_longest_context(story: ComparisonReport, method: str) -> None:
    model, tokenizer, documents = load_demo("llama")
    hf_posext.patch_model(model, method, 2)
    report = hf_posext.perplexity(
        model, tokenizer, documents[:2], context_lengths=[256, 512], endpoints_per_document=3, targets=32, bars=[]
    )
    assert [row_of(story.rows, method, length) for length in (256, 512)] == report.rows
    assert row_of(story.price.rows, method, 256) == report.rows[0]
    record = story.records[method]
    assert record is not None
    assert (record["method"], record["factor"]) == (method, 2.0)


@pytest.mark.parametrize("arm", ["truncate", "window", *PATCHED])
def test_at_the_trained_length_every_arm_is_the_unpatched_model(story: ComparisonReport, arm: str) -> None:
    unpatched = row_of(story.rows, "none", 256)
    assert row_of(story.rows, arm, 256) == {**unpatched, "arm": arm}
    assert row_of(story.price.rows, "none", 256) == unpatched


def test_short_text_costs_the_dynamic_arm_nothing(story: ComparisonReport) -> None:
    unpatched = row_of(story.price.rows, "none", 256)
    assert row_of(story.price.rows, DYNAMIC, 256) == {**unpatched, "arm": DYNAMIC}
    assert f"{unpatched['perplexity']:.1f} with `{DYNAMIC}`, {unpatched['perplexity']:.1f} unpatched" in read(story)[-2]
    assert read(story)[-2].endswith("is that of the unpatched model to the last bit.")


def test_a_price_of_the_dynamic_arm_would_be_said(story: ComparisonReport) -> None:
    def changed(measurement: Measurement) -> Measurement:
        if measurement.arm != DYNAMIC:
            return measurement
        return replace(
            measurement, nll=tuple(a + 0.5 * b for a, b in zip(measurement.nll, measurement.tokens, strict=True))
        )

    dearer = replace(story, short=[changed(each) for each in story.short])
    assert "against unpatched is clearly worse (+0.500 nats per token" in price_of_dynamic(dearer)


def test_the_records_say_the_factor_of_each_length_beyond_the_trained_one(story: ComparisonReport) -> None:
    record = story.records["yarn"]
    assert record is not None
    assert {length: step["factor"] for length, step in record["by_context_length"].items()} == {512: 2.0}


def test_the_model_is_unpatched_afterwards() -> None:
    model, tokenizer, documents = load_demo("llama")
    measure(model, tokenizer, documents, replace(TINY, documents=1, endpoints=1))
    assert hf_posext.inspect_model(model).record is None


def invented(story: ComparisonReport, **nll: float) -> ComparisonReport:
    """A report with the given mean NLL of an arm at 512 tokens, in both documents alike."""

    def changed(measurement: Measurement) -> Measurement:
        if measurement.context_length == 512 and measurement.arm in nll:
            return replace(measurement, nll=tuple(nll[measurement.arm] * tokens for tokens in measurement.tokens))
        return measurement

    return replace(story, measurements=[changed(each) for each in story.measurements])


def test_sentences_follow_the_numbers(story: ComparisonReport) -> None:
    others = dict.fromkeys(PATCHED, 4.0)
    good = read(invented(story, **{**others, "none": 5.0, "truncate": 3.0, "window": 2.0, "pi": 2.0}))
    assert "148.4 with 512 tokens of context, 20.1 with only the last 256 of them, 7.4 with a window of 256" in good[0]
    assert "clearly worse (+2.000 nats per token" in good[0]
    assert "`pi` is the best with 7.4, against 148.4 unpatched and 20.1 truncated" in good[1]
    assert "Against truncating it is clearly better (-1.000 nats per token" in good[1]
    assert "against a window not clearly different (+0.000 nats per token" in good[1]
    bad = read(invented(story, **{**others, "none": 2.0, "truncate": 3.0, "window": 3.25, "ntk": 3.5}))
    assert "clearly better (-1.000" in bad[0]
    assert "`ntk` is the best" in bad[1]
    assert "Against truncating it is clearly worse (+0.500" in bad[1]
    assert "against a window clearly worse (+0.250" in bad[1]


def test_the_ablations_are_called_untuned(story: ComparisonReport) -> None:
    sentence = read(invented(story, alibi=3.0, nope=4.0))[-1]
    assert "20.1 with `alibi` and 54.6 with `nope` at 512 tokens of context" in sentence
    assert "untuned ablations" in sentence
    assert "need tuning" in sentence
    assert "has to be tuned" in story.notes[0]


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(-0.2, -0.1, "clearly better"), (0.1, 0.2, "clearly worse"), (-0.1, 0.1, "not clearly different")],
)
def test_clearly_means_that_the_interval_leaves_out_zero(low: float, high: float, word: str) -> None:
    assert verdict({"difference": (low + high) / 2, "low": low, "high": high}).startswith(f"{word} (")


def test_one_document_gives_no_clearly() -> None:
    assert verdict({"difference": -0.5, "low": None, "high": None}) == (
        "better by 0.500 nats per token, on one document only"
    )


def test_quick_twice_gives_the_same_document_and_files(
    posext: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "QUICK", replace(TINY, endpoints=1))
    words = ["demo", "--quick", "--threads", "1", "--out", tmp_path, "--json"]
    first, plot = posext(*words), (tmp_path / "plot.png").read_bytes()
    second = posext(*words)
    assert first.code == 0
    assert first.out == second.out
    assert plot.startswith(b"\x89PNG")
    assert plot == (tmp_path / "plot.png").read_bytes()
    assert {"rows", "protocol", "inspect", "short_text", "reading", "files"} <= set(first.data)
    assert {row["arm"] for row in first.data["rows"]} == {"none", "truncate", "window", *PATCHED, *ABLATIONS}
    short = [(row["arm"], row["context_length"]) for row in first.data["short_text"]]
    assert short == [(arm, 256) for arm in ("none", *PATCHED, *ABLATIONS)]
    saved = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert saved == {name: value for name, value in first.data.items() if name != "files"}


def test_the_table_is_on_stdout_and_the_time_on_stderr(
    posext: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "QUICK", replace(TINY, endpoints=1))
    monkeypatch.chdir(tmp_path)
    outcome = posext("demo", "--quick")
    assert "trained for 256 tokens, not patched" in outcome.out
    assert "ntk_by_parts" in outcome.out
    assert "nope - truncate at 512: +" in outcome.out
    assert "Patched once, for 512 tokens: `yarn (dynamic)`, `alibi`, `nope`." in " ".join(outcome.out.split())
    assert "need tuning before they are of any use" in " ".join(outcome.out.split())
    assert "- Unpatched: " in outcome.out
    assert "saved posext_demo/plot.png" in outcome.out
    assert outcome.err.startswith("took ")
    assert len(outcome.err.splitlines()) == 1
