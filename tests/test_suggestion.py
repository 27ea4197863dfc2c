"""`suggest`: what it decides by, that it can be used as it is, and what it makes of measurements and of little time."""

import json
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

import hf_posext
from hf_posext import PatchError, inspect_model, list_methods, patch_model, patched
from hf_posext.demo import load_demo
from hf_posext.evaluation.comparison_report import ComparisonReport
from hf_posext.evaluation.perplexity_report import Measurement
from hf_posext.suggesting import measuring
from hf_posext.suggesting.facts import Wanted, read_facts
from hf_posext.suggesting.measuring import Extent, choose, extent_for
from hf_posext.suggesting.rules import Candidate
from hf_posext.suggesting.telling import about_numbers
from hf_posext.suggesting.trying import IN_ATTENTION, OWN_CODE, PLAIN, Tried
from hf_posext.suggestion import Suggestion, suggest
from tests import special_models, tables
from tests.architectures import TRAINED_LENGTH, tiny_inputs, tiny_model
from tests.mechanisms import alibi_models, relative_models, vision_models
from tests.snapshots import differences, snapshot

N = TRAINED_LENGTH
GIVEN = {"original_max_position_embeddings": N}
ROTARY = ("llama", "mistral_sliding", "gemma3", "deepseek_v3", "roformer", "gptj")
MODELS: dict[str, tuple[Callable[[], Any], int, dict[str, Any]]] = {
    **{name: (partial(tiny_model, name), N, {}) for name in ROTARY},
    "llama_llama3": (partial(tiny_model, "llama_llama3"), 4 * N, {}),
    "bert": (partial(tables.make, "bert"), N, {}),
    "marian": (partial(tables.make, "marian"), N, {}),
    "bloom": (partial(alibi_models.tiny, "bloom"), alibi_models.N, {}),
    "t5": (partial(relative_models.tiny, "t5"), N, GIVEN),
    "mamba": (special_models.mamba, N, GIVEN),
    "beam": (special_models.beam, N, {}),
    "vit": (partial(vision_models.tiny, "vit"), vision_models.N, {}),
}
"""Name -> a tiny model, its N, and what else has to be given."""
DYNAMIC = {"dynamic": True}


def suggested(name: str, factor: float = 4, **wanted: Any) -> Suggestion:
    make, trained, given = MODELS[name]
    return suggest(make(), int(trained * factor), **given, **wanted)


