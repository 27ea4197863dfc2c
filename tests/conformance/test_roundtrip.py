"""Invariant 5: a patched model loads again after saving, in plain transformers wherever a config can say it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_posext import inspect_model, load_pretrained, patch_model, record_of, unpatch_model
from tests import special_models
from tests.architectures import ARCHITECTURE, tiny_model
from tests.methods import METHOD, METHODS, pairs, patch_row, spread
from tests.plain_reader import LENGTHS
from tests.snapshots import differences, logits_of, snapshot

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
"""Relative to the largest logit."""

IN_PLAIN_LLAMA_WORDS = {row.id: row.native for row in METHODS}
ALL_LONGROPE = dict.fromkeys(METHOD, "longrope")
TWO_CHANNELS = {**IN_PLAIN_LLAMA_WORDS, "ntk_by_parts": "default", "llama3": "default"}
NATIVE: dict[str, tuple[dict[str, str | None], str]] = {
    "gptj": (dict.fromkeys(METHOD), "its table is in no state dict and its config has no words for scaling"),
    "roformer": (dict.fromkeys(METHOD, "weights"), "its table is a weight and is saved as such"),
    "phi3": ({**ALL_LONGROPE, "ntk": "default", "abf": "default"}, "its config refuses every other scaling type"),
    "gpt_neox": (TWO_CHANNELS, "two channels: whatever keeps the first one is a change of base"),
    "stablelm": (TWO_CHANNELS, "two channels: whatever keeps the first one is a change of base"),
    "llama_linear": ({**ALL_LONGROPE, "pi": "linear"}, "scaled already: linear and linear are linear, all else ratios"),
    "gemma3_linear": (
        {**ALL_LONGROPE, "pi": "linear"},
        "scaled already: linear and linear are linear, all else ratios",
    ),
    "llama_llama3": (ALL_LONGROPE, "scaled already: exact ratios"),
    "llama_yarn": (ALL_LONGROPE, "scaled already: exact ratios"),
    "llama_longrope": (ALL_LONGROPE, "scaled already: exact ratios"),
    "phi3_longrope": (ALL_LONGROPE, "scaled already: exact ratios"),
    "deepseek_v3_yarn": (ALL_LONGROPE, "scaled already: exact ratios, its temperature keys kept"),
    "esm": ({"pi": "weights", "yarn": None}, "frequencies are in the state dict, a temperature is nowhere"),
    "codegen": ({"pi": None, "yarn": None}, "its table is in no state dict and its config has no words for scaling"),
    "phimoe": (
        {"pi": "longrope", "yarn": "longrope"},
        "its forward asks the config for `long_mscale` unless `default`",
    ),
}
"""Row -> what `record.native` is for each method, and why it is not what it is on a plain Llama."""

SPECIAL = [
    pytest.param(name, method, id=f"{name}-{method}") for name in special_models.ROTARY for method in ("pi", "yarn")
]
CASES = [*spread(), *SPECIAL]


@dataclass(frozen=True)
class Saved:
    """A patched model on disk, and what it gave in memory."""

    folder: Path
    auto_class: str
    native: str | None
    unpatched: dict[int, torch.Tensor]
    logits: dict[int, torch.Tensor]
    keys: tuple[list[str], list[str]]


def make(name: str) -> Any:
    """The unpatched model of a row, or a special one."""
    return special_models.ROTARY[name]() if name in special_models.ROTARY else tiny_model(name)


def patch(model: Any, name: str, method: str) -> Any:
    """The model, patched by 2."""
    return patch_model(model, method, 2) if name in special_models.ROTARY else patch_row(model, name, method)


def save(name: str, method: str, folder: Path) -> Saved:
    """Patches and saves one model."""
    model = make(name)
    row = ARCHITECTURE.get(name)
    auto_class = row.auto_class if row else "AutoModelForMaskedLM" if name == "esm" else "AutoModelForCausalLM"
    short = {length: logits_of(model, length) for length in LENGTHS[:1]}
    keys = list(model.state_dict())
    patch(model, name, method).save_pretrained(folder)
    logits = {length: logits_of(model, length) for length in LENGTHS}
    return Saved(folder, auto_class, record_of(model).native, short, logits, (keys, list(model.state_dict())))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Saved]:
    """Every case on disk, by row and method."""
    names = [case.values for case in CASES]
    return {(row, method): save(row, method, tmp_path_factory.mktemp(f"{row}-{method}")) for row, method in names}


@pytest.fixture(scope="module")
def read_plainly(
    saved: dict[tuple[str, str], Saved], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], dict[str, Any]]:
    """What a process without this package makes of all cases that claim to need no more."""
    folder = tmp_path_factory.mktemp("plain")
    native = {case: each for case, each in saved.items() if each.native is not None}
    jobs = [{"folder": str(each.folder), "auto_class": each.auto_class} for each in native.values()]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.plain_reader", folder / "jobs.json", folder / "results.pt"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return dict(zip(native, torch.load(folder / "results.pt"), strict=True))


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the tolerance of the largest logit."""
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(("architecture", "method"), CASES)
def test_plain_transformers_needs_this_package_only_where_we_say_so(
    architecture: str, method: str, saved: dict[tuple[str, str], Saved]
) -> None:
    expected = NATIVE[architecture][0] if architecture in NATIVE else IN_PLAIN_LLAMA_WORDS
    assert saved[architecture, method].native == expected[method]


