"""Retrieval: what is asked, what counts as an answer, the bars, the gate, and what the report says."""

import json
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_posext import fixed_length, patch_model, record_of, unpatch_model
from hf_posext.cli import passkey as command
from hf_posext.demo import load_demo
from hf_posext.evaluation.answering import FORCED, GENERATED, answers, decoding_of, forced
from hf_posext.evaluation.passkey import passkey
from hf_posext.evaluation.passkey_report import PasskeyReport
from hf_posext.evaluation.retrieval import MAKERS, Source, Trial, make_trials
from hf_posext.evaluation.retrieval_sources import resolve_wording, source_of
from hf_posext.evaluation.scoring import LengthError
from hf_posext.evaluation.statistics import wilson
from tests.evaluation.retrieval_stubs import TRAINED, WORDS, Copier, Forgetful, Fragile, Reader, copier
from tests.evaluation.stubs import ContextCounter, tiny_llama
from tests.evaluation.test_bars import learned

DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]
STRING = 32  # tokens of the copied string
ROW_KEYS = ["arm", "context_length", "depth", "correct", "trials", "accuracy", "low", "high", "gate", "vacuous"]


def measure(model: nn.Module, **settings: Any) -> PasskeyReport:
    """The copy probe on random tokens, two trials in each cell."""
    defaults: dict[str, Any] = {"context_lengths": [TRAINED, 2 * TRAINED], "probe": "copy", "trials": 2, "bars": []}
    return passkey(model, None, **{**defaults, **settings})


def accuracies(report: PasskeyReport, arm: str, length: int) -> list[float]:
    """Of one arm at one length, by depth."""
    return [row["accuracy"] for row in report.rows if (row["arm"], row["context_length"]) == (arm, length)]