@pytest.mark.parametrize(
    ("name", "factor", "wanted", "method", "options"),
    [
        pytest.param("llama", 4, {}, "self_extend", {"group_size": "dynamic"}, id="far_untuned_groups"),
        pytest.param("llama", 4, {"short_text": False}, "self_extend", {}, id="groups_of_one_size_if_short_is_free"),
        pytest.param("llama", 2, {}, "yarn", DYNAMIC, id="near_untuned_follows"),
        pytest.param("llama", 2, {"short_text": False}, "yarn", {}, id="near_fixed_if_short_is_free"),
        pytest.param("llama", 4, {"tuned": True}, "yarn", DYNAMIC, id="tuned_follows"),
        pytest.param("llama", 4, {"portable": True}, "yarn", {}, id="portable_is_fixed"),
        pytest.param("llama_llama3", 4, {"portable": True}, "yarn", {"beta_fast": "auto"}, id="ramp_too_fast"),
        pytest.param(
            "deepseek_v3", 2, {}, "yarn", {"dynamic": True, "temperature": "logits"}, id="latent_attention_logits"
        ),
        pytest.param("deepseek_v3", 2, {"portable": True}, "yarn", {"attention_factor": 1.0}, id="latent_portable"),
        pytest.param("roformer", 4, {}, "yarn", {}, id="own_attention_code"),
        pytest.param("mistral_sliding", 4, {}, None, {}, id="every_layer_slides"),
        pytest.param("gemma3", 2, {}, "yarn", DYNAMIC, id="some_layers_slide"),
        pytest.param("gptj", 4, {"portable": True}, None, {}, id="no_words_in_any_config"),
        pytest.param("bert", 4, {}, "tile", {}, id="rows_are_copied"),
        pytest.param("bert", 4, {"tuned": True}, "tile", {"frozen_rows": True}, id="rows_are_tuned_apart"),
        pytest.param(
            "bert", 4, {"tuned": True, "short_text": False}, "pi", {"frozen_rows": True}, id="rows_are_interpolated"
        ),
        pytest.param("marian", 4, {}, "pi", DYNAMIC, id="sinusoids"),
        pytest.param("bloom", 4, {}, "pi", DYNAMIC, id="slopes"),
        pytest.param("bloom", 4, {"portable": True}, None, {}, id="slopes_have_no_words"),
        pytest.param("t5", 4, {}, None, {}, id="buckets_never_end"),
        pytest.param("mamba", 4, {}, None, {}, id="no_positions"),
        pytest.param("beam", 4, {}, None, {}, id="only_layers_that_slide_rotate"),
        pytest.param("vit", 2, {}, "pi", {}, id="patches"),
        pytest.param("llama", 1, {}, None, {}, id="long_enough"),
        pytest.param("bert", 0.5, {}, None, {}, id="shorter"),
    ],
)
def test_the_rules_decide_by_what_the_model_is_and_what_is_wanted(
    name: str, factor: float, wanted: dict[str, Any], method: str | None, options: dict[str, Any]
) -> None:
    found = suggested(name, factor, **wanted)
    assert (found.method, found.options) == (method, options)
    assert (found.basis, found.comparison) == ("rules", None)


@pytest.mark.parametrize("wanted", [{}, {"portable": True}, {"tuned": True, "short_text": False}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_arguments_are_taken_by_patch_model_and_the_model_is_as_it_was(name: str, wanted: dict[str, Any]) -> None:
    make, trained, given = MODELS[name]
    model = make()
    before = snapshot(model, length=0)
    found = suggest(model, 2 * trained, **given, **wanted)
    assert differences(before, snapshot(model, length=0)) == []
    patch_model(model, **found.arguments)
    expected = trained if found.method is None else 2 * trained
    assert (inspect_model(model).usable_length or trained) == expected


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_logits_are_the_same_bits_after_a_suggestion(name: str) -> None:
    model = tiny_model(name)
    before = snapshot(model)
    suggest(model, 4 * N)
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize(("name", "factor"), [("llama", 4), ("llama", 2), ("deepseek_v3", 2), ("gemma3", 4)])
@torch.no_grad()
def test_short_text_is_read_as_before_to_the_last_bit(name: str, factor: int) -> None:
    model = tiny_model(name)
    inputs = tiny_inputs(N)
    before = model(**inputs).logits
    suggest(model, factor * N).apply(model)
    assert torch.equal(model(**inputs).logits, before)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "llama_llama3", "bert"])
def test_what_has_to_load_plainly_has_words_in_its_config_or_is_in_the_weights(name: str) -> None:
    make, trained, _ = MODELS[name]
    model = make()
    patch_model(model, **suggest(model, 4 * trained, portable=True).arguments)
    record = inspect_model(model).record
    assert record is not None
    assert record["native"] is not None
    assert not record["dynamic"]


@pytest.mark.parametrize("name", ["llama", "bert", "bloom"])
def test_everything_that_is_called_possible_can_be_had(name: str) -> None:
    make, trained, _ = MODELS[name]
    model = make()
    offered = [each.arguments for each in suggest(model, 2 * trained).alternatives if each.verdict != "not possible"]
    used = []
    for arguments in offered:
        with patched(model, **arguments):
            used.append(arguments["method"])
    assert used
    assert {*used} <= {info.name for info in list_methods(model)}


def test_what_cannot_be_had_is_named_with_its_reason_and_not_suggested() -> None:
    found = suggested("roformer")
    why = {each.name: each.why for each in found.alternatives if each.verdict == "not possible"}
    assert "attention registry" in why["self_extend group_size=dynamic"]
    assert found.method == "yarn"
    assert any("is not read as before" in reason for reason in found.reasons)