NATIVE_CASES = [case for case in CASES if NATIVE.get(case.values[0], (METHOD,))[0].get(case.values[1])]


@pytest.mark.parametrize("step", [0.0, 1e-3])
def test_words_that_are_only_nearly_right_are_not_used(step: float) -> None:
    """Eight equal ratios are `linear`; not so if the slowest channel, which hardly turns, is off in the third digit."""
    ratios = [2.0] * 7 + [2.0 * (1 + step)]
    model = patch_model(tiny_model("llama"), "longrope", 2, long_factor=ratios, attention_factor=1.0)
    assert record_of(model).native == ("longrope" if step else "linear")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("architecture", "method"), NATIVE_CASES)
def test_plain_transformers_gives_the_logits_of_the_patched_model(
    architecture: str,
    method: str,
    length: int,
    saved: dict[tuple[str, str], Saved],
    read_plainly: dict[tuple[str, str], dict[str, Any]],
) -> None:
    found = read_plainly[architecture, method]
    assert_close(found["logits"][length], saved[architecture, method].logits[length])
    assert found["logged"] == []


@pytest.mark.parametrize(("architecture", "method"), CASES)
def test_load_pretrained_gives_the_logits_of_the_patched_model(
    architecture: str, method: str, saved: dict[tuple[str, str], Saved]
) -> None:
    case = saved[architecture, method]
    model = load_pretrained(case.folder, getattr(transformers, case.auto_class)).eval()
    assert record_of(model).method == method
    assert_close(logits_of(model, LENGTHS[1]), case.logits[LENGTHS[1]])


@pytest.mark.parametrize(("architecture", "method"), CASES)
def test_a_loaded_model_can_be_unpatched(architecture: str, method: str, saved: dict[tuple[str, str], Saved]) -> None:
    case = saved[architecture, method]
    model = unpatch_model(load_pretrained(case.folder, getattr(transformers, case.auto_class)).eval())
    assert record_of(model) is None
    assert_close(logits_of(model), case.unpatched[LENGTHS[0]])


@pytest.mark.parametrize(("architecture", "method"), pairs(("llama", "gemma3", "qwen2_vl", "llama_yarn")))
def test_a_model_that_plain_transformers_loaded_can_be_inspected_and_unpatched(
    architecture: str, method: str, saved: dict[tuple[str, str], Saved]
) -> None:
    case = saved[architecture, method]
    model = getattr(transformers, case.auto_class).from_pretrained(case.folder).eval()
    assert inspect_model(model).in_force is True
    assert [site.site for site in inspect_model(model).sites if site.is_patched] == record_of(model).sites
    assert torch.equal(logits_of(unpatch_model(model)), case.unpatched[LENGTHS[0]])


@pytest.mark.parametrize(("architecture", "method"), CASES)
def test_state_dict_keys_do_not_change(architecture: str, method: str, saved: dict[tuple[str, str], Saved]) -> None:
    before, after = saved[architecture, method].keys
    assert before == after


