"""A report says what is in a model, in numbers that can be counted directly, and changes nothing."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posext import inspect_model, list_methods, patch_model, record_of, unpatch_model
from tests import special_models
from tests.architectures import ARCHITECTURES, Architecture, tiny_model
from tests.methods import DYNAMIC_BY_NATURE, IN_ATTENTION, METHOD, ON_TABLES, frequencies_of, pairs, patch_row
from tests.snapshots import differences, snapshot

ROWS = pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.id)
THETA: dict[str, tuple[float, ...]] = {
    "gemma3": (1e6, 1e4),
    "gemma3_linear": (1e6, 1e4),
    "modernbert": (160_000.0, 10_000.0),
    "cohere": (500_000.0,),
}
"""Bases that are not 10000, in the order of the sites."""


@ROWS
def test_sites_length_base_and_width_are_those_of_the_family(row: Architecture) -> None:
    report = inspect_model(tiny_model(row.id))
    labels = [site.site.partition("[")[2].rstrip("]") for site in report.sites]
    assert len(labels) == (2 if row.id in ("gemma3", "gemma3_linear", "modernbert") else 1)
    assert (report.trained_length, report.usable_length) == (row.trained_length * row.native_factor,) * 2
    assert [site.rotated_width for site in report.sites] == [2 * frequencies_of(row)] * len(labels)
    bases = THETA.get(row.id, (10_000.0,))
    assert [site.base for site in report.sites] == [pytest.approx(base, rel=1e-6) for base in bases]
    assert {site.mechanism for site in report.sites} == set(row.mechanisms)


PLAIN = [row for row in ARCHITECTURES if row.native_factor == 1]


@pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.id)
def test_channels_without_a_full_turn_are_counted_from_the_base(row: Architecture) -> None:
    """Wavelength 2 pi b^(2i/d) against N, one channel at a time."""
    count, bases = frequencies_of(row), THETA.get(row.id, (10_000.0,))
    waves = [[2 * math.pi * base ** (i / count) for i in range(count)] for base in bases]
    report = inspect_model(tiny_model(row.id))
    assert [site.incomplete for site in report.sites] == [sum(wave > 32 for wave in each) for each in waves]
    assert [site.shortest_wavelength for site in report.sites] == [pytest.approx(2 * math.pi, rel=1e-6)] * len(waves)
    assert [site.longest_wavelength for site in report.sites] == [pytest.approx(each[-1], rel=1e-5) for each in waves]


@pytest.mark.parametrize(
    ("architecture", "method"), pairs(("llama", "gemma3", "gptj", "roformer", "qwen2_vl", "llama_yarn"))
)
def test_a_patched_model_says_so_and_keeps_its_trained_length(architecture: str, method: str) -> None:
    model = tiny_model(architecture)
    length = inspect_model(model).trained_length
    patch_row(model, architecture, method)
    report = inspect_model(model)
    assert (report.trained_length, report.usable_length, report.in_force) == (length, 2 * length, True)
    assert report.record == record_of(model).to_dict()
    assert [site.is_patched for site in report.sites] == [site.site in report.record["sites"] for site in report.sites]
    assert f"reads {2 * length} tokens by {method} x2" in str(report)
    unpatch_model(model)
    assert (inspect_model(model).record, inspect_model(model).in_force) == (None, None)


def test_pi_makes_every_wave_longer_by_the_factor() -> None:
    before = inspect_model(tiny_model("llama")).sites[0]
    after = inspect_model(patch_model(tiny_model("llama"), "pi", 4)).sites[0]
    assert after.longest_wavelength == pytest.approx(4 * before.longest_wavelength, rel=1e-12)
    assert after.shortest_wavelength == pytest.approx(4 * before.shortest_wavelength, rel=1e-12)


@ROWS
def test_inspection_changes_nothing(row: Architecture) -> None:
    model = tiny_model(row.id)
    before = snapshot(model, 0)
    inspect_model(model)
    list_methods(model)
    assert differences(before, snapshot(model, 0)) == []


@ROWS
def test_a_report_is_plain_data_and_a_table(row: Architecture, tmp_path: Path) -> None:
    report = inspect_model(patch_row(tiny_model(row.id), row.id, "pi"))
    report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report.to_dict()))
    text = str(report)
    assert report.model in text
    assert all(site.site.partition("[")[0] in text for site in report.sites)
    assert all(len(line) <= 120 for line in text.splitlines())


def test_windows_are_reported_where_every_layer_has_one() -> None:
    report = inspect_model(tiny_model("mistral_sliding"))
    assert report.sites[0].window == 8
    assert any("sliding window of 8 tokens" in note for note in report.notes)


def test_windows_of_some_layers_are_on_their_own_site() -> None:
    report = inspect_model(tiny_model("gemma3"))
    windows = {site.site: site.window for site in report.sites}
    assert windows == {"model.rotary_emb[full_attention]": None, "model.rotary_emb[sliding_attention]": 8}
    assert report.notes == []


def test_a_model_without_a_known_encoding_gets_a_report_all_the_same() -> None:
    report = inspect_model(special_models.mamba())
    assert (report.sites, list_methods(special_models.mamba())) == ([], [])
    assert any("no position encoding that is known" in note for note in report.notes)
    assert str(report)


def test_a_wrapped_model_gives_the_same_report() -> None:
    model = tiny_model("llama")
    assert inspect_model(torch.nn.Sequential(model)).to_dict() == inspect_model(model).to_dict()


def test_every_method_is_listed_with_what_a_user_needs() -> None:
    rows = list_methods()
    assert {row.name for row in rows} == {*METHOD, *DYNAMIC_BY_NATURE, *IN_ATTENTION, *ON_TABLES}
    assert all(row.summary and row.paper and row.mechanisms for row in rows)
    assert {row.name: set(row.options) for row in rows}["longrope"] == {
        "long_factor",
        "short_factor",
        "attention_factor",
    }


@pytest.mark.parametrize("build", [lambda: tiny_model("llama"), special_models.esm, special_models.codegen])
def test_a_rotary_model_can_have_every_rotary_method(build: Any) -> None:
    names = [row.name for row in list_methods(build())]
    assert names == [row.name for row in list_methods() if {"rotary", "attention"} & {*row.mechanisms}]


def test_a_model_with_a_table_can_have_what_needs_no_rotation() -> None:
    without_rotation = {"pi", "alibi", "nope", "window", *ON_TABLES}
    assert {row.name for row in list_methods(special_models.gpt2())} == without_rotation
    (site,) = inspect_model(special_models.gpt2()).sites
    assert (site.mechanism, site.site, site.rows, site.base) == ("learned", "transformer.wpe", 32, None)


@pytest.mark.parametrize("method", ["alibi", "nope"])
def test_a_site_that_is_switched_off_is_reported_as_off(method: str) -> None:
    for model in (tiny_model("llama"), special_models.gpt2()):
        report = inspect_model(patch_model(model, method, 2))
        assert [(site.is_patched, site.is_off) for site in report.sites] == [(True, True)]
        assert any("acts in 2 attention modules" in note for note in report.notes) == (method == "alibi")
        assert "off" in str(report)
        assert [site.is_off for site in inspect_model(unpatch_model(model)).sites] == [False]