def distances(length: int) -> list[int]:
    """Tokens between the string and its copy in a context of some length, by depth."""
    string = min(STRING, length // 4)
    return [length - string - round(depth * (length - 2 * string)) for depth in DEPTHS]


# The interval of a share.


@pytest.mark.parametrize(
    ("correct", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (8, 10, 0.4902, 0.9433),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_published_intervals(correct: int, trials: int, low: float, high: float) -> None:
    assert wilson(correct, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("correct", "trials"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_what_is_no_share(correct: int, trials: int) -> None:
    with pytest.raises(ValueError, match=f"got {correct} of {trials}"):
        wilson(correct, trials)


# What is asked.


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    """The embedded Llama and its tokenizer."""
    return load_demo("llama")[:2]


def source(tokenizer: Any, bos: int | None = 0) -> Source:
    """Filler of one word, so that all else in a prompt can be read."""
    encode = tokenizer.backend_tokenizer.encode
    return Source(
        lambda text: encode(text, add_special_tokens=False).ids,
        encode(" amen", add_special_tokens=False).ids,
        range(2, 1000),
        bos,
    )


def trials_of(maker: str, made_of: Source, **changes: Any) -> list[Trial]:
    """Trials with the usual settings."""
    settings = {"context_length": 256, "depths": DEPTHS, "trials": 2, "answer_length": 5, "seed": 0}
    return make_trials(maker, made_of, **{**settings, **changes})


@pytest.mark.parametrize("length", [160, 256, 700])
@pytest.mark.parametrize("maker", list(MAKERS))
def test_prompt_and_answer_fill_the_context(demo: tuple[Any, Any], maker: str, length: int) -> None:
    trials = trials_of(maker, source(demo[1]), context_length=length)
    slack = 30 if maker == "key_value" else 0  # it ends with the last pair that fits
    assert len(trials) == 2 * len(DEPTHS)
    assert {trial.prompt[0] for trial in trials} == {0}
    assert all(length - slack <= len(trial.prompt) + len(trial.answer) <= length for trial in trials)


@pytest.mark.parametrize("maker", ["plain", "landmark"])
def test_a_passkey_stands_at_its_depth_and_is_asked_for_at_the_end(demo: tuple[Any, Any], maker: str) -> None:
    decode = demo[1].decode
    shown = {
        trial.depth: (decode(trial.prompt), decode(trial.answer).strip()) for trial in trials_of(maker, source(demo[1]))
    }
    for prompt, key in shown.values():
        assert f"The pass key is {key}. Remember it. {key} is the pass key." in prompt
        assert prompt.rstrip().endswith("What is the pass key? The pass key is")
        assert len(key) == 5
        assert prompt.startswith("<s>There is an important info hidden") == (maker == "landmark")
    before = [prompt[: prompt.index("Remember")].count("amen") for prompt, _ in shown.values()]
    after = [prompt[prompt.index("Remember") :].count("amen") for prompt, _ in shown.values()]
    share = [one / (one + other) for one, other in zip(before, after, strict=True)]
    assert share == pytest.approx(DEPTHS, abs=0.02)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_copy_stands_at_its_depth(depth: float) -> None:
    made_of = Source(lambda text: [], [1], range(2, WORDS), None)
    (trial,) = trials_of("copy", made_of, depths=[depth], trials=1)
    tokens = trial.prompt + trial.answer
    first = next(place for place, token in enumerate(tokens) if token != 1)
    assert first == round(depth * (256 - 2 * STRING))
    assert tokens[first : first + STRING] == tokens[-STRING:]
    assert len(trial.answer) == 5


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_is_repeated_stood_last_at_its_depth(depth: float) -> None:
    made_of = Source(lambda text: [], [1], range(2, WORDS), None)
    (trial,) = trials_of("repeat", made_of, depths=[depth], trials=1)
    tokens = trial.prompt + trial.answer
    period = STRING + round((1 - depth) * (256 - 2 * STRING))
    assert tokens[period:] == tokens[:-period]
    assert len(set(tokens[:period])) > 0.8 * period


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_value_of_the_key_at_its_depth_is_asked_for(demo: tuple[Any, Any], depth: float) -> None:
    (trial,) = trials_of("key_value", source(demo[1], None), depths=[depth], trials=1)
    body, _, question = demo[1].decode(trial.prompt).partition("JSON data:\n")[2].partition("\n\nKey: ")
    pairs = json.loads(body.replace(",\n }", "}"))
    key = json.loads(question.partition("\n")[0])
    assert len(pairs) > 4
    assert pairs[key] == demo[1].decode(trial.answer)
    assert [*pairs].index(key) == round(depth * (len(pairs) - 1))


def test_trials_do_not_depend_on_what_else_is_asked(demo: tuple[Any, Any]) -> None:
    few = trials_of("plain", source(demo[1]), depths=[0.5], trials=1)
    many = [trial for trial in trials_of("plain", source(demo[1]), trials=3) if trial.depth == 0.5]
    assert few == many[:1]
    assert trials_of("plain", source(demo[1]), depths=[0.5], trials=1, seed=1) != few


def test_a_question_joined_with_its_answer_is_asked_for_whole() -> None:
    made_of = Source(lambda text: text.replace(" 1", " #").split(" "), [1], [1], None)  # type: ignore[arg-type, return-value]
    assert made_of.continued("key is", " 12") == (["key", "is"], ["#2"])
    assert made_of.continued("key is ", "12") == (["key", "is"], ["#2"])


@pytest.mark.parametrize("maker", list(MAKERS))
def test_a_context_that_is_too_short_is_named(demo: tuple[Any, Any], maker: str) -> None:
    with pytest.raises(ValueError, match="The context length 16 does not fit the probe"):
        trials_of(maker, source(demo[1]), context_length=16)


def test_the_last_tokens_of_a_prompt_keep_its_bos() -> None:
    trial = Trial(10, 0.0, [9, 1, 2, 3, 4, 5, 6, 7], [8, 8])
    assert trial.last(6, 9).prompt == [9, 5, 6, 7]
    assert trial.last(6, None).prompt == [4, 5, 6, 7]
    assert trial.last(10, 9) is trial
    assert trial.last(3, 9).prompt == [9]


class Joining:
    """A tokenizer that puts a space in one token with the digits after it."""

    chat_template = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[str]]:
        return {"input_ids": text.replace(" 1", "|1").replace(" ", "| ").split("|")}


def test_the_wording_follows_the_tokenizer(demo: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = demo[1]
    assert resolve_wording("auto", tokenizer) == "plain"
    assert resolve_wording("landmark", tokenizer) == "landmark"
    assert resolve_wording("auto", Joining()) == "landmark"
    with pytest.raises(ValueError, match="keeps a key apart"):
        resolve_wording("plain", Joining())
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages }}")
    assert resolve_wording("auto", tokenizer) == "landmark"
    assert resolve_wording("plain", tokenizer) == "plain"


# What counts as an answer.


def test_a_model_answers_what_is_within_its_reach() -> None:
    reach = 130
    report = measure(Reader(reach), context_lengths=[128, 192])
    assert accuracies(report, "none", 128) == [float(distance <= reach) for distance in distances(128)]
    assert accuracies(report, "none", 192) == [float(distance <= reach) for distance in distances(192)]
    assert accuracies(report, "none", 192) == [0, 1, 1, 1, 1]
    assert report.protocol["decoding"] == FORCED
    assert any("cannot generate" in note for note in report.notes)


def test_an_answer_counts_only_if_all_of_it_is_right() -> None:
    class Slips(Reader):
        """Copies all but the ids that 7 divides."""

        def forward(self, input_ids: torch.Tensor) -> Any:
            logits = super().forward(input_ids).logits
            logits[..., ::7] = -1
            return SimpleNamespace(logits=logits)

    model = Slips(1000)
    made_of, _ = source_of(model, None, None, wording=None, bos="auto", text_column="text", seed=0)
    asked = trials_of("copy", made_of, depths=[0.5], trials=12)
    whole = [all(token % 7 for token in trial.answer) for trial in asked]
    (row,) = measure(model, context_lengths=[256], depths=[0.5], trials=12).rows
    assert row["correct"] == sum(whole)
    assert 0 < sum(whole) < sum(bool(trial.answer[0] % 7) for trial in asked)


def test_the_repeat_probe_asks_for_one_passage_back() -> None:
    report = measure(Reader(100), context_lengths=[192], probe="repeat")
    periods = [STRING + round((1 - depth) * (192 - 2 * STRING)) for depth in DEPTHS]
    assert accuracies(report, "none", 192) == [float(period <= 100) for period in periods]


def test_generation_answers_what_the_teacher_finds() -> None:
    one, other = measure(copier(), context_lengths=[192]), measure(Reader(TRAINED), context_lengths=[192])
    assert one.protocol["decoding"] == GENERATED
    assert accuracies(one, "none", 192) == accuracies(other, "none", 192) == [0, 0, 1, 1, 1]


def greedy(model: nn.Module, prompt: list[int], new: int) -> list[int]:
    """Arg max after arg max, the prompt alone, without a cache; a frozen scale is that of the whole."""
    ids, record = [*prompt], record_of(model)
    is_frozen = record is not None and record.scale == "frozen"
    with torch.no_grad(), fixed_length(model, len(prompt) + new) if is_frozen else nullcontext():
        for _ in range(new):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def prompts(*lengths: int) -> list[Trial]:
    """Random prompts of some lengths, each with an answer of five tokens to come."""
    rng = random.Random(3)
    return [Trial(length + 5, 0.0, rng.choices(range(1, 40), k=length), [0] * 5) for length in lengths]


PATCHES: dict[str, dict[str, Any]] = {
    "unpatched": {},
    "yarn": {"method": "yarn", "factor": 4},
    "dynamic": {"method": "yarn", "factor": 4, "dynamic": True},
    "frozen": {"method": "yarn", "factor": 4, "dynamic": True, "scale": "frozen"},
    "self_extend": {"method": "self_extend", "factor": 4},
    "alibi": {"method": "alibi", "factor": 4},
}


def tiny(patch: str) -> nn.Module:
    """A random Llama of 32 tokens, patched or not."""
    model = tiny_llama(pad_token_id=0)
    return patch_model(model, **PATCHES[patch]) if PATCHES[patch] else model


@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize("patch", list(PATCHES))
def test_a_padded_batch_answers_as_each_prompt_alone(patch: str, batch_size: int) -> None:
    model, trials = tiny(patch), prompts(60, 9, 25, 40)
    assert answers(model, trials, batch_size=batch_size) == [greedy(model, trial.prompt, 5) for trial in trials]


@pytest.mark.parametrize("patch", [patch for patch in PATCHES if patch != "frozen"])
def test_one_pass_over_the_answer_is_the_same_as_generation(patch: str) -> None:
    model = tiny(patch)
    right = [Trial(45, 0.0, trial.prompt, greedy(model, trial.prompt, 5)) for trial in prompts(40, 40)]
    assert forced(model, right) == [trial.answer for trial in right] == answers(model, right, batch_size=2)


def test_an_adapter_is_part_of_the_answer() -> None:
    model = tiny_llama(pad_token_id=0)
    before = answers(model, prompts(20, 30))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.eval()
    read = answers(adapted, prompts(20, 30), batch_size=2)
    assert read == [greedy(adapted, trial.prompt, 5) for trial in prompts(20, 30)]
    assert read != before


def test_settings_of_a_checkpoint_do_not_change_answers() -> None:
    model = tiny_llama(pad_token_id=0)
    expected = answers(model, prompts(20))
    model.generation_config.update(
        repetition_penalty=9.0, do_sample=True, top_k=3, suppress_tokens=expected[0], eos_token_id=expected[0][:1]
    )
    assert answers(model, prompts(20)) == expected


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_llama(pad_token_id=0)
    patch_model(model, "yarn", 2)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    config, generation = model.generation_config, model.generation_config.to_json_string()
    state = (model.config.to_json_string(), sorted(vars(model)))
    passkey(model, None, context_lengths=[70, 80], probe="copy", trials=1, depths=[0.5])
    assert [module.training for module in model.modules()] == modes
    assert model.generation_config is config
    assert config.to_json_string() == generation
    assert (model.config.to_json_string(), sorted(vars(model))) == state
    assert model.config.posext["method"] == "yarn"


def test_a_model_without_generate_is_known() -> None:
    assert decoding_of(Reader(1)) == FORCED
    assert decoding_of(tiny_llama()) == GENERATED


def test_a_prompt_beyond_a_learned_table_is_refused() -> None:
    with pytest.raises(LengthError, match="cannot read 72 tokens"):
        answers(learned("gpt2"), [Trial(72, 0.0, [1] * 67, [1] * 5)])


# Bars and gate.


@pytest.fixture(scope="module")
def patched_report() -> PasskeyReport:
    """A copier that reaches as far as it reads, patched to twice its length, beside two bars."""
    model = patch_model(copier(), "pi", 2)
    return measure(model, bars=["truncate", "none"], batch_size=4)


def test_the_patched_model_reaches_farther_than_its_bars(patched_report: PasskeyReport) -> None:
    assert accuracies(patched_report, "pi", 2 * TRAINED) == [1] * 5
    assert accuracies(patched_report, "none", 2 * TRAINED) == [0, 0, 1, 1, 1]
    # Of the last 96 tokens the string is whole from depth 0.75 on: it begins at token 96 of 192.
    assert accuracies(patched_report, "truncate", 2 * TRAINED) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("arm", ["pi", "truncate", "none"])
def test_within_the_trained_length_all_are_alike(patched_report: PasskeyReport, arm: str) -> None:
    assert accuracies(patched_report, arm, TRAINED) == [1] * 5
    assert patched_report.gates[arm]["accuracy"] == 1
    assert patched_report.gates[arm]["context_length"] == TRAINED


def test_the_bar_of_a_window_is_measured_and_the_patch_put_back() -> None:
    model = patch_model(copier(), "pi", 2)
    report = measure(model, bars=["window"])
    assert report.arms == ["pi", "window"]
    assert report.records["window"] is None
    assert model.config.posext["method"] == "pi"


def test_a_model_that_cannot_copy_makes_the_probe_vacuous() -> None:
    report = measure(patch_model(copier(Forgetful), "pi", 2))
    assert report.vacuous is True
    assert {row["vacuous"] for row in report.rows} == {True}
    assert {row["gate"] for row in report.rows} == {0.0}
    assert any("This probe is vacuous: at 96 tokens" in note for note in report.notes)
    assert "vacuous" in str(report)
    assert report.to_dict()["vacuous"] is True


def test_a_patch_that_costs_short_text_does_not_make_it_vacuous() -> None:
    report = measure(patch_model(copier(Fragile), "pi", 2))
    assert report.vacuous is False
    assert (report.gates["pi"]["accuracy"], report.gates["none"]["accuracy"]) == (0, 1)
    assert any("the patch costs short text" in note for note in report.notes)
    assert {row["gate"] for row in report.rows} == {0.0}


@pytest.mark.parametrize(("lengths", "place"), [([64, 80, 192], 80), ([150, 192], TRAINED)])
def test_the_gate_is_measured_at_the_longest_length_within(lengths: list[int], place: int) -> None:
    report = measure(copier(), context_lengths=lengths, trials=1)
    assert report.gates["none"] == {"context_length": place, "correct": 5, "trials": 5, "accuracy": 1.0} | dict(
        zip(("low", "high"), wilson(5, 5), strict=True)
    )
    assert sorted({row["context_length"] for row in report.rows}) == lengths


@pytest.mark.parametrize(("gate", "vacuous"), [(0.4, False), (0.6, False), (0.61, True)])
def test_the_gate_can_be_set(gate: float, vacuous: bool) -> None:
    class Half(Copier):
        """Reaches half of what it reads: at 96 tokens three of five depths."""

        reach_share = 0.5

    report = measure(copier(Half), context_lengths=[TRAINED], gate=gate)
    assert report.gates["none"]["accuracy"] == sum(d <= TRAINED // 2 for d in distances(TRAINED)) / 5 == 0.6
    assert report.vacuous is vacuous


def test_without_a_trained_length_there_is_no_gate_and_no_bar() -> None:
    report = measure(Reader(1000), bars=["truncate", "window"])
    assert report.vacuous is None
    assert {(row["gate"], row["vacuous"]) for row in report.rows} == {(None, None)}
    assert sum("is left out" in note for note in report.notes) == 2
    assert any("not known whether the model can do it" in note for note in report.notes)


def test_a_length_beyond_reach_is_noted() -> None:
    report = measure(copier())
    assert any("`none` is made for 96 tokens; 192 is beyond its reach" in note for note in report.notes)


def test_a_bar_that_cannot_read_as_much_is_left_out() -> None:
    model = patch_model(learned("gpt2"), "pi", 4)
    report = measure(model, context_lengths=[100], depths=[0.5], trials=1, bars=["none"], gate=0)
    assert report.arms == ["pi"]
    assert any("`none` is left out: The model cannot read 100 tokens" in note for note in report.notes)


# The report.


def test_rows_have_the_promised_keys_and_numbers(patched_report: PasskeyReport) -> None:
    row = patched_report.rows[5]
    assert list(row) == ROW_KEYS
    assert (row["arm"], row["context_length"], row["depth"], row["correct"], row["trials"]) == ("pi", 192, 0.0, 2, 2)
    assert (row["low"], row["high"]) == wilson(2, 2)
    assert len(patched_report.rows) == 3 * 2 * 5


def test_all_depths_are_taken_together(patched_report: PasskeyReport) -> None:
    found = patched_report.over_depths("truncate", 192)
    assert found is not None
    assert (found["correct"], found["trials"], found["accuracy"]) == (4, 10, 0.4)
    assert (found["low"], found["high"]) == wilson(4, 10)
    assert patched_report.over_depths("truncate", 7) is None


def test_the_report_survives_json(patched_report: PasskeyReport) -> None:
    text = patched_report.to_json()
    after = PasskeyReport.from_dict(json.loads(text, parse_constant=pytest.fail))
    assert after.to_dict() == json.loads(text) == patched_report.to_dict()
    assert after.rows == patched_report.rows


def test_the_table_says_what_was_asked_of_which_model(patched_report: PasskeyReport) -> None:
    text = str(patched_report)
    expected = [
        "probe copy",
        "1.00 [0.34, 1.00]",
        "0.40 [0.17, 0.69]",
        "2 trials at each depth and length",
        "filler: random tokens",
        "greedy, cached",
        "trained length 96",
        "pi: pi x2 (96 -> 192 tokens)",
        "at 96 tokens (gate 0.8): pi 1.00",
    ]
    assert [part for part in expected if part not in text] == []


def test_equal_settings_give_equal_reports_whatever_the_batch() -> None:
    one, other = (measure(copier(), trials=3, batch_size=size) for size in (1, 8))
    assert one.rows == other.rows
    assert one.protocol["digest"] == other.protocol["digest"]
    assert measure(copier(), trials=3, seed=1).protocol["digest"] != one.protocol["digest"]


def test_arms_are_joined_on_the_same_trials(patched_report: PasskeyReport) -> None:
    other = measure(patch_model(copier(), "yarn", 2), bars=["truncate"])
    joined = PasskeyReport.join([patched_report, other])
    assert joined.arms == ["pi", "truncate", "none", "yarn"]
    assert set(joined.gates) == {"pi", "truncate", "none", "yarn"}
    assert len(patched_report.rows) == 30


def test_other_trials_cannot_be_joined(patched_report: PasskeyReport) -> None:
    with pytest.raises(ValueError, match="differ in `seed`: 0 and 1"):
        PasskeyReport.join([patched_report, measure(copier(), seed=1)])
    with pytest.raises(ValueError, match="an arm `none` with other numbers"):
        PasskeyReport.join([patched_report, measure(copier(Forgetful))])
    with pytest.raises(ValueError, match="`reports` is empty"):
        PasskeyReport.join([])


def test_the_heat_map_has_a_panel_for_each_arm_and_a_number_in_each_cell(patched_report: PasskeyReport) -> None:
    figure = patched_report.plot()
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["pi", "truncate", "none"]
    image = panels[1].get_images()[0]
    assert image.get_array().tolist() == [[1, 0], [1, 0], [1, 0], [1, 1], [1, 1]]
    assert image.get_cmap().name == "cividis"
    assert [text.get_text() for text in panels[1].texts] == [*["1.00", "0.00"] * 3, *["1.00"] * 4, "trained length 96"]
    assert panels[0].get_lines()[0].get_xdata()[0] == 0.5
    assert panels[0].get_xlabel() == "context length (tokens)"


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_plot_is_written_as_its_suffix_says(patched_report: PasskeyReport, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plot{suffix}"
    patched_report.plot(path)
    assert path.read_bytes().startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix])


def test_a_vacuous_plot_says_so() -> None:
    figure = measure(copier(Forgetful), context_lengths=[TRAINED]).plot()
    assert figure._suptitle.get_text().startswith("vacuous")


# Bad arguments.


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"probe": "pass_key"}, ValueError, "Did you mean `passkey`"),
        ({"depths": [0, 2]}, ValueError, "`depths` must be from 0 to 1, got 2"),
        ({"depths": []}, ValueError, "`depths` is empty"),
        ({"depths": 0.5}, TypeError, "`depths` must be a list of numbers"),
        ({"context_lengths": 128}, TypeError, "`context_lengths` must be a list of numbers"),
        ({"context_lengths": [0]}, ValueError, "`context_lengths` must be at least 1 token"),
        ({"trials": 0}, ValueError, "`trials` must be at least 1"),
        ({"trials": True}, TypeError, "`trials` must be a whole number"),
        ({"answer_length": 2.5}, TypeError, "`answer_length` must be a whole number"),
        ({"gate": float("nan")}, ValueError, "`gate` must be from 0 to 1, got nan"),
        ({"gate": "high"}, TypeError, "`gate` must be from 0 to 1, got 'high'"),
        ({"bars": ["windows"]}, ValueError, "Did you mean `window`"),
        ({"bars": "none"}, TypeError, "`bars` must be a list of names"),
        ({"wording": "polite"}, ValueError, "Unknown value of `wording`"),
        ({"probe": "passkey"}, ValueError, "needs a `tokenizer`"),
        ({"probe": "key_value"}, ValueError, "needs a `tokenizer`"),
        ({"documents": [[1, WORDS]]}, ValueError, "token id 997"),
        ({"documents": [[]]}, ValueError, "`documents` hold no token"),
        ({"arm": "truncate"}, ValueError, "must not be the name of a bar"),
        ({"context_lengths": [16]}, ValueError, "it needs 18 tokens besides a BOS, and 16 are there"),
    ],
)
def test_a_bad_argument_is_named(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        measure(Reader(10), **settings)


def test_a_model_that_says_no_vocabulary_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="ContextCounter does not say which token ids it reads"):
        measure(ContextCounter())


