"""Perplexity against closed forms, the bars, and what every number carries."""

import json
import logging
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_posext import patch_model
from hf_posext.evaluation.perplexity import perplexity
from hf_posext.evaluation.perplexity_report import PerplexityReport
from tests.evaluation.stubs import (
    BOS,
    VOCABULARY,
    ContextCounter,
    documents,
    known_nll,
    text_of,
    tiny_llama,
    word_tokenizer,
)

PROTOCOLS = ["tail", "full", "sliding", "disjoint"]
DOCUMENTS = documents(150, 97, 140)


def measure(model: nn.Module, docs: Any = DOCUMENTS, **settings: Any) -> PerplexityReport:
    """Perplexity on token ids, with few targets and few resamples."""
    defaults: dict[str, Any] = {"context_lengths": [8, 32], "resamples": 200}
    if settings.get("protocol", "tail") == "tail":
        defaults["targets"] = 8
    return perplexity(model, settings.pop("tokenizer", None), docs, **{**defaults, **settings})


def column(report: PerplexityReport, name: str, arm: str | None = None) -> list[Any]:
    """One column of the rows of an arm, the first one if none is named."""
    return [row[name] for row in report.rows if row["arm"] == (arm or report.arms[0])]


class Uniform(ContextCounter):
    """Every id is equally likely."""

    def __init__(self) -> None:
        super().__init__(weight=torch.zeros_like)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("bos", ["none", "every"])
def test_uniform_model_has_the_perplexity_of_its_vocabulary(protocol: str, bos: str) -> None:
    report = measure(Uniform(), protocol=protocol, bos=bos, tokenizer=word_tokenizer(adds_bos=True))
    assert column(report, "perplexity") == pytest.approx([VOCABULARY] * 2, rel=1e-6)
    assert column(report, "low") == pytest.approx([VOCABULARY] * 2, rel=1e-6)


@pytest.mark.parametrize("stride", [1, 3, 16, 25, 32])
@pytest.mark.parametrize("window", [32, 40])
def test_uniform_model_in_strided_windows(window: int, stride: int) -> None:
    report = measure(Uniform(), protocol="sliding", context_lengths=[window], stride=stride)
    assert column(report, "perplexity") == pytest.approx([VOCABULARY], rel=1e-6)
    assert column(report, "tokens") == [sum(len(document) - 1 for document in DOCUMENTS)]


def tokens_read(protocol: str, length: int, context: int, stride: int, bos: bool) -> Iterator[int]:
    """Tokens that the model has read before each target of one document, BOS included, target by target."""
    if protocol == "full":
        last = min(context, length - 1 + bos)
        yield from range(1, last + 1)
        return
    step = {"sliding": stride, "disjoint": context}[protocol]
    for position in range(0 if bos else 1, length):
        first_window_end = context - 1 if bos else context
        if position <= first_window_end:
            yield position + bos
            continue
        moves = math.ceil((position - first_window_end) / step)
        end = min(first_window_end + moves * step, length - 1)
        prefixed = bos and protocol == "sliding"
        start = end - context + prefixed
        yield position - start + prefixed


@pytest.mark.parametrize("protocol", ["full", "sliding", "disjoint"])
@pytest.mark.parametrize(("context", "stride"), [(8, 1), (8, 8), (16, 5), (33, 16), (64, 64)])
@pytest.mark.parametrize("bos", [False, True])
def test_nll_is_the_one_counted_target_by_target(protocol: str, context: int, stride: int, bos: bool) -> None:
    tokenizer = word_tokenizer(adds_bos=bos, bos_token="<s>") if bos else None
    settings: dict[str, Any] = {"stride": stride} if protocol == "sliding" else {}
    report = measure(
        ContextCounter(),
        protocol=protocol,
        context_lengths=[context, 80],
        tokenizer=tokenizer,
        batch_size=3,
        **settings,
    )
    read = [count for document in DOCUMENTS for count in tokens_read(protocol, len(document), context, stride, bos)]
    row = report.rows[0]
    assert row["tokens"] == len(read)
    assert row["nll"] == pytest.approx(sum(map(known_nll, read)) / len(read), rel=1e-6)
    assert row["perplexity"] == pytest.approx(math.exp(row["nll"]))


@pytest.mark.parametrize("targets", [1, 5, 8])
def test_tail_scores_the_deepest_tokens_of_each_length(targets: int) -> None:
    report = measure(ContextCounter(), targets=targets, endpoints_per_document=2)
    expected = [sum(map(known_nll, range(context - targets + 1, context + 1))) / targets for context in (8, 32)]
    assert column(report, "nll") == pytest.approx(expected, rel=1e-6)
    assert column(report, "tokens") == [2 * targets * len(DOCUMENTS)] * 2