@pytest.mark.parametrize("method", list(METHOD))
def test_factors_are_written_as_floats(method: str, saved: dict[tuple[str, str], Saved]) -> None:
    """Readers refuse `2` where they want `2.0` (field report 26); `abf` and `ntk` have no factor."""
    text = (saved["llama", method].folder / "config.json").read_text()
    written = json.loads(text)
    assert [type(value) for value in (written["rope_parameters"]["rope_theta"], written["posext"]["factor"])] == [
        float
    ] * 2
    assert ("factor" in written["rope_parameters"]) == (METHOD[method].native != "default")
    assert '"factor": 2,' not in text


@pytest.mark.parametrize(("method", "theta"), [("pi", 1e4), ("yarn", 1e4), ("longrope", 1e4), ("abf", 2e6)])
def test_theta_is_kept_unless_it_is_what_changes(
    method: str, theta: float, saved: dict[tuple[str, str], Saved]
) -> None:
    block = json.loads((saved["llama", method].folder / "config.json").read_text())["rope_parameters"]
    assert block["rope_theta"] == pytest.approx(theta, rel=1e-6)


@pytest.mark.parametrize("method", ["yarn", "llama3", "longrope", "ntk_by_parts"])
def test_original_length_stands_beside_the_raised_one(method: str, saved: dict[tuple[str, str], Saved]) -> None:
    config = json.loads((saved["llama", method].folder / "config.json").read_text())
    assert config["rope_parameters"]["original_max_position_embeddings"] == 32
    assert (config["max_position_embeddings"], type(config["max_position_embeddings"])) == (64, int)


@pytest.mark.transformers_logs("transformers says that it does not know `foo`")
def test_unknown_keys_of_the_rope_block_are_kept(tmp_path: Path) -> None:
    settings = tiny_model("llama").config.to_dict()
    block = {**settings["rope_parameters"], "foo": 1}
    model = LlamaForCausalLM(LlamaConfig(**{**settings, "rope_parameters": block})).eval()
    patch_model(model, "yarn", 2).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["rope_parameters"]["foo"] == 1
    unpatch_model(model)
    assert model.config.rope_parameters == block


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_neox", "gptj"])
def test_loading_in_half_precision_and_patching_may_change_places(
    architecture: str, saved: dict[tuple[str, str], Saved], tmp_path: Path
) -> None:
    model = load_pretrained(saved[architecture, "yarn"].folder, dtype=torch.bfloat16).eval()
    assert model.dtype is torch.bfloat16
    tiny_model(architecture).save_pretrained(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    patch_row(expected, architecture, "yarn")
    assert torch.equal(logits_of(model), logits_of(expected))


@pytest.mark.parametrize("architecture", ["llama", "gptj", "roformer"])
def test_shards_load_as_one_file_does(architecture: str, tmp_path: Path) -> None:
    model = patch_row(tiny_model(architecture), architecture, "pi")
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = load_pretrained(tmp_path, getattr(transformers, ARCHITECTURE[architecture].auto_class)).eval()
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_saving_again_after_loading_changes_nothing(tmp_path: Path) -> None:
    model = patch_model(tiny_model("llama"), "yarn", 2)
    model.save_pretrained(tmp_path / "first")
    load_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "second"))
    assert first == second


def test_saving_does_not_change_the_model(tmp_path: Path) -> None:
    model = patch_model(tiny_model("gemma3"), "yarn", 2)
    model.save_pretrained(tmp_path)  # transformers notes class and dtype in the config at the first time
    before = snapshot(model)
    model.save_pretrained(tmp_path)
    assert differences(before, snapshot(model)) == []


def test_a_model_saved_after_unpatching_is_the_unpatched_one(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "before")
    unpatch_model(patch_model(model, "yarn", 2)).save_pretrained(tmp_path / "after")
    assert (tmp_path / "before" / "config.json").read_text() == (tmp_path / "after" / "config.json").read_text()


def test_a_checkpoint_without_a_record_loads_as_it_is(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path)
    assert record_of(loaded) is None
    assert torch.equal(logits_of(loaded), logits_of(model))


def test_a_patched_checkpoint_is_not_patched_twice_by_mistake(tmp_path: Path) -> None:
    patch_model(tiny_model("llama"), "pi", 2).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="already patched"):
        patch_model(model, "pi", 2)