def test_a_failing_patch_is_never_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory. Buy more.")

    monkeypatch.setattr("hf_posext.suggesting.trying.patched", out_of_memory)
    found = suggested("llama")
    assert found.method is None
    assert {each.why for each in found.alternatives} == {"out of memory"}


def test_rows_that_pairs_of_old_ones_cannot_reach_are_refused_by_trying() -> None:
    found = suggested("bert", N + 1)
    verdicts = {each.name: each.verdict for each in found.alternatives}
    assert (verdicts["hierarchical"], verdicts["tile"]) == ("not possible", "suggested")


def test_reasons_hold_the_numbers_of_the_live_spectrum() -> None:
    """Of 8 pairs with theta 10000^(-i/8) those from 10000^(i/8) 2 pi > 32 on never turn: i >= 2."""
    reasons = " ".join(suggested("llama").reasons)
    assert "6 of 8 channel pairs never turn full circle within 32 tokens" in reasons
    longest = 2 * math.pi * 10000 ** (7 / 8)
    assert f"{longest:.4g} tokens, {longest / 32:.3g} N" in reasons


def test_where_every_pair_turns_no_angle_is_said_to_be_new() -> None:
    model = tiny_model("llama")
    found = suggest(model, 10**6, original_max_position_embeddings=50_000)
    assert "Every channel pair turns full circle within 50000 tokens" in " ".join(found.reasons)
    assert found.arguments["original_max_position_embeddings"] == 50_000


def test_a_scaled_checkpoint_is_said_to_be_one() -> None:
    reasons = " ".join(suggested("llama_llama3", 2).reasons)
    assert "scaled already by `llama3`, from 32 to 128 tokens; the factor counts from there, and is 8 in all" in reasons
    assert "scaled already" not in " ".join(suggested("llama").reasons)


def test_layers_with_a_window_are_counted() -> None:
    assert "1 of 2 rotary sites" in " ".join(suggested("gemma3").reasons)
    assert "rotary sites" not in " ".join(suggested("llama").reasons)


def test_the_base_is_that_of_ntk_with_a_third_of_headroom() -> None:
    rows = {each.method: each for each in suggested("llama", 3).alternatives}
    assert rows["abf"].arguments["rope_theta"] == round(10_000 * 4 ** (16 / 14))


@pytest.mark.parametrize(("trained", "is_too_fast"), [(128, True), (256, False), (32, False)])
def test_the_published_ramp_is_too_fast_for_short_training_alone(trained: int, is_too_fast: bool) -> None:
    """Wavelengths 6.3, 19.9, 62.8, ... of 8 pairs: within 128 tokens none turns 32 times and two turn 4 times.

    Within 256 tokens one turns 32 times, an eighth of them; within 32 a wavelength of 32 is one that is interpolated.
    """
    assert read_facts(tiny_model("llama"), trained).is_ramp_too_fast is is_too_fast


def test_it_prints_the_call_and_every_alternative() -> None:
    found = suggested("llama")
    text = str(found)
    assert found.call == "hf_posext.patch_model(model, 'self_extend', target_length=128, group_size='dynamic')"
    assert found.call in text
    assert "LlamaForCausalLM, 32 -> 128 (x4), rules: self_extend group_size=dynamic" in text
    assert "rope_theta=" in text


def test_the_call_does_what_the_arguments_do() -> None:
    model, other = tiny_model("llama"), tiny_model("llama")
    found = suggest(model, 2 * N)
    eval(found.call, {"hf_posext": hf_posext, "model": model})
    patch_model(other, **found.arguments)
    assert inspect_model(model).record == inspect_model(other).record


def test_nothing_to_do_has_no_call_and_changes_no_bit() -> None:
    model = tiny_model("llama")
    found = suggest(model, N)
    before = snapshot(model).logits
    assert (found.method, found.call, found.command()) == (None, "", "")
    assert torch.equal(snapshot(found.apply(model)).logits, before)


