"""`posext demo --model bert`: every arm on the same masked tokens, and sentences that follow the numbers."""

import json

import pytest
import torch

from hf_posext import inspect_model, patched
from hf_posext.cli import demo_encoder
from hf_posext.cli.demo_encoder import DYNAMIC, KEEPING, RANDOM, TABLES
from hf_posext.demo import load_demo

LENGTHS = (256, 512)
SCOPE = demo_encoder.EncoderScope(factors=(1, 2), documents=3, spans=1, draws=1)


@pytest.fixture(scope="module")
def measured():
    model, tokenizer, documents = load_demo("bert")
    rows = model.bert.embeddings.position_embeddings.weight.detach().clone()
    report = demo_encoder.EncoderMeter(model, tokenizer, documents, LENGTHS, SCOPE).measure()
    return model, rows, report


def sums(report, arm, length, positions="all"):
    found = [each for each in report.measurements if (each.arm, each.context_length) == (arm, length)]
    return next(each for each in found if each.positions == positions)


def test_the_arms_are_the_methods_the_bar_and_random_rows(measured):
    assert set(measured[2].arms) == {DYNAMIC, "truncate", "none", *TABLES, RANDOM}


@pytest.mark.parametrize("arm", [*TABLES, RANDOM, DYNAMIC])
def test_at_the_trained_length_every_arm_is_the_unpatched_model(measured, arm):
    assert sums(measured[2], arm, 256).nll == sums(measured[2], "none", 256).nll


@pytest.mark.parametrize("arm", [*TABLES, RANDOM, "truncate"])
def test_beyond_it_every_arm_has_the_same_targets(measured, arm):
    for positions in ("all", "<= 256", "> 256"):
        one, other = (sums(measured[2], name, 512, positions) for name in (arm, DYNAMIC))
        assert (one.documents, one.tokens) == (other.documents, other.tokens)


def test_patched_once_for_the_longest_text_is_the_same_as_patched_for_it(measured):
    assert sums(measured[2], DYNAMIC, 512).nll == pytest.approx(sums(measured[2], "pi", 512).nll, rel=1e-6)


def test_the_model_is_as_it_was_afterwards(measured):
    model, rows, _ = measured
    assert inspect_model(model).record is None
    assert torch.equal(model.bert.embeddings.position_embeddings.weight, rows)


def test_random_rows_keep_the_old_ones_and_are_taken_back():
    model, _, _ = load_demo("bert")
    with patched(model, "tile", 2):
        weight = model.bert.embeddings.position_embeddings.weight
        before = weight.detach().clone()
        with demo_encoder.random_rows(model, 256):
            assert torch.equal(weight[:256], before[:256])
            assert not torch.equal(weight[256:], before[256:])
            assert weight[256:].std() == pytest.approx(float(before[:256].std()), rel=0.1)
        assert torch.equal(weight, before)


def test_sentences_follow_the_numbers(measured):
    report = measured[2]
    sentences = " ".join(demo_encoder.read(report, LENGTHS))
    perplexity = {(row["arm"], row["context_length"], row["positions"]): row["perplexity"] for row in report.rows}
    best = min(TABLES, key=lambda arm: perplexity[arm, 512, "all"])
    assert f"With 512 tokens `{best}` is the best with {perplexity[best, 512, 'all']:.1f}" in sentences
    assert f"({perplexity[RANDOM, 512, '> 256']:.1f})" in sentences
    assert f"`{DYNAMIC}` reads to the last bit as the unpatched model" in sentences
    assert set(KEEPING) < set(TABLES)


def test_the_command_writes_rows_with_their_positions(posext, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_encoder, "QUICK", SCOPE)
    data = posext("demo", "--model", "bert", "--quick", "--json", "--threads", "1", "--out", tmp_path).data
    assert {row["positions"] for row in data["rows"]} == {"all", "<= 256", "> 256"}
    assert data["inspect"]["sites"][0]["mechanism"] == "learned"
    assert data["reading"]
    assert (tmp_path / "plot.png").is_file()
    saved = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert saved == {name: value for name, value in data.items() if name != "files"}
