"""Comparisons: every arm is what perplexity says of a model patched by hand, from one model that is left as it was."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_posext import PatchError, patch_model, patched, perplexity, unpatch_model
from hf_posext.evaluation import scoring
from hf_posext.evaluation.comparison import compare
from hf_posext.evaluation.comparison_arms import read_contenders
from hf_posext.evaluation.comparison_report import ComparisonReport
from hf_posext.records import record_of
from tests.evaluation.stubs import ContextCounter, documents, known_nll, tiny_llama
from tests.snapshots import differences, snapshot

TRAINED = 32
LENGTHS = [16, 32, 64, 96]
DOCUMENTS = documents(150, 97, 140)
DYNAMIC = {"method": "yarn", "dynamic": True}
ARMS: dict[str, Any] = {
    "pi": "pi",
    "yarn beta_fast=8": {"method": "yarn", "beta_fast": 8},
    "self_extend window=8": ("self_extend", {"window": 8}),
    "mine": {"method": "rerope", "window": 16, "name": "mine"},
}
PATCHES: dict[str, dict[str, Any]] = {
    "pi": {"method": "pi"},
    "yarn beta_fast=8": {"method": "yarn", "beta_fast": 8},
    "self_extend window=8": {"method": "self_extend", "window": 8},
    "mine": {"method": "rerope", "window": 16},
}


def measure(model: Any, methods: Any, **settings: Any) -> ComparisonReport:
    """A comparison on token ids, with few targets and few resamples."""
    defaults: dict[str, Any] = {"context_lengths": LENGTHS, "resamples": 200}
    if settings.get("protocol", "tail") == "tail":
        defaults["targets"] = 8
    return compare(model, None, DOCUMENTS, methods=methods, **{**defaults, **settings})


def by_hand(model: Any, patch: dict[str, Any], target: int, **settings: Any) -> dict[int, dict[str, Any]]:
    """Context length -> row of perplexity of a model that is patched for `target` tokens."""
    defaults: dict[str, Any] = {"context_lengths": LENGTHS, "resamples": 200, "bars": [], "arm": "by hand"}
    if settings.get("protocol", "tail") == "tail":
        defaults |= {"targets": 8, "endpoints_per_document": 2}
    with patched(model, **patch, target_length=target):
        report = perplexity(model, None, DOCUMENTS, **{**defaults, **settings})
    return {row["context_length"]: {**row, "arm": ""} for row in report.rows}


def rows_of(report: Any, arm: str) -> dict[int, dict[str, Any]]:
    """Context length -> row of an arm, without its name."""
    return {row["context_length"]: {**row, "arm": ""} for row in report.rows if row["arm"] == arm}


@pytest.fixture(scope="module")
def static() -> ComparisonReport:
    """Static methods, each patched for each context length, and all bars."""
    return measure(tiny_llama(), ARMS.values())


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bytes]]]:
    """What was read: the patch that was in force, and the tokens."""
    read: list[tuple[str, bytes]] = []
    original = scoring._score_batch

    def spy(network: Any, backbone: Any, batch: Any, *rest: Any) -> Any:
        read.extend((str(record_of(network)), run.fed.numpy().tobytes()) for run in batch)
        return original(network, backbone, batch, *rest)

    monkeypatch.setattr(scoring, "_score_batch", spy)
    return read


@pytest.mark.parametrize("length", LENGTHS[2:])
@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_is_the_model_patched_by_hand_for_each_length(static: ComparisonReport, arm: str, length: int) -> None:
    expected = by_hand(tiny_llama(), PATCHES[arm], length)[length]
    assert rows_of(static, arm)[length] == expected


@pytest.mark.parametrize("arm", ARMS)
def test_up_to_the_trained_length_an_arm_is_the_unpatched_model(static: ComparisonReport, arm: str) -> None:
    own, unpatched = rows_of(static, arm), rows_of(static, "none")
    assert [own[length] for length in LENGTHS[:2]] == [unpatched[length] for length in LENGTHS[:2]]
    assert own[64] != unpatched[64]


@pytest.mark.parametrize(
    ("entry", "per_length"), [("pi", False), (DYNAMIC, True), ({"method": "pi", "per_length": False}, True)]
)
def test_an_arm_that_is_patched_once_is_patched_for_the_longest(entry: Any, per_length: bool) -> None:
    report = measure(tiny_llama(), [entry], per_length=per_length, bars=[])
    patch = {"method": "pi"} if entry is not DYNAMIC else DYNAMIC
    (arm,) = report.arms
    assert rows_of(report, arm) == by_hand(tiny_llama(), patch, LENGTHS[-1])
    assert [report.patched_for(arm, length) for length in LENGTHS] == [LENGTHS[-1]] * 4


def test_the_bars_and_the_targets_are_those_of_perplexity(static: ComparisonReport) -> None:
    settings: dict[str, Any] = {"context_lengths": LENGTHS, "targets": 8, "endpoints_per_document": 2}
    own = perplexity(tiny_llama(), None, DOCUMENTS, **settings, resamples=200, bars=["truncate", "window"])
    assert static.protocol["digest"] == own.protocol["digest"]
    assert [rows_of(static, bar) for bar in own.arms] == [rows_of(own, bar) for bar in own.arms]
    assert static.arms == ["none", "truncate", "window", *ARMS]


@pytest.mark.parametrize("protocol", ["full", "sliding", "disjoint"])
def test_every_protocol_gives_the_numbers_of_perplexity(protocol: str) -> None:
    report = measure(tiny_llama(), ["pi", DYNAMIC], protocol=protocol)
    for_64 = by_hand(tiny_llama(), {"method": "pi"}, 64, protocol=protocol, context_lengths=[64])
    plain = perplexity(tiny_llama(), None, DOCUMENTS, context_lengths=LENGTHS, protocol=protocol, resamples=200)
    assert report.arms == ["none", "window", "pi", "yarn (dynamic)"]
    assert rows_of(report, "pi")[64] == for_64[64]
    assert rows_of(report, "yarn (dynamic)") == by_hand(tiny_llama(), DYNAMIC, LENGTHS[-1], protocol=protocol)
    assert rows_of(report, "none") == rows_of(plain, "none")


@pytest.mark.parametrize("arm", ARMS)
def test_the_price_is_that_of_a_model_patched_for_the_longest(static: ComparisonReport, arm: str) -> None:
    expected = by_hand(tiny_llama(), PATCHES[arm], LENGTHS[-1])[TRAINED]
    (row,) = (row for row in static.short_rows if row["arm"] == arm)
    assert {**row, "arm": ""}.items() >= expected.items()
    assert row["difference"] == pytest.approx(expected["nll"] - rows_of(static, "none")[TRAINED]["nll"], abs=1e-12)
    assert (row["context_length"], row["patched_for"]) == (TRAINED, LENGTHS[-1])


def test_the_price_is_measured_where_the_trained_length_is_not_asked_for() -> None:
    report = measure(tiny_llama(), ["pi"], context_lengths=[64])
    expected = by_hand(tiny_llama(), {"method": "pi"}, 64, context_lengths=[TRAINED, 64])[TRAINED]
    assert report.short_rows[1]["nll"] == expected["nll"]
    assert [row["context_length"] for row in report.rows] == [64] * 4


def test_a_dynamic_arm_costs_nothing_on_short_text() -> None:
    report = measure(tiny_llama(), [DYNAMIC, "dynamic_ntk"])
    assert [row["difference"] for row in report.short_rows] == [0.0, 0.0, 0.0]


def test_the_model_is_left_as_it_was_to_the_last_bit() -> None:
    model = tiny_llama(vocab_size=128)
    before = snapshot(model)
    measure(model, [*ARMS.values(), DYNAMIC, "alibi", "tile"])
    assert differences(before, snapshot(model)) == []


def test_the_model_is_left_as_it_was_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(vocab_size=128)
    before = snapshot(model)
    original = scoring._score_batch

    def interrupted(network: Any, *rest: Any) -> Any:
        if record_of(network) is not None:
            raise KeyboardInterrupt
        return original(network, *rest)

    monkeypatch.setattr(scoring, "_score_batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(model, ["pi"])
    assert differences(before, snapshot(model)) == []


def test_there_is_never_a_second_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    gc.collect()
    storages = {parameter.data_ptr() for parameter in model.parameters()}
    counts: list[int] = []
    original = scoring.score

    def counting(network: Any, *rest: Any, **settings: Any) -> Any:
        counts.append(sum(type(each) is LlamaForCausalLM for each in gc.get_objects()))
        assert {parameter.data_ptr() for parameter in network.parameters()} == storages
        return original(network, *rest, **settings)

    before = sum(type(each) is LlamaForCausalLM for each in gc.get_objects())
    monkeypatch.setattr("hf_posext.evaluation.measuring.score", counting)
    measure(model, ["pi", "self_extend", DYNAMIC], context_lengths=[32, 64])
    assert set(counts) == {before}


@pytest.mark.parametrize("protocol", ["tail", "disjoint"])
def test_nothing_is_read_twice_in_the_same_way(fed: list[tuple[str, bytes]], protocol: str) -> None:
    measure(tiny_llama(), ["pi", "yarn", DYNAMIC], protocol=protocol)
    assert len(fed) == len(set(fed))


def test_no_more_is_read_than_the_arms_need(fed: list[tuple[str, bytes]]) -> None:
    """5 endpoints: unpatched at 16, 32, 64 and 96; window at 64 and 96; pi at 64 and 96, and at 32 for the price."""
    measure(tiny_llama(), ["pi"])
    assert len(fed) == 5 * (4 + 2 + 3)


def test_a_method_that_the_model_cannot_have_is_a_note() -> None:
    report = measure(tiny_llama(), ["tile", "pi"])
    assert report.arms == ["none", "truncate", "window", "pi"]
    assert [note for note in report.notes if "`tile`" in note] == [
        "`tile` is left out: `tile` has no meaning for a rotary encoding."
    ]


def test_a_method_that_fails_at_one_length_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    original = scoring._score_batch

    def failing(network: Any, backbone: Any, batch: Any, *rest: Any) -> Any:
        record = record_of(network)
        if record is not None and record.method == "pi" and record.target_length == 64:
            raise PatchError("It cannot read 64. Try another.")
        return original(network, backbone, batch, *rest)

    monkeypatch.setattr(scoring, "_score_batch", failing)
    report = measure(tiny_llama(), ["pi", "yarn"])
    assert "pi" not in [row["arm"] for row in [*report.rows, *report.short_rows]]
    assert "`pi` is left out: It cannot read 64." in report.notes


def test_it_is_an_error_if_no_method_can_be_had() -> None:
    with pytest.raises(ValueError, match=r"None of the methods .* `tile` is left out: .* `hierarchical` is left out"):
        measure(tiny_llama(), ["tile", "hierarchical"])


def test_how_each_arm_was_patched_is_said_and_recorded(static: ComparisonReport) -> None:
    assert static.records["pi"] is not None
    steps = static.records["pi"]["by_context_length"]
    assert {length: step["factor"] for length, step in steps.items()} == {64: 2.0, 96: 3.0}
    assert any(
        note.startswith("Patched for each context length T beyond 32 by the factor T / 32") for note in static.notes
    )
    assert [static.patched_for("pi", length) for length in LENGTHS] == [None, None, 64, 96]
    assert static.patched_for("none", 96) is None


def test_the_trained_length_can_be_given() -> None:
    report = measure(tiny_llama(), ["pi"], original_max_position_embeddings=16)
    with patched(tiny_llama(), "pi", target_length=32, original_max_position_embeddings=16) as model:
        expected = perplexity(
            model, None, DOCUMENTS, context_lengths=LENGTHS, targets=8, endpoints_per_document=2, resamples=200, bars=[]
        )
    assert report.trained_length == 16
    assert rows_of(report, "pi")[32] == rows_of(expected, "pi")[32]
    assert rows_of(report, "truncate")[96]["nll"] == rows_of(report, "none")[16]["nll"]


def test_a_model_without_a_trained_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ContextCounter does not say the trained length. Give `original_max_pos"):
        measure(ContextCounter(), ["pi"])


def test_a_model_that_says_nothing_of_positions_cannot_be_patched_by_any_method() -> None:
    """Its closed form is what the bars would be: the NLL depends on the number of tokens read and on nothing else."""
    model = ContextCounter()
    with pytest.raises(TypeError, match="ContextCounter"):
        measure(model, ["pi"], original_max_position_embeddings=TRAINED)
    report = perplexity(model, None, DOCUMENTS, context_lengths=[16], targets=1)
    assert report.rows[0]["nll"] == pytest.approx(known_nll(16), rel=1e-6)


def test_a_patched_model_is_refused_and_keeps_its_patch() -> None:
    model = patch_model(tiny_llama(), "pi", 2)
    with pytest.raises(PatchError, match=r"already patched: .* Call `unpatch_model` first"):
        measure(model, ["yarn"])
    assert record_of(model) is not None
    unpatch_model(model)


@pytest.mark.parametrize(
    ("methods", "names"),
    [
        (["linear", "yarn"], ["pi", "yarn"]),
        ([{"method": "yarn", "dynamic": True, "beta_fast": 8}], ["yarn beta_fast=8 (dynamic)"]),
        ([("yarn", {"name": "b8", "beta_fast": 8})], ["b8"]),
        ([{"method": "longrope", "long_factor": [1.0] * 40}], ["longrope long_factor=[1.0, 1.0, 1.0, 1.0, ..."]),
        (["window", "none"], ["patched window", "nope"]),
        ([{"method": "yarn", "dynamic": False}], ["yarn"]),
    ],
)
def test_arms_are_called_by_method_and_options(methods: Any, names: list[str]) -> None:
    assert [contender.name for contender in read_contenders(methods, per_length=True)] == names


@pytest.mark.parametrize(
    ("methods", "error", "message"),
    [
        ("pi", TypeError, r"`methods` must be a list, .* got 'pi'. Write methods=\['pi'\]"),
        ({"method": "pi"}, TypeError, "`methods` must be a list"),
        ([], ValueError, "`methods` is empty"),
        (["yran"], ValueError, "Did you mean `yarn`"),
        ([3], TypeError, "Each of `methods` must be a name"),
        ([{"name": "x"}], TypeError, "Each of `methods` must be a name"),
        (["pi", "linear"], ValueError, r"Two methods have the arm `pi`. Leave one out or give it another `name`"),
        ([{"method": "pi", "factor": 2}], ValueError, "`factor` of .* cannot be given"),
        ([{"method": "pi", "name": "truncate (pi)"}], ValueError, "must not be called as a bar"),
        ([{"method": "yarn", "beta": 8}], TypeError, "Unknown option of `yarn`"),
        (["pi", "abf"], TypeError, "`abf` needs `rope_theta`"),
    ],
)
def test_a_bad_method_is_refused_before_anything_is_read(
    fed: list[tuple[str, bytes]], methods: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        measure(tiny_llama(), methods)
    assert fed == []


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"context_lengths": [16, 32]}, ValueError, r"must go beyond the trained length 32, got \[16, 32\]"),
        ({"per_length": 1}, TypeError, "`per_length` must be True or False"),
        ({"bars": ["trunc"]}, ValueError, "Unknown bar 'trunc'"),
        ({"targets": 40, "context_lengths": [64]}, ValueError, "at most the trained length 32"),
        ({"protocol": "full", "bars": ["truncate"]}, ValueError, "`truncate` has a meaning for the protocol `tail`"),
        ({"context_lengths": [64, 4096]}, ValueError, "longest document has 150"),
    ],
)
def test_a_bad_setting_is_refused(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        measure(tiny_llama(), ["pi"], **settings)


def test_a_document_that_is_too_short_is_named() -> None:
    report = measure(tiny_llama(), ["pi"], context_lengths=[32, 128])
    assert report.skipped == [1]
    assert "1 of 3 documents are too short and were left out: 1." in report.notes
    assert {row["documents"] for row in report.rows} == {2}


def test_a_curve_belongs_to_the_protocol_full() -> None:
    report = measure(tiny_llama(), ["pi"], protocol="full", context_lengths=[32, 64])
    with patched(tiny_llama(), "pi", target_length=64) as model:
        expected = perplexity(model, None, DOCUMENTS, context_lengths=[32, 64], protocol="full", resamples=200)
    own = [bucket for bucket in report.curve if bucket["arm"] == "pi"]
    assert own == expected.curve
    assert len(own) > 5
    assert torch.tensor([bucket["nll"] for bucket in own]).isfinite().all()
