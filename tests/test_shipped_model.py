"""What the embedded model must be for the rest to mean anything: broken past its window, mended by YaRN, a copier."""

import random

import pytest
import torch

import hf_posext
from hf_posext.cli import demo_encoder
from hf_posext.demo import load_demo
from hf_posext.evaluation.probes import copy_sequence

TRIALS, PAYLOAD, ROOM = 48, 32, 255


@pytest.fixture(scope="module")
def demo():
    return load_demo("llama")


def tail_perplexity(demo, length):
    model, tokenizer, documents = demo
    report = hf_posext.perplexity(
        model, tokenizer, documents, context_lengths=[256, 1024], endpoints_per_document=1, bars=[], progress=False
    )
    return next(row["perplexity"] for row in report.rows if row["context_length"] == length)


def test_unpatched_perplexity_at_four_times_the_window_is_three_times_as_large(demo):
    assert tail_perplexity(demo, 1024) > 3 * tail_perplexity(demo, 256)


def test_yarn_four_brings_it_back_within_a_third(demo):
    inside = tail_perplexity(demo, 256)
    with hf_posext.patched(demo[0], "yarn", 4):
        assert tail_perplexity(demo, 1024) < 1.3 * inside


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_it_copies_inside_its_window(name):
    model, tokenizer, documents = load_demo(name)
    rng = random.Random(0)
    filler = tokenizer.backend_tokenizer.encode(documents[0][:6000], add_special_tokens=False).ids
    vocabulary = [token for token in range(len(tokenizer)) if token not in tokenizer.all_special_ids]
    right = total = 0
    for _ in range(TRIALS):
        distance = rng.randint(PAYLOAD, ROOM - PAYLOAD)
        lead = ROOM - PAYLOAD - distance
        task = copy_sequence(rng, filler, vocabulary, payload=PAYLOAD, distance=distance, lead=lead)
        tokens = torch.tensor([[tokenizer.bos_token_id, *task.tokens]])
        with torch.no_grad():
            guesses = model(tokens).logits[0].argmax(-1)
        right += sum(int(guesses[position]) == task.tokens[position] for position in task.scored)
        total += len(task.scored)
    assert right / total >= 0.8


def test_gpt_neox_is_broken_past_its_window_and_mended_by_yarn():
    demo = load_demo("gpt_neox")
    inside = tail_perplexity(demo, 256)
    assert tail_perplexity(demo, 1024) > 1.3 * inside
    with hf_posext.patched(demo[0], "yarn", 4):
        assert tail_perplexity(demo, 1024) < 1.1 * inside


def test_longer_tables_of_bert_are_better_than_rows_drawn_at_random():
    """Untuned, at positions beyond the trained length of 512 tokens; in nats per token, paired over documents."""
    model, tokenizer, documents = load_demo("bert")
    scope = demo_encoder.EncoderScope(factors=(1, 2), spans=1, draws=1)
    report = demo_encoder.EncoderMeter(model, tokenizer, documents, (256, 512), scope).measure()
    for method in ("tile", "hierarchical", "pi"):
        assert report.difference(method, demo_encoder.RANDOM, 512, "> 256")["high"] < 0
    rows = {(row["arm"], row["context_length"], row["positions"]): row["perplexity"] for row in report.rows}
    assert rows["none", 256, "all"] < 40