def test_it_is_plain_data() -> None:
    data = json.loads(suggested("llama", 2).to_json())
    assert (data["method"], data["options"]) == ("yarn", DYNAMIC)
    assert {row["verdict"] for row in data["alternatives"]} == {"suggested", "possible"}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"target_length": 0}, ValueError, "`target_length` must be at least 1 token, got 0"),
        ({"target_length": 64.5}, TypeError, "`target_length` must be a whole number of tokens, got 64.5"),
        ({"time_budget": 0}, ValueError, "`time_budget` must be a finite number > 0, got 0"),
        ({"tuned": "yes"}, TypeError, "`tuned` must be True or False, got 'yes'"),
        ({"documents": ["some text"]}, ValueError, "needs a `tokenizer`"),
        ({"documents": [[5] * 64]}, ValueError, "at least one of 65 tokens, the longest of 1 has 64"),
        ({"original_max_position_embeddings": -1}, ValueError, "must be at least 1 token, got -1"),
    ],
)
def test_a_bad_argument_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        suggest(tiny_model("llama"), **{"target_length": 2 * N, **change})


def test_a_patched_model_is_refused() -> None:
    model = patch_model(tiny_model("llama"), "pi", 2)
    with pytest.raises(PatchError, match=r"already patched: pi x2 .* Call `unpatch_model` first"):
        suggest(model, 4 * N)


def test_a_model_that_does_not_say_its_length_is_refused() -> None:
    with pytest.raises(ValueError, match="Give `original_max_position_embeddings`"):
        suggest(relative_models.tiny("t5"), 64)


def test_documents_are_of_no_use_to_an_encoder_and_a_note_says_so() -> None:
    found = suggest(tables.make("bert"), 2 * N, [[5] * 100])
    assert found.basis == "rules"
    assert "documents were not used" in found.notes[0]


# What is made of measurements.

DOCUMENTS = 12
SPREAD = np.linspace(-0.5, 0.5, DOCUMENTS)  # nats between documents, far more than between arms
WOBBLE = 0.02 * (-1.0) ** np.arange(DOCUMENTS)
FIXED = Tried(Candidate("pi", "plain"), effort=PLAIN)
FOLLOWS = Tried(Candidate("yarn", "own", options=DYNAMIC, keeps_short=True), effort=OWN_CODE)
REMAPS = Tried(Candidate("self_extend", "slow", keeps_short=True), effort=IN_ATTENTION)
ALL = (REMAPS, FOLLOWS, FIXED)


def measured(arm: str, length: int, nll: Any, count: int) -> Measurement:
    sums = tuple(float(value) for value in 10 * (np.broadcast_to(nll, DOCUMENTS) + SPREAD)[:count])
    return Measurement(arm, length, tuple(range(count)), sums, (10,) * count)


def report(long: dict[str, Any], short: dict[str, Any] | None = None, count: int = DOCUMENTS) -> ComparisonReport:
    """Arms at 128 tokens, N = 64; 2 nats is what the unpatched model has on N tokens."""
    at_64 = {"none": 2.0, **dict.fromkeys(long, 2.0)} | (short or {})
    settings = {"protocol": "tail", "context_lengths": [64, 128], "targets": 10, "seed": 0, "resamples": 2000}
    records = {"truncate": None, **{arm: {"method": arm} for arm in long}}
    return ComparisonReport(
        {**settings, "bos": "auto", "stride": None},
        [measured(arm, 128, nll, count) for arm, nll in {"truncate": 2.0, **long}.items()],
        records,
        64,
        short=[measured(arm, 64, nll, count) for arm, nll in at_64.items()],
    )