def test_curve_is_the_nll_by_position() -> None:
    report = measure(ContextCounter(), protocol="full", context_lengths=[100])
    bucket = report.curve[4]
    positions = range(bucket["first"], bucket["last"] + 1)
    assert bucket["nll"] == pytest.approx(sum(map(known_nll, positions)) / len(positions), rel=1e-6)
    assert bucket["tokens"] == len(positions) * len(DOCUMENTS)
    starts, ends = ([bucket[end] for bucket in report.curve] for end in ("first", "last"))
    assert starts == [1, *(end + 1 for end in ends[:-1])]
    assert ends[-1] == 100
    assert sum(bucket["tokens"] for bucket in report.curve) == report.rows[0]["tokens"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_report_24_bos_is_fed_once_per_window_and_never_scored(protocol: str) -> None:
    tokenizer = word_tokenizer(adds_bos=True)
    with_bos = [torch.cat([torch.tensor([BOS]), document]) for document in DOCUMENTS]
    model = ContextCounter()
    given = measure(model, with_bos, protocol=protocol, bos="every", tokenizer=tokenizer)
    fed = [row for batch in model.read for row in batch if len(row) > 2]  # two tokens are fed to look at the model
    bare = measure(ContextCounter(), DOCUMENTS, protocol=protocol, bos="every", tokenizer=tokenizer)
    assert all(int(row[0]) == BOS and int((row == BOS).sum()) == 1 for row in fed)
    assert given.rows == bare.rows
    assert given.protocol["digest"] == bare.protocol["digest"]


def test_report_22_nothing_is_truncated_silently() -> None:
    model = tiny_llama()
    report = measure(model, documents(96, 96), protocol="sliding", context_lengths=[64])
    assert column(report, "tokens") == [2 * 95]
    tail = measure(model, documents(96, 40, 96), context_lengths=[64])
    assert (tail.skipped, tail.rows[0]["skipped"], tail.rows[0]["documents"]) == ([1], 1, 2)
    assert "1 of 3 documents are too short and were left out: 1." in tail.notes


def test_text_is_tokenised_without_special_tokens() -> None:
    tokenizer = word_tokenizer(adds_bos=True)
    as_text = measure(tiny_llama(), [text_of(document) for document in DOCUMENTS], tokenizer=tokenizer)
    assert as_text.rows == measure(tiny_llama(), DOCUMENTS, tokenizer=tokenizer).rows


def test_batches_chunks_and_the_order_of_lengths_do_not_matter() -> None:
    one = measure(tiny_llama(), context_lengths=[32, 8, 32])
    other = measure(tiny_llama(), context_lengths=[8, 32], batch_size=5, chunk=3)
    assert one.protocol["context_lengths"] == [8, 32]
    assert column(one, "nll") == pytest.approx(column(other, "nll"), rel=1e-6)


def test_truncate_is_the_unpatched_model_on_the_last_trained_tokens() -> None:
    report = measure(tiny_llama(), context_lengths=[16, 32, 64])
    none, truncate = column(report, "nll", "none"), column(report, "nll", "truncate")
    assert truncate == [none[0], none[1], none[1]]
    assert none[2] != none[1]


def test_arms_of_a_patched_model_are_its_method_and_the_unpatched_bars() -> None:
    lengths = {"context_lengths": [16, 32, 64]}
    unpatched = measure(tiny_llama(), **lengths)
    model = patch_model(tiny_llama(), "pi", 2)
    before = model(input_ids=DOCUMENTS[0][None]).logits
    report = measure(model, **lengths, bars=["truncate", "none"])
    assert report.arms == ["pi", "truncate", "none"]
    for arm in ("truncate", "none"):
        assert column(report, "nll", arm) == pytest.approx(column(unpatched, "nll", arm), rel=1e-6)
    assert column(report, "nll", "pi") != column(report, "nll", "none")
    torch.testing.assert_close(model(input_ids=DOCUMENTS[0][None]).logits, before, rtol=0, atol=0)


def test_report_109_the_patch_stands_beside_every_number() -> None:
    data = measure(patch_model(tiny_llama(), "pi", 2)).to_dict()
    assert (data["record"]["method"], data["record"]["factor"], data["trained_length"]) == ("pi", 2.0, 32)
    assert data["records"]["truncate"] is None
    assert measure(tiny_llama()).to_dict()["record"] is None


BEYOND: list[tuple[Callable[[], nn.Module], int, list[str]]] = [
    (tiny_llama, 32, []),
    (tiny_llama, 64, ["`none` is made for 32 tokens; 64 is beyond its reach."]),
    (lambda: patch_model(tiny_llama(), "pi", 2), 64, []),
    (lambda: patch_model(tiny_llama(), "pi", 2), 96, ["`pi` is made for 64 tokens; 96 is beyond its reach."]),
]


@pytest.mark.parametrize(("make", "length", "expected"), BEYOND)
def test_reports_109_and_120_one_warning_beyond_reach(
    make: Callable[[], nn.Module], length: int, expected: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hf_posext"):
        report = measure(make(), documents(150, 130), context_lengths=[16, length])
    assert [message.split(" Patch")[0] for message in caplog.messages] == expected
    assert [note.split(" Patch")[0] for note in report.notes] == expected


def test_arm_can_be_named() -> None:
    assert measure(tiny_llama(), arm="tuned").arms == ["tuned", "truncate", "window"]


def test_one_document_has_no_interval_and_says_so() -> None:
    report = measure(tiny_llama(), DOCUMENTS[:1])
    assert (report.rows[0]["low"], report.rows[0]["high"]) == (None, None)
    assert "One document only: there is no interval over documents." in report.notes


def test_truncate_without_a_trained_length_is_left_out_and_says_so() -> None:
    report = measure(ContextCounter())
    assert report.arms == ["none"]
    assert any("`truncate` is left out" in note for note in report.notes)


def test_seed_decides_the_interval_and_nothing_else() -> None:
    one, same, other = (measure(tiny_llama(), documents(*range(60, 80)), seed=seed) for seed in (0, 0, 1))
    assert one.rows == same.rows
    assert column(one, "nll") == column(other, "nll")
    assert column(one, "low") != column(other, "low")


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "protocol": ({"protocol": "slidng"}, ValueError, "Did you mean `sliding`"),
    "no lengths": ({"context_lengths": []}, ValueError, "`context_lengths` is empty"),
    "one number": ({"context_lengths": 64}, TypeError, "must be a list of numbers"),
    "bool": ({"context_lengths": [True]}, TypeError, "whole number of tokens, got True"),
    "fraction": ({"context_lengths": [8.5]}, TypeError, "got 8.5"),
    "zero": ({"context_lengths": [0]}, ValueError, "at least 1 token, got 0"),
    "too long": ({"context_lengths": [8, 4096]}, ValueError, "needs 4097 tokens; the longest document has 150"),
    "too long to slide": ({"context_lengths": [151], "protocol": "full"}, ValueError, "document has 150"),
    "stride of tail": ({"stride": 4}, ValueError, "`stride` has a meaning for the protocol `sliding` only"),
    "stride": ({"stride": 0, "protocol": "sliding"}, ValueError, "`stride` must be at least 1"),
    "targets": ({"targets": 9}, ValueError, "at most the shortest context length 8, got 9"),
    "targets of truncate": ({"targets": 40, "context_lengths": [64]}, ValueError, "trained length 32"),
    "batch": ({"batch_size": 0}, ValueError, "`batch_size` must be at least 1"),
    "batch type": ({"batch_size": 1.0}, TypeError, "`batch_size` must be a whole number"),
    "bar": ({"bars": ["truncatee"]}, ValueError, "Did you mean `truncate`"),
    "bar as text": ({"bars": "none"}, TypeError, r"Write bars=\['none'\]"),
    "bar of full": ({"bars": ["truncate"], "protocol": "full"}, ValueError, "for the protocol `tail` only"),
    "arm": ({"arm": "truncate"}, ValueError, "`arm` must not be the name of a bar"),
    "bos": ({"bos": "first"}, ValueError, "Unknown value of `bos`"),
    "vocabulary": ({"docs": [torch.full((99,), 50)]}, ValueError, "Document 0 has the token id 50"),
}


@pytest.mark.parametrize(("settings", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        measure(tiny_llama(), **settings)


def test_a_masked_model_is_refused_before_anything_is_read() -> None:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    with pytest.raises(ValueError, match="A causal LM head is needed"):
        measure(transformers.BertForMaskedLM(config), docs=3)


PROCESS = """
import json, sys
import torch
torch.set_num_threads(1)
from tests.evaluation.test_perplexity import DOCUMENTS, measure, tiny_llama
report = measure(tiny_llama(), DOCUMENTS, protocol="sliding", stride=16, batch_size=2)
with open(sys.argv[1], "w") as file:
    json.dump(report.to_dict(), file)
torch.distributed.destroy_process_group()
"""


def test_two_processes_give_the_rows_of_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    shared |= {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]), "ACCELERATE_USE_CPU": "true"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path / f"{rank}.json")],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    expected = measure(tiny_llama(), DOCUMENTS, protocol="sliding", stride=16, batch_size=2).to_dict()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [expected, expected]


def test_windows_of_all_ranks_are_kept_in_order() -> None:
    tokens: list[Tensor] = DOCUMENTS
    report = measure(ContextCounter(), tokens, protocol="disjoint")
    assert report.measurements[0].documents == (0, 1, 2)
    assert report.measurements[0].tokens == tuple(len(document) - 1 for document in tokens)
