"""Every method gives the published numbers: worked by hand, by formula in float64, and by transformers itself."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_posext.contract import RotaryChange, Spectrum
from hf_posext.methods import REGISTRY, get_method
from tests import reference
from tests.methods import IN_ATTENTION

GOLDEN = Path(__file__).parents[1] / "golden"
BY_HAND = json.loads((GOLDEN / "by_hand.json").read_text(encoding="utf-8"))["rows"]
BY_TRANSFORMERS = json.loads((GOLDEN / "transformers.json").read_text(encoding="utf-8"))["rows"]
WIDTHS, BASES, FACTORS = (8, 16, 64, 128), (1e4, 5e5), (1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
LENGTH = 4096
NATIVE = {
    "linear": "pi",
    "yarn-truncated": "yarn-truncated",
    "yarn-untruncated": "yarn-untruncated",
    "llama3": "llama3",
    "longrope": "longrope",
}
"""Case of transformers -> case of `reference.FORMULAE`."""


def apply(name: str, inv_freq: Tensor, base: float, length: int, factor: float, **options: Any) -> RotaryChange:
    return get_method(name).functions["rotary"](Spectrum(inv_freq.double(), 1.0, length, base), factor, **options)


def exact(d: int, base: float) -> Tensor:
    """The spectrum in float64, [F]."""
    return torch.from_numpy(reference.geometric(d, base))


def live(d: int, base: float) -> Tensor:
    """The float32 buffer of a model with this spectrum, [F]."""
    rope = {"rope_type": "default", "rope_theta": base}
    return LlamaRotaryEmbedding(LlamaConfig(head_dim=d, rope_parameters=rope)).inv_freq


SOURCES = {"float64": exact, "float32_buffer": live}


def by_transformers(case: str, d: int, base: float, length: int, factor: float) -> tuple[Tensor, float]:
    """What transformers computes: float32 frequencies [F] and its multiplier of cos and sin."""
    rope_type = case.split("-")[0]
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": base, "factor": factor}
    if rope_type != "linear":
        rope["original_max_position_embeddings"] = length
    if rope_type == "yarn":
        rope["truncate"] = case == "yarn-truncated"
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope_type == "longrope":
        rope |= dict.fromkeys(("short_factor", "long_factor"), reference.longrope_ratios(d, factor))
    config = LlamaConfig(head_dim=d, max_position_embeddings=int(length * factor), rope_parameters=rope)
    return ROPE_INIT_FUNCTIONS[rope_type](config)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.json")), ids=lambda file: file.stem)
@pytest.mark.parametrize("key", ["source", "version", "command"])
def test_golden_file_says_where_it_comes_from(file: Path, key: str) -> None:
    assert json.loads(file.read_text(encoding="utf-8"))[key]


def test_every_rotary_method_has_a_golden_worked_by_hand() -> None:
    rotary = {name for name, method in REGISTRY.items() if "rotary" in method.functions} - {*IN_ATTENTION}
    assert rotary == {row["method"] for row in BY_HAND}


@pytest.mark.parametrize("row", BY_HAND, ids=lambda row: row["id"])
def test_method_gives_the_numbers_worked_by_hand(row: dict[str, Any]) -> None:
    d, base = row["rotated"], row["base"]
    change = apply(row["method"], exact(d, base), base, row["trained_length"], row["factor"], **row["options"])
    # ten digits are written down, so the last one is known to half a unit
    np.testing.assert_allclose(change.inv_freq, row["inv_freq"], rtol=5e-10, atol=0)
    assert change.attention_scaling == pytest.approx(row["attention_scaling"], rel=5e-10, abs=0)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("row", BY_TRANSFORMERS, ids=lambda row: row["id"])
def test_method_gives_the_numbers_of_published_checkpoints(row: dict[str, Any], source: str) -> None:
    d, base = row["rotated"], row["base"]
    change = apply(
        row["method"], SOURCES[source](d, base), base, row["trained_length"], row["factor"], **row["options"]
    )
    np.testing.assert_allclose(change.inv_freq, row["inv_freq"], rtol=1e-6, atol=0)
    assert change.attention_scaling == pytest.approx(row["attention_scaling"], rel=1e-12, abs=0)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("case", reference.FORMULAE)
def test_frequencies_equal_the_paper_in_float64(case: str, d: int, base: float, factor: float, source: str) -> None:
    name, formula = reference.FORMULAE[case]
    options = reference.options(case, d, factor)
    change = apply(name, SOURCES[source](d, base), base, LENGTH, factor, **options)
    rtol = {"float64": 1e-12, "float32_buffer": 1e-6}[source]
    np.testing.assert_allclose(change.inv_freq, formula(d, base, LENGTH, factor), rtol=rtol, atol=0)


@pytest.mark.parametrize("length", [32, 256, 2048, 8192, 131072])
@pytest.mark.parametrize("case", [case for case in reference.FORMULAE if case.split("-")[0] in ("yarn", "llama3")])
def test_ramps_equal_the_paper_at_every_trained_length(case: str, length: int) -> None:
    name, formula = reference.FORMULAE[case]
    change = apply(name, exact(128, 1e4), 1e4, length, 4.0, **reference.options(case, 128, 4.0))
    np.testing.assert_allclose(change.inv_freq, formula(128, 1e4, length, 4.0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("case", NATIVE)
def test_frequencies_equal_those_of_transformers(case: str, d: int, base: float, factor: float, source: str) -> None:
    name, _ = reference.FORMULAE[NATIVE[case]]
    options = reference.options(NATIVE[case], d, factor)
    change = apply(name, SOURCES[source](d, base), base, LENGTH, factor, **options)
    inv_freq, attention_scaling = by_transformers(case, d, base, LENGTH, factor)
    # The largest difference, 9.6e-7 for the untruncated ramp at factor 16, is float32's: transformers rounds the ramp
    # (index - low) / (high - low) by up to 6e-8 near 1, and where gamma is nearly 0 that counts s - 1 times.
    np.testing.assert_allclose(change.inv_freq, inv_freq, rtol=1e-6, atol=0)
    assert change.attention_scaling == pytest.approx(attention_scaling, rel=1e-12, abs=0)


@pytest.mark.parametrize("factor", FACTORS)
def test_reference_attention_factors_are_those_of_the_methods(factor: float) -> None:
    yarn = apply("yarn", exact(16, 1e4), 1e4, LENGTH, factor)
    longrope = apply("longrope", exact(16, 1e4), 1e4, LENGTH, factor, long_factor=[1.0] * 8)
    assert yarn.attention_scaling == pytest.approx(reference.yarn_attention_factor(factor), rel=1e-14)
    assert longrope.attention_scaling == pytest.approx(reference.longrope_attention_factor(factor, LENGTH), rel=1e-14)


@pytest.mark.parametrize("name", ["pi", "ntk"])
@pytest.mark.parametrize("factor", FACTORS)
def test_slowest_channel_is_stretched_by_exactly_the_factor(name: str, factor: float) -> None:
    """Field reports 16 and 30."""
    theta = exact(16, 1e4)
    assert float(theta[-1] / apply(name, theta, 1e4, 32, factor).inv_freq[-1]) == pytest.approx(factor, rel=1e-15)


def test_ntk_keeps_the_fastest_channel_to_the_last_bit() -> None:
    assert float(apply("ntk", exact(16, 1e4), 1e4, 32, 2.0).inv_freq[0]) == 1.0


def test_ntk_is_the_static_form_of_dynamic_at_one_length() -> None:
    """Field report 71: `dynamic` with factor f at l tokens is `ntk` with f l / N - (f - 1); here 2 * 2 - 1 = 3."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = LlamaConfig(head_dim=16, max_position_embeddings=32, rope_parameters=dynamic)
    inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=torch.tensor(64))
    np.testing.assert_allclose(apply("ntk", exact(16, 1e4), 1e4, 32, 3.0).inv_freq, inv_freq, rtol=1e-6, atol=0)