@pytest.mark.parametrize(
    ("long", "short", "wanted", "best"),
    [
        pytest.param({"self_extend": 2.0, "yarn (dynamic)": 2.3, "pi": 2.4}, {}, {}, REMAPS, id="clearly_better"),
        pytest.param({"self_extend": 2.0, "yarn (dynamic)": 2.003 + WOBBLE}, {}, {}, FOLLOWS, id="a_tie_is_simpler"),
        pytest.param({"self_extend": 2.0, "pi": 1.9}, {"pi": 2.3}, {}, REMAPS, id="short_text_is_weighed"),
        pytest.param({"self_extend": 2.0, "pi": 1.9}, {"pi": 2.3}, {"short_text": False}, FIXED, id="short_is_free"),
        pytest.param({"self_extend": 2.0, "pi": 1.5}, {"pi": 2.1}, {}, FIXED, id="a_small_price_is_paid"),
        pytest.param({"yarn (dynamic)": math.nan, "pi": 9.0}, {}, {}, FIXED, id="not_a_number_never_wins"),
    ],
)
def test_the_simplest_of_those_that_are_not_clearly_worse_is_chosen(
    long: dict[str, Any], short: dict[str, Any], wanted: dict[str, Any], best: Tried
) -> None:
    assert choose(report(long, short), ALL, Wanted(128, **wanted)) is best


def test_one_document_ties_nothing() -> None:
    assert choose(report({"self_extend": 2.0, "yarn (dynamic)": 2.01}, count=1), ALL, Wanted(128)) is REMAPS


def test_where_nothing_reaches_the_last_n_tokens_it_says_so_plainly() -> None:
    told = about_numbers(report({"self_extend": 2.1, "yarn (dynamic)": 2.4}), REMAPS, Wanted(128))
    assert told[0].startswith("No untuned method that was measured beats giving the model the last 64 tokens")
    assert "`self_extend`, the best at 128, is worse (+0.100 nats per token, +0.100 to +0.100)" in told[0]
    assert "Tune the model, or truncate" in told[0]


def test_where_one_ties_with_the_last_n_tokens_it_does_not() -> None:
    told = about_numbers(report({"self_extend": 2.0 + WOBBLE, "yarn (dynamic)": 2.4}), REMAPS, Wanted(128))
    assert "not clearly different" in told[0]
    assert "No untuned" not in " ".join(told)


@pytest.mark.parametrize(("count", "word"), [(4, "not clearly different"), (12, "better")])
def test_few_documents_prove_nothing_however_they_agree(count: int, word: str) -> None:
    """Of four that agree a sign test leaves 12 % to chance."""
    told = about_numbers(report({"self_extend": 1.9, "pi": 1.9}, count=count), REMAPS, Wanted(128))
    assert f"{word} (-0.100 nats per token, -0.100 to -0.100)" in told[0]


EVERY_BAR = ("none", "truncate", "window")


@pytest.mark.parametrize(
    ("passes", "extent"),
    [
        (1000, Extent(EVERY_BAR, 12, 2)),
        (10 * 12 * 2, Extent(EVERY_BAR, 12, 2)),
        (10 * 12 * 2 - 1, Extent(EVERY_BAR, 12, 1)),
        (10 * 8, Extent(EVERY_BAR, 8, 1)),
        (10 * 6 - 1, Extent(("truncate",), 6, 1)),
        (5, Extent(("truncate",), 2, 1)),
        (1.9, None),
        (-3, None),
    ],
)
def test_as_much_is_measured_as_there_is_time_for(passes: float, extent: Extent | None) -> None:
    assert extent_for(passes, arms=7, documents=12) == extent


def long_documents(count: int = 6) -> list[list[int]]:
    return [tiny_inputs(3 * N, batch=1, seed=seed)["input_ids"][0].tolist() for seed in range(count)]


@cache
def measured_llama() -> tuple[Suggestion, list[str]]:
    model = tiny_model("llama")
    before = snapshot(model)
    found = suggest(model, 2 * N, [*long_documents(), [5] * N], time_budget=1000)
    return found, differences(before, snapshot(model))