# The embedded model, and the command.


def test_the_embedded_model_retrieves_within_its_window(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    report = passkey(model, tokenizer, context_lengths=[256], answer_length=3, trials=6, bars=[], depths=[0, 0.5, 1])
    assert report.vacuous is False
    assert (report.protocol["wording"], report.protocol["filler"]) == ("plain", "embedded prose")


def test_filler_can_be_given(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    settings = {"context_lengths": [128], "trials": 1, "depths": [0.5], "bars": []}
    one = passkey(model, tokenizer, documents=["The sea is wide. " * 30], **settings)
    other = passkey(model, tokenizer, wording="landmark", **settings)
    assert one.protocol["filler"] == "documents"
    assert other.protocol["filler"] == "sentences of the Landmark paper"
    assert len({report.protocol["digest"] for report in (one, other)}) == 2


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Runs the command and gives what it wrote to stdout."""

    def run(**options: Any) -> str:
        command.run("demo:llama", **options)
        return capsys.readouterr().out

    return run


def test_the_command_gives_the_rows_of_the_function(shown: Any, demo: tuple[Any, Any]) -> None:
    words = {"context_lengths": "256,300", "probe": "copy", "depths": "0,1", "trials": 1, "answer_length": 2}
    data = json.loads(shown(**words, method="yarn", factor=2, bars="truncate", as_json=True))
    model, tokenizer = load_demo("llama")[:2]
    patch_model(model, "yarn", 2)
    report = passkey(
        model, tokenizer, context_lengths=[256, 300], probe="copy", depths=[0, 1], trials=1, answer_length=2,
        bars=["truncate"],
    )  # fmt: skip
    assert data["rows"] == json.loads(report.to_json())["rows"]
    assert data["record"]["method"] == "yarn"
    unpatch_model(model)


def test_the_command_writes_report_and_plot(shown: Any, tmp_path: Path) -> None:
    text = shown(context_lengths="128", trials=1, depths="0.5", bars="", out=tmp_path / "out")
    assert f"saved {tmp_path / 'out' / 'plot.png'}" in text
    report = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert report["protocol"]["probe"] == "passkey"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": "0,high"}, "`--depths` must be numbers between commas"),
        ({"factor": 2}, "belong to a method"),
    ],
)
def test_the_command_names_bad_words(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command.run("demo:llama", context_lengths="256", **options)
