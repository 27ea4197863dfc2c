"""LongPPL against closed forms: which tokens are key tokens, what is summed over them, and what the report says."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_posext import patch_model
from hf_posext.evaluation.longppl import longppl
from hf_posext.evaluation.longppl_report import LongPplReport
from hf_posext.evaluation.perplexity import perplexity
from tests.evaluation.stubs import BOS, VOCABULARY, ContextCounter, documents, tiny_llama, word_tokenizer

PERIOD, SHORT, LONG = 20, 16, 64
SURE = 8.0  # the logit of a token that stood one period before, all others 0


def periodic(length: int, seed: int = 0) -> Tensor:
    """Twenty different tokens over and over."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:PERIOD]
    return order.repeat(length // PERIOD + 1)[:length]


DOCUMENTS = [periodic(70), periodic(50, 1), periodic(90, 2)]


class Rereader(nn.Module):
    """Expects what stood one period before; where the text does not reach as far, every id is as likely."""

    def __init__(self, logit: float = SURE) -> None:
        super().__init__()
        self.logit = logit

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        """Logits [B, L, V]."""
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        reach = PERIOD - 1  # from the token that predicts
        known = input_ids[:, : max(0, input_ids.shape[1] - reach)]
        logits[:, reach:].scatter_(2, known[..., None], self.logit)
        return SimpleNamespace(logits=logits)


def known_nll(logit: float) -> float:
    """NLL in nats of a token that is expected with some logit."""
    return math.log(math.exp(logit) + VOCABULARY - 1) - logit


def measure(model: nn.Module, docs: Any = DOCUMENTS, **settings: Any) -> LongPplReport:
    """LongPPL on token ids, at 64 tokens against 16."""
    defaults: dict[str, Any] = {"context_length": LONG, "short_length": SHORT, "resamples": 200}
    return longppl(model, settings.pop("tokenizer", None), docs, **{**defaults, **settings})


@pytest.mark.parametrize("stride", [1, 4, 5, 16, None])
def test_key_tokens_are_those_that_only_the_long_context_explains(stride: int | None) -> None:
    report = measure(Rereader(), reference=Rereader(), stride=stride)
    ends = [min(len(ids), LONG + 1) for ids in DOCUMENTS]
    assert report.key_tokens == [list(range(PERIOD, end)) for end in ends]
    assert report.key_count == sum(end - PERIOD for end in ends)


@pytest.mark.parametrize("logit", [0.0, 3.0, SURE])
def test_longppl_is_that_of_the_key_tokens_alone(logit: float) -> None:
    report = measure(Rereader(logit), reference=Rereader())
    assert report.longppl == pytest.approx(math.exp(known_nll(logit)), rel=1e-5)
    keys, scored = report.key_count, sum(min(len(ids), LONG + 1) - 1 for ids in DOCUMENTS)
    mean = (keys * known_nll(logit) + (scored - keys) * math.log(VOCABULARY)) / scored
    assert report.perplexity == pytest.approx(math.exp(mean), rel=1e-5)


@pytest.mark.parametrize(("alpha", "is_key"), [(math.log(VOCABULARY) - known_nll(SURE) - 0.01, True), (3.9, False)])
def test_the_gain_must_be_above_alpha(alpha: float, is_key: bool) -> None:
    assert (measure(Rereader(), reference=Rereader(), alpha=alpha).key_count > 0) == is_key


@pytest.mark.parametrize(("beta", "is_key"), [(-known_nll(3.0) - 0.01, True), (-known_nll(3.0) + 0.01, False)])
def test_the_likelihood_must_then_be_above_beta(beta: float, is_key: bool) -> None:
    assert (measure(Rereader(), reference=Rereader(3.0), alpha=0.5, beta=beta).key_count > 0) == is_key


@pytest.mark.parametrize("starts_with_bos", [False, True])
@pytest.mark.parametrize("bos", ["every", "none"])
def test_a_bos_is_context_and_no_index_moves(bos: str, starts_with_bos: bool) -> None:
    docs = [torch.cat([torch.tensor([BOS]), ids]) if starts_with_bos else ids for ids in DOCUMENTS]
    tokenizer = word_tokenizer(adds_bos=True, bos_token="<s>")
    report = measure(Rereader(), docs, reference=Rereader(), bos=bos, tokenizer=tokenizer)
    first = PERIOD + starts_with_bos
    room = LONG + (bos == "none" or starts_with_bos)  # a BOS in front takes the place of one token that is fed
    assert report.key_tokens == [list(range(first, min(len(ids), room))) for ids in docs]


def test_plain_perplexity_beside_it_is_that_of_one_pass() -> None:
    model, docs = tiny_llama(), documents(60, 45, 70)
    report = longppl(model, None, docs, context_length=50, reference=tiny_llama(), alpha=0, beta=-9, resamples=200)
    whole = perplexity(model, None, docs, context_lengths=[50], protocol="full", resamples=200).rows[0]
    row = report.rows[0]
    assert [row[key] for key in ("nll", "low", "high", "tokens")] == [
        whole[key] for key in ("nll", "low", "high", "tokens")
    ]


def slow_keys(model: nn.Module, ids: Tensor, long: int, short: int, stride: int) -> list[int]:
    """Key tokens of one document, each target in a pass of its own over exactly what it may see."""
    found = []
    for place in range(1, min(len(ids), long + 1)):
        start = max(0, -(-(place - short) // stride) * stride) if place > short else 0
        with torch.no_grad():
            seen = model(input_ids=ids[None, :place]).logits[0, -1].log_softmax(-1)[ids[place]]
            near = model(input_ids=ids[None, start:place]).logits[0, -1].log_softmax(-1)[ids[place]]
        if seen - near > 0.5 and seen > -6:
            found.append(place)
    return found


def test_key_tokens_of_a_real_model_are_those_found_one_by_one() -> None:
    docs = documents(70, 55)
    report = measure(tiny_llama(), docs, reference=tiny_llama(), stride=4, alpha=0.5, beta=-6)
    assert report.key_tokens == [slow_keys(tiny_llama(), ids, LONG, SHORT, 4) for ids in docs]
    assert report.key_count > 5


def test_the_short_context_is_the_trained_length_if_none_is_given() -> None:
    model = patch_model(tiny_llama(), "yarn", 2)
    report = longppl(model, None, documents(80), context_length=LONG, reference=tiny_llama())
    assert report.selection == {
        "chosen_by": "a reference model", "short_length": 32, "stride": 8, "alpha": 2.0, "beta": -2.0,
    }  # fmt: skip
    assert report.record is not None
    assert report.arms == ["yarn"]


def test_a_model_that_judges_itself_is_noted() -> None:
    report = measure(Rereader())
    assert report.selection["chosen_by"] == "the model itself"
    assert any("chose the key tokens itself" in note for note in report.notes)
    assert not any("chose the key tokens itself" in note for note in measure(Rereader(), reference=Rereader()).notes)


def as_indices(keys: list[list[int]]) -> list[Any]:
    return [*keys]


def as_masks(keys: list[list[int]]) -> list[Any]:
    return [[place in found for place in range(len(ids))] for found, ids in zip(keys, DOCUMENTS, strict=True)]


@pytest.mark.parametrize("form", [as_indices, as_masks])
def test_given_key_tokens_are_scored(form: Any) -> None:
    chosen = measure(Rereader(), reference=Rereader())
    given = measure(Rereader(3.0), key_tokens=form(chosen.key_tokens))
    assert given.key_tokens == chosen.key_tokens
    assert given.longppl == pytest.approx(math.exp(known_nll(3.0)), rel=1e-5)
    assert given.selection == {"chosen_by": "given"}


def test_given_tokens_that_are_no_targets_are_left_out() -> None:
    report = measure(Rereader(), key_tokens=[[0, 30], [], [LONG, LONG + 1]])
    assert report.key_tokens == [[30], [], [LONG]]
    assert [row["documents"] for row in report.rows] == [3, 2]


def test_without_a_key_token_there_is_no_longppl() -> None:
    report = measure(Rereader(), reference=ContextCounter())
    assert (report.longppl, report.key_count) == (None, 0)
    assert report.to_dict()["longppl"] is None
    assert any("No token is a key token" in note for note in report.notes)
    assert [row["positions"] for row in report.rows] == ["all"]
    assert "-" in str(report)
    report.plot()


@pytest.fixture(scope="module")
def joined() -> LongPplReport:
    """Two arms on the same key tokens."""
    one = measure(Rereader(), reference=Rereader(), arm="sure")
    return LongPplReport.join([one, measure(Rereader(2.0), key_tokens=one.key_tokens, arm="unsure")])


def test_arms_are_joined_on_the_same_key_tokens(joined: LongPplReport) -> None:
    assert joined.arms == ["sure", "unsure"]
    found = joined.difference("unsure", "sure", LONG, "key tokens")
    assert found["difference"] == pytest.approx(known_nll(2.0) - known_nll(SURE), rel=1e-4)
    assert joined.key_count > 0


def test_other_key_tokens_cannot_be_joined(joined: LongPplReport) -> None:
    with pytest.raises(ValueError, match="differ in the scored tokens"):
        LongPplReport.join([joined, measure(Rereader(), key_tokens=[[30], [], []], arm="other")])


def test_the_report_survives_json(joined: LongPplReport) -> None:
    data = json.loads(joined.to_json(), parse_constant=pytest.fail)
    assert LongPplReport.from_dict(data).to_dict() == data == joined.to_dict()
    assert (data["longppl"], data["key_count"]) == (joined.longppl, joined.key_count)


def test_rows_and_table_say_what_was_measured(joined: LongPplReport) -> None:
    assert list(joined.rows[0]) == [
        "arm", "context_length", "nll", "perplexity", "low", "high", "tokens", "documents", "skipped", "positions",
    ]  # fmt: skip
    assert [(row["arm"], row["positions"]) for row in joined.rows] == [
        (arm, positions) for arm in ("sure", "unsure") for positions in ("all", "key tokens")
    ]
    text = str(joined)
    expected = [
        "LongPPL",
        "context of 64 tokens at most",
        "a reference model, gain over 16 tokens above 2",
        "3 documents",
    ]
    assert [part for part in expected if part not in text] == []


def test_the_plot_has_both_perplexities_of_each_arm(joined: LongPplReport, tmp_path: Path) -> None:
    axes = joined.plot(tmp_path / "plot.png").axes[0]
    places = [line.get_xdata()[0] for line in axes.get_lines()]
    assert places == pytest.approx([row["perplexity"] for row in joined.rows])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["sure", "unsure"]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_documents_that_are_short_are_counted() -> None:
    report = measure(Rereader(), [*DOCUMENTS, periodic(1)], reference=Rereader())
    assert report.skipped == [3]
    assert report.key_tokens[3] == []
    assert any("1 of 4 documents are too short" in note for note in report.notes)
    assert any("2 of 4 documents have fewer than 64 tokens" in note for note in report.notes)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"short_length": 64}, ValueError, "`short_length` must be less than `context_length` 64, got 64"),
        ({"short_length": None}, ValueError, "Give `short_length` in tokens"),
        ({"short_length": 0}, ValueError, "`short_length` must be at least 1 token"),
        ({"stride": 17}, ValueError, "`stride` must be at most the context length 16, got 17"),
        ({"alpha": math.inf}, ValueError, "`alpha` must be a finite number, got inf"),
        ({"beta": "low"}, TypeError, "`beta` must be a finite number, got 'low'"),
        ({"context_length": 8.5}, TypeError, "`context_lengths` must be a whole number"),
        ({"reference": Rereader(), "key_tokens": [[1]] * 3}, ValueError, "not both"),
        ({"key_tokens": [[1]]}, ValueError, "one entry for each of 3 documents, got 1"),
        ({"key_tokens": [[1], [50], []]}, ValueError, "Document 1 has 50 tokens"),
        ({"key_tokens": [[True], [], []]}, ValueError, "The mask of document 0 must have 70 entries"),
        ({"key_tokens": [[0.5], [], []]}, TypeError, "those of document 0 are"),
        ({"context_length": 200, "short_length": 100}, ValueError, "the longest document has 90"),
        ({"docs": [[1]], "key_tokens": [[]]}, ValueError, "No document has a token that can be scored"),
    ],
)
def test_a_bad_argument_is_named(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        measure(Rereader(), **settings)


def test_a_reference_with_fewer_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="the model's ids are 0 to 9"):
        measure(Rereader(), reference=tiny_llama(vocab_size=10, bos_token_id=None))