def test_everything_that_is_possible_is_measured_beside_the_bars() -> None:
    found, _ = measured_llama()
    assert found.basis == "measured"
    assert found.comparison is not None
    assert {*found.comparison.arms} == {"none", "truncate", "window", *(each.name for each in found.alternatives)}
    assert found.comparison.protocol["context_lengths"] == [N, 2 * N]
    assert {row["documents"] for row in found.comparison.rows} == {6}
    assert found.versus_truncate in ("better", "worse", "not clearly different")
    assert [each.perplexity for each in found.alternatives if each.perplexity is None] == []


def test_measuring_leaves_the_model_as_it_was() -> None:
    _, changed = measured_llama()
    assert changed == []


def test_a_measured_report_prints_and_is_plain_data() -> None:
    found, _ = measured_llama()
    assert "perplexity at 64" in str(found)
    assert json.loads(found.to_json())["comparison"]["trained_length"] == N


class Clock:
    """A second passes with every look at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_it_stops_when_the_time_is_over_and_says_what_it_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", Clock())
    found = suggest(tiny_model("llama"), 2 * N, long_documents(), time_budget=12)
    assert found.comparison is not None
    assert len(found.comparison.arms) < len(found.alternatives)
    assert any(note.startswith("To fit into the time budget") for note in found.notes)
    assert any("ended before" in note and "`pi`" in note for note in found.notes)


def test_without_time_one_document_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", Clock())
    found = suggest(tiny_model("llama"), 2 * N, long_documents(), time_budget=1)
    assert found.comparison is not None
    assert {row["documents"] for row in found.comparison.rows} == {1}
    assert "the time budget is spent" in found.notes[0]


def test_an_arm_that_fails_to_be_measured_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    own = measuring.compare

    def failing(*args: Any, **kwargs: Any) -> ComparisonReport:
        if kwargs["methods"][0]["method"] == "yarn":
            raise ValueError("too hot")
        return own(*args, **kwargs)

    monkeypatch.setattr(measuring, "compare", failing)
    found = suggest(tiny_model("llama"), 2 * N, long_documents(2), time_budget=1000)
    assert "`yarn (dynamic)` could not be measured: too hot" in found.notes
    assert found.method != "yarn"


def test_on_the_demo_model_it_measures_the_order_of_the_readme() -> None:
    """README, 1024 tokens: 14.9 by `self_extend` and `rerope`, 16.1 by dynamic `yarn`, 41.7 by `pi`, 50.7 by `ntk`."""
    model, tokenizer, documents = load_demo("llama")
    texts = [tokenizer(text[:9000], verbose=False)["input_ids"][:1030] for text in documents[:4]]
    found = suggest(model, 1024, texts, time_budget=1000)
    shown = {each.name: each.perplexity or math.inf for each in found.alternatives}
    assert found.method in ("self_extend", "rerope")
    assert shown["self_extend group_size=dynamic"] < shown["yarn (dynamic)"] < shown["pi"]
    assert found.versus_truncate == "not clearly different"


def test_a_length_that_was_given_is_part_of_the_command() -> None:
    found = suggest(tiny_model("llama"), 2 * N, original_max_position_embeddings=N)
    assert f"--option original_max_position_embeddings={N}" in found.command()


def test_documents_that_have_no_use_are_named() -> None:
    found = suggest(tiny_model("llama"), N, long_documents())
    assert found.notes[0] == "The documents were not used: there is nothing to measure on them."


def test_a_model_without_a_finite_loss_is_advised_by_rules() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    found = suggest(model, 2 * N, long_documents(), progress=False)
    assert (found.basis, found.comparison) == ("rules", None)
    assert "No method has a finite loss on these documents, so it is by rules." in found.notes


def test_numbers_of_a_model_that_will_be_tuned_are_said_to_be_of_before() -> None:
    found = suggest(tiny_model("llama"), 2 * N, long_documents(), tuned=True, progress=False)
    assert found.reasons[0] == "These are measurements before tuning, which changes the order of methods."
