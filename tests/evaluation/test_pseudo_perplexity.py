"""Pseudo-perplexity against a slow computation and closed forms, the bar, and what every number carries."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_posext
from hf_posext import PseudoPerplexityReport, patch_model, pseudo_perplexity
from hf_posext.evaluation.masking import frame_of, masked_windows
from hf_posext.evaluation.measuring import placed_measurements
from hf_posext.evaluation.scoring import find_backbone
from tests.evaluation.masked_stubs import (
    CLS,
    FAMILIES,
    LIKELY,
    SEP,
    TRAINED,
    VOCABULARY,
    PlaceCounter,
    build,
    documents,
    masking_tokenizer,
    slow_nll,
    slow_places,
)

DOCUMENTS = documents(140, 90, 121)
LENGTHS = [16, 32, 64]
ROW_KEYS = [
    "arm", "context_length", "nll", "perplexity", "low", "high", "tokens", "documents", "skipped", "positions",
]  # fmt: skip
NLL = dict[tuple[str, int, str], float]


def measure(model: nn.Module, docs: Any = DOCUMENTS, **settings: Any) -> PseudoPerplexityReport:
    """Pseudo-perplexity on token ids, with few resamples."""
    defaults: dict[str, Any] = {"context_lengths": LENGTHS, "resamples": 200, "batch_size": 8}
    return pseudo_perplexity(model, settings.pop("tokenizer", masking_tokenizer()), docs, **{**defaults, **settings})


def patched_bert(method: str = "alibi", factor: float = 2) -> Any:
    """A BERT of 32 tokens that is patched to read more."""
    return patch_model(build(), method, factor)


def nll_of(report: PseudoPerplexityReport) -> NLL:
    """The NLL of each row by arm, length and positions."""
    return {(row["arm"], row["context_length"], row["positions"]): row["nll"] for row in report.rows}


def slow(arm: str, model: nn.Module, read: list[int], named: list[int], targets: int, docs: Any = DOCUMENTS) -> NLL:
    """What a report should say: each token read in windows of one length, its position named by those of another."""
    found: dict[tuple[str, int, str], list[float]] = {}
    for length, name in zip(read, named, strict=True):
        for document in docs:
            nll = slow_nll(model, document, length, targets)
            for place, begin in slow_places(document, name, targets).items():
                side = f"<= {TRAINED}" if place - begin + 2 <= TRAINED else f"> {TRAINED}"  # [CLS] is at position 1
                for positions in ("all", side):
                    found.setdefault((arm, name, positions), []).append(nll[place])
    return {key: sum(values) / len(values) for key, values in found.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("chunk", "batch_size"), [(1024, 1), (3, 4)])
def test_every_family_gets_the_nll_of_its_own_logits(family: str, chunk: int, batch_size: int) -> None:
    model = build(family)
    report = measure(model, context_lengths=[12, TRAINED], chunk=chunk, batch_size=batch_size)
    assert report.trained_length == TRAINED
    targets = 2 * (12 - 2)
    assert nll_of(report) == pytest.approx(slow("none", model, [12, 32], [12, 32], targets), rel=1e-5)
    assert find_backbone(model) is not None


ARMS = [
    ("bert", "alibi", None), ("bert", "nope", 10), ("bert", "tile", 75), ("bert", "hierarchical", None),
    ("roberta", "pi", None), ("mpnet", "tile", None), ("distilbert", "pi", 40),
]  # fmt: skip


@pytest.mark.parametrize(("family", "method", "targets"), ARMS)
def test_a_patched_model_beside_the_unpatched_one_in_windows_of_the_trained_length(
    family: str, method: str, targets: int | None
) -> None:
    model = patch_model(build(family), method, 2)
    report = measure(model, targets=targets)
    count = targets or 4 * (16 - 2)
    expected = slow(method, model, LENGTHS, LENGTHS, count)
    expected |= slow("truncate", build(family), [16, 32, 32], LENGTHS, count)
    assert nll_of(report) == pytest.approx(expected, rel=1e-5)
    assert report.arms == [method, "truncate"]
    assert report.to_dict()["records"] == {method: report.record, "truncate": None}


@pytest.mark.parametrize(("method", "options"), [("tile", {}), ("hierarchical", {}), ("pi", {"dynamic": True})])
def test_a_patch_that_keeps_short_text_has_its_numbers_to_the_last_bit(method: str, options: dict[str, Any]) -> None:
    nll = nll_of(measure(patch_model(build(), method, 2, **options)))
    for length in (16, TRAINED):
        assert nll[method, length, "all"] == nll["truncate", length, "all"]
    assert nll[method, 64, "> 32"] != nll["truncate", 64, "> 32"]


def test_the_positions_of_a_row_are_those_in_its_windows() -> None:
    report = measure(PlaceCounter(), context_lengths=[40])
    places = [place - begin + 2 for ids in DOCUMENTS for place, begin in slow_places(ids, 40, 38).items()]
    expected = [math.log(LIKELY * (1 + place) + VOCABULARY - LIKELY) - math.log(1 + place) for place in places]
    assert report.rows[0]["nll"] == pytest.approx(sum(expected) / len(expected), rel=1e-6)
    assert report.rows[0]["tokens"] == len(places)
    assert [row["positions"] for row in report.rows] == ["all"]  # nobody knows its trained length


def test_tokens_of_both_sides_are_all_and_the_same_for_every_arm() -> None:
    rows = measure(patched_bert(), bars=["truncate"]).rows
    tokens = {(row["arm"], row["context_length"], row["positions"]): row["tokens"] for row in rows}
    assert [list(row) for row in rows] == [ROW_KEYS] * len(rows)
    for arm in ("alibi", "truncate"):
        assert {tokens[arm, length, "all"] for length in LENGTHS} == {tokens["alibi", 16, "all"]}
        assert tokens[arm, 64, "<= 32"] + tokens[arm, 64, "> 32"] == tokens[arm, 64, "all"]
        assert tokens[arm, 32, "<= 32"] == tokens[arm, 32, "all"]
        assert (arm, 32, "> 32") not in tokens
    assert tokens["alibi", 64, "> 32"] == tokens["truncate", 64, "> 32"] > 0


@pytest.mark.parametrize(
    "changes",
    [{"batch_size": 1, "chunk": 3}, {"context_lengths": [64, 16, 32, 64]}, {"bars": []}, {"max_documents": 3}],
)
def test_what_is_incidental_changes_no_number(changes: dict[str, Any]) -> None:
    one, other = measure(patched_bert()), measure(patched_bert(), **changes)
    expected = {key: value for key, value in nll_of(one).items() if key[0] == "alibi" or changes.get("bars") != []}
    assert nll_of(other) == pytest.approx(expected, rel=1e-6)
    assert one.protocol["digest"] == other.protocol["digest"]


def test_a_length_alone_has_the_rows_that_it_has_among_others() -> None:
    together, alone = measure(patched_bert()), measure(patched_bert(), context_lengths=[32], targets=56)
    assert alone.rows == [row for row in together.rows if row["context_length"] == 32]
    assert alone.protocol["digest"] == together.protocol["digest"]


def test_every_arm_is_asked_for_the_same_tokens_behind_the_same_masks() -> None:
    one, other = PlaceCounter(), PlaceCounter()
    first, second = measure(one, arm="one"), measure(other, arm="other", batch_size=3)
    assert first.protocol["digest"] == second.protocol["digest"]
    fed = [{tuple(row.tolist()) for batch in model.read[2:] for row in batch if len(row) > 2} for model in (one, other)]
    assert fed[0] == fed[1]
    assert all(row[0] == CLS and row[-1] == SEP for row in fed[0])


def test_seed_decides_the_masks() -> None:
    one, same, other = (measure(build(), context_lengths=[32], seed=seed) for seed in (0, 0, 1))
    assert one.rows == same.rows
    assert one.protocol["digest"] != other.protocol["digest"]
    assert nll_of(one) != nll_of(other)


def test_text_is_read_and_special_tokens_around_it_stand_there_once() -> None:
    texts = [" ".join(f"w{int(token)}" for token in ids) for ids in DOCUMENTS]
    tokenizer = masking_tokenizer()
    whole = [{"input_ids": tokenizer(text, verbose=False)["input_ids"]} for text in texts]
    expected = measure(build(), context_lengths=[32]).rows
    assert measure(build(), texts, context_lengths=[32]).rows == expected
    assert measure(build(), whole, context_lengths=[32]).rows == expected


def test_a_document_too_short_is_left_out_counted_and_named() -> None:
    report = measure(patched_bert(), [DOCUMENTS[0], DOCUMENTS[1][:61], DOCUMENTS[2]])
    assert (report.skipped, report.rows[0]["skipped"], report.rows[0]["documents"]) == ([1], 1, 2)
    assert any(note.startswith("1 of 3 documents are too short") and note.endswith(": 1.") for note in report.notes)


class Rows(list[int]):
    """Rows that a head has seen, call by call."""

    def watch(self, head: nn.Module) -> "Rows":
        head.register_forward_hook(lambda module, inputs, output: self.append(output.shape[:-1].numel()))
        return self


@pytest.mark.parametrize("length", [24, TRAINED])
def test_the_head_sees_masked_rows_only_and_never_more_than_a_chunk(length: int) -> None:
    model = build()
    rows = Rows().watch(model.cls.predictions.decoder)
    report = measure(model, context_lengths=[length], chunk=4, batch_size=8)
    checks = 2 + 2 + 2 + 2  # two inputs of two tokens, and the two tokens that the backbone is proved on, twice
    assert max(rows) <= 4
    assert sum(rows) == report.rows[0]["tokens"] + checks


def test_the_model_is_left_as_it_was() -> None:
    model = patched_bert().train()
    config, record = copy.deepcopy(model.config.to_dict()), hf_posext.record_of(model)
    with torch.no_grad():
        before = model.eval()(input_ids=DOCUMENTS[0][None, :64]).logits
        model.train()
        measure(model)
        assert model.training
        assert torch.equal(model.eval()(input_ids=DOCUMENTS[0][None, :64]).logits, before)
    assert (model.config.to_dict(), hf_posext.record_of(model)) == (config, record)


def test_bars_that_a_model_cannot_have_are_left_out_with_a_note() -> None:
    report = measure(patched_bert(), bars=["none", "truncate"])
    assert report.arms == ["alibi", "truncate"]
    expected = "The bar `none` is left out: BertForMaskedLM cannot read 64 tokens: its table of positions ends at 32."
    assert expected in report.notes
    unknown = measure(PlaceCounter(), bars=["truncate"])
    assert unknown.arms == ["none"]
    assert "The bar `truncate` is left out: the config does not say a trained length." in unknown.notes


def test_a_rotary_model_is_read_beyond_its_length_and_has_every_bar() -> None:
    model = patch_model(build("modernbert"), "pi", 2)
    report = measure(model, bars=["none", "truncate"])
    unpatched = build("modernbert")
    count = 4 * (16 - 2)
    expected = slow("pi", model, LENGTHS, LENGTHS, count) | slow("none", unpatched, LENGTHS, LENGTHS, count)
    expected |= slow("truncate", unpatched, [16, 32, 32], LENGTHS, count)
    assert nll_of(report) == pytest.approx(expected, rel=1e-5)


def test_arms_are_compared_on_the_same_documents() -> None:
    report = PseudoPerplexityReport.join([measure(patched_bert(name)) for name in ("alibi", "nope")])
    assert report.arms == ["alibi", "truncate", "nope"]
    assert isinstance(report, PseudoPerplexityReport)
    nll = nll_of(report)
    for positions in ("all", "<= 32", "> 32"):
        found = report.difference("alibi", "nope", 64, positions)
        assert found["difference"] == pytest.approx(nll["alibi", 64, positions] - nll["nope", 64, positions])
        assert found["low"] <= found["difference"] <= found["high"]
    itself = report.difference("nope", "nope", 64, "> 32")
    assert (itself["low"], itself["high"]) == (0, 0)
    with pytest.raises(ValueError, match="Unknown positions at 32 tokens: '> 32'"):
        report.difference("alibi", "nope", 32, "> 32")
    with pytest.raises(ValueError, match="differ in `seed`"):
        PseudoPerplexityReport.join([report, measure(patched_bert(), seed=1)])


def test_report_is_plain_data_a_table_and_a_figure(tmp_path: Path) -> None:
    report = measure(patched_bert())
    data = json.loads(report.to_json(tmp_path / "report.json"))
    assert data["rows"] == report.rows
    assert (data["protocol"]["protocol"], data["protocol"]["targets"], data["record"]["method"]) == (
        "masked",
        56,
        "alibi",
    )
    assert PseudoPerplexityReport.from_dict(data).to_dict() == data
    text = str(report)
    for part in (
        "masked tokens, 15 % at a time, of 56 tokens",
        "> 32",
        "alibi - truncate at 64, positions > 32: ",
        "draws 4",
    ):
        assert part in text
    titles = [axes.get_title() for axes in report.plot(tmp_path / "plot.svg").axes]
    assert titles == ["all positions", "positions <= 32", "positions > 32"]
    assert (tmp_path / "plot.svg").read_bytes().startswith(b"<?xml")


def test_without_longer_text_positions_are_shown_once() -> None:
    report = measure(build(), context_lengths=[16, 32])
    assert [row["positions"] for row in report.rows] == ["all", "<= 32"] * 2
    assert "<= 32" not in str(report)
    assert [axes.get_title() for axes in report.plot().axes] == ["all positions"]


def test_sums_are_made_in_float64() -> None:
    plan, _ = masked_windows(
        DOCUMENTS[:1], [40], frame=frame_of(masking_tokenizer()), targets=38, endpoints_per_document=1,
        mask_share=0.5, draws=1, seed=0,
    )  # fmt: skip
    nll = [torch.tensor([2.0**24] + [1.0] * (len(window.rows) - 1)) for window in plan[40]]
    (found,) = placed_measurements("none", 40, plan[40], nll, None)
    assert found.nll == (2**24 + found.tokens[0] - 1,)


def test_windows_of_all_documents_are_kept_in_order() -> None:
    ids: list[Tensor] = DOCUMENTS
    report = measure(PlaceCounter(), ids, endpoints_per_document=2, context_lengths=[40])
    assert report.measurements[0].documents == (0, 1, 2)
    counts = [len(slow_places(document, 40, 38)) for document in ids]
    assert all(found > count for found, count in zip(report.measurements[0].tokens, counts, strict=True))
