"""What options do to a method: their bounds, their defaults, and what is said to a value that cannot be used."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from hf_posext.contract import RotaryChange, Spectrum
from hf_posext.methods import get_method
from tests import reference

D, BASE, N, S = 128, 1e4, 4096, 4.0
THETA = torch.from_numpy(reference.geometric(D, BASE))
RAMPS: list[dict[str, Any]] = [{"truncate": True}, {"truncate": False}, {"ramp": "rotations"}]
RAMP_IDS = ["truncated", "untruncated", "rotations"]
BY_PARTS = pytest.mark.parametrize("name", ["ntk_by_parts", "yarn"])
EACH_RAMP = pytest.mark.parametrize("ramp", RAMPS, ids=RAMP_IDS)


def apply(name: str, *, d: int = D, length: int = N, factor: float = S, **options: Any) -> RotaryChange:
    theta = torch.from_numpy(reference.geometric(d, BASE))
    return get_method(name).functions["rotary"](Spectrum(theta, 1.0, length, BASE), factor, **options)


@EACH_RAMP
@BY_PARTS
@pytest.mark.parametrize("factor", [1.5, 8.0, 32.0])
def test_frequencies_lie_between_interpolated_and_kept(name: str, ramp: dict[str, Any], factor: float) -> None:
    ratio = apply(name, factor=factor, **ramp).inv_freq / THETA
    assert (ratio >= (1 - 1e-15) / factor).all()
    assert (ratio <= 1 + 1e-15).all()
    assert (ratio.diff() <= 1e-15).all(), "a slower channel is never stretched less"


@EACH_RAMP
@BY_PARTS
@pytest.mark.parametrize("length", [32, N])
def test_betas_above_the_turns_of_every_channel_give_pure_interpolation(
    name: str, ramp: dict[str, Any], length: int
) -> None:
    ratio = apply(name, length=length, beta_fast=1e7, beta_slow=1e6, **ramp).inv_freq / THETA
    np.testing.assert_allclose(ratio, 1 / S, rtol=1e-12)


@EACH_RAMP
@BY_PARTS
@pytest.mark.parametrize("length", [32, N])
def test_betas_below_the_turns_of_every_channel_give_pure_extrapolation(
    name: str, ramp: dict[str, Any], length: int
) -> None:
    ratio = apply(name, length=length, beta_fast=1e-11, beta_slow=1e-12, **ramp).inv_freq / THETA
    np.testing.assert_allclose(ratio, 1.0, rtol=1e-12)


@BY_PARTS
def test_channels_that_turn_less_than_beta_slow_are_interpolated_on_a_short_model(name: str) -> None:
    """N = 32: even the fastest channel turns 5.1 times only, so nothing may stay as it is."""
    ratio = apply(name, d=16, length=32, beta_fast=32.0, beta_slow=8.0, truncate=False).inv_freq
    np.testing.assert_allclose(ratio, reference.pi(16, BASE, S), rtol=1e-12)


@EACH_RAMP
@BY_PARTS
def test_default_betas_are_the_published_32_and_1(name: str, ramp: dict[str, Any]) -> None:
    given = apply(name, beta_fast=32.0, beta_slow=1.0, **ramp)
    assert torch.equal(apply(name, **ramp).inv_freq, given.inv_freq)


@BY_PARTS
def test_default_ramp_is_the_published_one(name: str) -> None:
    assert torch.equal(apply(name).inv_freq, apply(name, ramp="index", truncate=True).inv_freq)


@EACH_RAMP
@BY_PARTS
@pytest.mark.parametrize("length", [256, 2048, 8192])
def test_beta_fast_auto_is_a_wavelength_of_32_tokens(name: str, ramp: dict[str, Any], length: int) -> None:
    auto = apply(name, length=length, beta_fast="auto", **ramp)
    assert torch.equal(auto.inv_freq, apply(name, length=length, beta_fast=length / 32, **ramp).inv_freq)


@BY_PARTS
def test_beta_fast_auto_keeps_the_channels_of_up_to_32_tokens(name: str) -> None:
    kept = apply(name, length=8192, beta_fast="auto", ramp="rotations").inv_freq == THETA
    assert torch.equal(kept, 2 * math.pi / THETA <= 32)


@EACH_RAMP
def test_yarn_without_temperature_is_ntk_by_parts(ramp: dict[str, Any]) -> None:
    yarn, by_parts = apply("yarn", attention_factor=1.0, **ramp), apply("ntk_by_parts", **ramp)
    assert torch.equal(yarn.inv_freq, by_parts.inv_freq)
    assert (yarn.attention_scaling, yarn.logit_scale) == (by_parts.attention_scaling, by_parts.logit_scale) == (1, 1)


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 4.0, 8.0, 16.0])
def test_yarn_temperature_is_a_tenth_of_the_logarithm_plus_one(factor: float) -> None:
    assert apply("yarn", factor=factor).attention_scaling == pytest.approx(0.1 * math.log(factor) + 1, rel=1e-15)


@pytest.mark.parametrize("value", [1.0, 1.3, 0.7])
@pytest.mark.parametrize(("name", "options"), [("yarn", {}), ("longrope", {"long_factor": [2.0] * (D // 2)})])
def test_given_attention_factor_is_used_as_it_is(name: str, options: dict[str, Any], value: float) -> None:
    """Field report 47."""
    assert apply(name, attention_factor=value, **options).attention_scaling == value


@pytest.mark.parametrize("attention_factor", [None, 1.3])
def test_temperature_on_logits_is_the_square_and_leaves_cos_and_sin_alone(attention_factor: float | None) -> None:
    change = apply("yarn", temperature="logits", attention_factor=attention_factor)
    expected = (attention_factor or reference.yarn_attention_factor(S)) ** 2
    assert change.logit_scale == pytest.approx(expected, rel=1e-15)
    assert change.attention_scaling == 1.0
    assert torch.equal(change.inv_freq, apply("yarn").inv_freq)


def test_temperature_on_cos_and_sin_leaves_logits_alone() -> None:
    assert apply("yarn").logit_scale == 1.0


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.5, 8.0), (2.0, 3.0)])
def test_llama3_takes_its_ends_from_its_options(low: float, high: float) -> None:
    inv_freq = apply("llama3", low_freq_factor=low, high_freq_factor=high).inv_freq
    np.testing.assert_allclose(inv_freq, reference.llama3(D, BASE, S, N, low, high), rtol=1e-12)


def test_longrope_has_the_long_list_beyond_the_trained_length() -> None:
    ratios = reference.longrope_ratios(D, S)
    both = apply("longrope", long_factor=ratios, short_factor=[1.0] * len(ratios))
    assert torch.equal(both.inv_freq, apply("longrope", long_factor=ratios).inv_freq)


def test_longrope_list_has_half_of_the_rotated_channels() -> None:
    """Field report 108: head 16, half of it rotated: four values, and eight are refused with the right number."""
    np.testing.assert_allclose(
        apply("longrope", d=8, long_factor=[1.0, 2.0, 3.0, 4.0]).inv_freq, reference.longrope(8, BASE, [1, 2, 3, 4])
    )
    with pytest.raises(ValueError, match=r"`long_factor` must have 4 values, half of the 8 channels.*got 8"):
        apply("longrope", d=8, long_factor=[1.0] * 8)


ONES = [1.0] * (D // 2)
REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("yarn", {"beta_fast": 0}, ValueError, r"`beta_fast` must be a finite number > 0, got 0\."),
    ("yarn", {"beta_fast": math.nan}, ValueError, r"`beta_fast` must be a finite number > 0, got nan\."),
    ("yarn", {"beta_fast": True}, TypeError, r"`beta_fast` must be a finite number > 0, got True of type bool\."),
    ("yarn", {"beta_fast": "atuo"}, ValueError, r"`beta_fast`: 'atuo'\. Did you mean `auto`\? Allowed: `auto`\."),
    ("yarn", {"beta_slow": -1.0}, ValueError, r"`beta_slow` must be a finite number > 0, got -1\.0\."),
    ("yarn", {"beta_slow": "1"}, TypeError, r"`beta_slow` must be a finite number > 0, got '1' of type str\."),
    (
        "yarn",
        {"beta_fast": 1.0},
        ValueError,
        r"`beta_fast` must be above `beta_slow`, got 1 and 1\. Published: 32 and 1",
    ),
    ("yarn", {"beta_slow": 64.0}, ValueError, r"`beta_fast` must be above `beta_slow`, got 32 and 64\. Published"),
    ("yarn", {"truncate": 1}, TypeError, r"`truncate` must be True or False, got 1\."),
    ("yarn", {"truncate": "false"}, TypeError, r"`truncate` must be True or False, got 'false'\."),
    (
        "yarn",
        {"ramp": "rotation"},
        ValueError,
        r"`ramp`: 'rotation'\. Did you mean `rotations`\? Allowed: `index`, `rot",
    ),
    ("yarn", {"ramp": None}, ValueError, r"`ramp`: None\. Allowed: `index`, `rotations`\."),
    ("yarn", {"temperature": "logit"}, ValueError, r"'logit'\. Did you mean `logits`\? Allowed: `cos_sin`, `logits`\."),
    ("yarn", {"attention_factor": 0.0}, ValueError, r"`attention_factor` must be a finite number > 0, got 0\.0\."),
    ("ntk_by_parts", {"beta_fast": math.inf}, ValueError, r"`beta_fast` must be a finite number > 0, got inf\."),
    ("ntk_by_parts", {"ramp": "linear"}, ValueError, r"`ramp`: 'linear'\..* Allowed: `index`, `rotations`\."),
    ("llama3", {"low_freq_factor": 0}, ValueError, r"`low_freq_factor` must be a finite number > 0, got 0\."),
    (
        "llama3",
        {"high_freq_factor": 1},
        ValueError,
        r"`high_freq_factor` must be above `low_freq_factor`, got 1 and 1\.",
    ),
    ("llama3", {"low_freq_factor": 8.0}, ValueError, r"must be above `low_freq_factor`, got 4 and 8\."),
    ("longrope", {"long_factor": ONES[1:]}, ValueError, r"`long_factor` must have 64 values, half of the 128 .*got 63"),
    (
        "longrope",
        {"long_factor": [0.0, *ONES[1:]]},
        ValueError,
        r"`long_factor` must be a finite number > 0, got 0\.0\.",
    ),
    ("longrope", {"long_factor": ["1", *ONES[1:]]}, TypeError, r"`long_factor` must be .*, got '1' of type str\."),
    ("longrope", {"long_factor": ONES, "short_factor": ONES[1:]}, ValueError, r"`short_factor` must have 64 values"),
    ("longrope", {"long_factor": ONES, "attention_factor": -1}, ValueError, r"`attention_factor` must be .*, got -1\."),
    ("abf", {"rope_theta": 0}, ValueError, r"`rope_theta` must be a finite number > 0, got 0\."),
    ("abf", {"rope_theta": "5e5"}, TypeError, r"`rope_theta` must be a finite number > 0, got '5e5' of type str\."),
    ("ntk", {"d": 2}, ValueError, r"`ntk` needs at least 4 rotated channels, this model has 2\. Use `pi`\."),
    ("yarn", {"d": 2}, ValueError, r"at least two rotating channels, this spectrum has 1\. Use `pi`\."),
]


@pytest.mark.parametrize(("name", "options", "error", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_refusal_names_the_value_and_what_is_allowed(
    name: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        apply(name, **options)


@pytest.mark.parametrize("value", [2.0, None, 3])
def test_longrope_factor_that_is_no_list_is_refused_by_name(value: Any) -> None:
    with pytest.raises(TypeError, match="`long_factor`"):
        apply("longrope", long_factor=value)