def test_pi_angle_at_twice_the_position_is_the_old_angle_exactly() -> None:
    """Field report 78."""
    theta, positions = live(128, 5e5), torch.arange(4096.0)
    halved = apply("pi", theta, 5e5, LENGTH, 2.0).inv_freq.float()
    assert torch.equal(torch.outer(2 * positions, halved), torch.outer(positions, theta))


def test_rotations_ramp_and_index_ramp_are_not_the_same() -> None:
    """The paper and its code differ by up to 0.367 in gamma at d = 128, N = 4096, so `ramp` has to be a choice."""
    index = reference.ramp_over_index(128, 1e4, 4096, 32, 1, truncate=True)
    turns = reference.ramp_over_rotations(128, 1e4, 4096, 32, 1)
    assert np.abs(index - turns).max() == pytest.approx(0.367, abs=5e-4)


def test_llama3_is_by_parts_in_rotations_between_1_and_4() -> None:
    theta = exact(128, 5e5)
    by_parts = apply("ntk_by_parts", theta, 5e5, 8192, 8.0, ramp="rotations", beta_fast=4.0, beta_slow=1.0)
    assert torch.equal(apply("llama3", theta, 5e5, 8192, 8.0).inv_freq, by_parts.inv_freq)


def test_abf_towards_the_base_of_ntk_is_ntk() -> None:
    theta, base = exact(64, 1e4), 1e4 * 4 ** (64 / 62)
    abf = apply("abf", theta, 1e4, LENGTH, 4.0, rope_theta=base).inv_freq
    np.testing.assert_allclose(abf, apply("ntk", theta, 1e4, LENGTH, 4.0).inv_freq, rtol=1e-13, atol=0)


def test_yarn_temperature_at_factor_four_does_not_collapse_to_one() -> None:
    """Field report 38: 1.138629..., and 1 only where it is asked for."""
    assert apply("yarn", exact(16, 1e4), 1e4, 32, 4.0).attention_scaling == 1 + 0.1 * math.log(4)
    assert apply("yarn", exact(16, 1e4), 1e4, 32, 4.0, attention_factor=1.0).attention_scaling == 1.0
