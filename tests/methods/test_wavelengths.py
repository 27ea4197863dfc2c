"""The arithmetic that methods share: crossings and ramps, and what may not change a result."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_posext.contract import RotaryChange, Spectrum
from hf_posext.methods import get_method
from hf_posext.methods._wavelengths import blend, crossing, index_ramp, per_channel, rotation_ramp, rotations
from tests import reference

GEOMETRIC = [(16, 1e4, 32), (64, 1e4, 2048), (128, 1e4, 4096), (128, 5e5, 8192), (64, 150000.0, 4096), (4, 1e4, 32)]
TURNS = (1e-9, 1e-3, 0.5, 1.0, 4.0, 32.0, 333.0, 1e6)
"""Beyond both ends of every row of GEOMETRIC, and within."""
F = 8
CASES: dict[str, dict[str, Any]] = {
    "pi": {},
    "ntk": {},
    "ntk_by_parts": {},
    "ntk_by_parts-untruncated": {"truncate": False},
    "ntk_by_parts-rotations": {"ramp": "rotations"},
    "yarn": {},
    "yarn-logits": {"temperature": "logits"},
    "yarn-attention_factor": {"attention_factor": 1.3},
    "llama3": {},
    "longrope": {"long_factor": [1.0 + i / 2 for i in range(F)]},
    "abf": {"rope_theta": 5e5},
}
WITHOUT_OPTIONS = ("pi", "ntk", "ntk_by_parts", "yarn", "llama3")


def spectrum(d: int = 2 * F, base: float = 1e4, length: int = 256, scale: float = 1.0) -> Spectrum:
    return Spectrum(torch.from_numpy(reference.geometric(d, base)) / scale, 1.0, length, base)


def with_tail(zeros: int) -> Spectrum:
    """The spectrum of a proportional partial rotation: exponents over the whole head, and a tail that does not turn."""
    whole = spectrum()
    return Spectrum(whole.inv_freq * (torch.arange(F) < F - zeros), 1.0, whole.trained_length, whole.base)


def apply(case: str, given: Spectrum, factor: float | Tensor) -> RotaryChange:
    return get_method(case.split("-")[0]).functions["rotary"](given, factor, **CASES[case])


@pytest.mark.parametrize(("d", "base", "length"), GEOMETRIC)
@pytest.mark.parametrize("turns", TURNS)
def test_crossing_is_the_published_index_formula_also_beyond_both_ends(
    d: int, base: float, length: int, turns: float
) -> None:
    expected = reference.channel_with(turns, d, base, length)
    assert crossing(spectrum(d, base, length), turns) == pytest.approx(expected, abs=1e-9, rel=0)


@pytest.mark.parametrize("scale", [0.5, 2.0, 8.0, math.pi])
@pytest.mark.parametrize("turns", TURNS)
def test_crossing_of_a_scaled_spectrum_is_that_of_a_shorter_trained_length(turns: float, scale: float) -> None:
    expected = 128 * math.log(4096 / scale / (2 * math.pi * turns)) / (2 * math.log(1e4))
    assert crossing(spectrum(128, 1e4, 4096, scale), turns) == pytest.approx(expected, abs=1e-9, rel=0)


@pytest.mark.parametrize("channel", range(F))
@pytest.mark.parametrize("case", ["pi", "yarn", "llama3", "longrope"])
def test_crossing_at_the_turns_of_a_channel_is_that_channel_on_any_spectrum(case: str, channel: int) -> None:
    stretched = Spectrum(apply(case, spectrum(), 4.0).inv_freq, 1.0, 256, 1e4)
    assert crossing(stretched, float(rotations(stretched)[channel])) == pytest.approx(channel, abs=1e-9)


@pytest.mark.parametrize("turns", TURNS)
def test_crossing_leaves_channels_out_that_do_not_turn(turns: float) -> None:
    assert crossing(with_tail(3), turns) == pytest.approx(crossing(spectrum(), turns), abs=1e-9)


@pytest.mark.parametrize("live", [0, 1])
def test_crossing_says_how_many_channels_turn_and_what_to_use_instead(live: int) -> None:
    with pytest.raises(ValueError, match=f"at least two rotating channels, this spectrum has {live}. Use `pi`"):
        crossing(with_tail(F - live), 1.0)


def test_rotations_are_the_trained_length_over_the_wavelength() -> None:
    expected = [reference.rotations(theta, 4096) for theta in reference.geometric(128, 1e4)]
    np.testing.assert_allclose(rotations(spectrum(128, 1e4, 4096)), expected, rtol=1e-14)


@pytest.mark.parametrize(("factor", "shape"), [(2.0, (1,)), (torch.tensor([2.0, 3.0]), (2, 1))])
def test_factor_broadcasts_over_channels(factor: float | Tensor, shape: tuple[int, ...]) -> None:
    assert per_channel(factor).shape == shape
    assert per_channel(factor).dtype is torch.float64


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("d", "base", "length"), GEOMETRIC)
def test_index_ramp_is_the_published_one(d: int, base: float, length: int, truncate: bool) -> None:
    gamma = index_ramp(spectrum(d, base, length), 32.0, 1.0, truncate)
    expected = reference.ramp_over_index(d, base, length, 32, 1, truncate)
    np.testing.assert_allclose(gamma, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("d", "base", "length"), GEOMETRIC)
def test_rotation_ramp_is_the_one_of_the_paper(d: int, base: float, length: int) -> None:
    gamma = rotation_ramp(spectrum(d, base, length), 32.0, 1.0)
    np.testing.assert_allclose(gamma, reference.ramp_over_rotations(d, base, length, 32, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [2.0, 4.0])
@pytest.mark.parametrize("truncate", [True, False])
def test_ramp_of_a_checkpoint_stretched_by_pi_is_that_of_its_shorter_trained_length(
    scale: float, truncate: bool
) -> None:
    stretched = index_ramp(spectrum(64, 1e4, 4096, scale), 32.0, 1.0, truncate)
    shorter = index_ramp(spectrum(64, 1e4, int(4096 / scale)), 32.0, 1.0, truncate)
    np.testing.assert_allclose(stretched, shorter, rtol=0, atol=1e-12)


def test_blend_is_linear_in_frequency_and_not_in_wavelength() -> None:
    """YaRN eq. 20, against the "revised" form: mid-ramp at s = 16 the ratio is 0.531 and not 0.118."""
    gamma = torch.full((F,), 0.5, dtype=torch.float64)
    np.testing.assert_allclose(blend(spectrum(), 16.0, gamma) / spectrum().inv_freq, 0.53125, rtol=1e-15)


@pytest.mark.parametrize("zeros", [1, 3, 6])
@pytest.mark.parametrize("case", CASES)
def test_channels_that_do_not_turn_stay_so(case: str, zeros: int) -> None:
    """Field report 93."""
    inv_freq = apply(case, with_tail(zeros), 2.0).inv_freq
    assert torch.equal(inv_freq[F - zeros :], torch.zeros(zeros, dtype=torch.float64))
    assert (inv_freq[: F - zeros] > 0).all()


def test_pi_halves_the_channels_before_a_tail_exactly() -> None:
    """Field report 93."""
    assert torch.equal(apply("pi", with_tail(3), 2.0).inv_freq, with_tail(3).inv_freq / 2)


def test_ntk_stretches_the_slowest_turning_channel_before_a_tail_by_the_factor() -> None:
    """What the method promises; a tail of zeros is not the slowest channel, it has no position in it."""
    ratios = with_tail(3).inv_freq / apply("ntk", with_tail(3), 4.0).inv_freq
    assert float(ratios[F - 4]) == pytest.approx(4.0, rel=1e-14)


@pytest.mark.parametrize("case", [case for case in CASES if case != "longrope"])
def test_result_does_not_depend_on_the_order_of_the_channels(case: str) -> None:
    """ERNIE 4.5 VL has even channels first, then odd ones, then the rest. A longrope list is in the module's order."""
    order = torch.tensor([0, 2, 4, 1, 3, 5, 6, 7])
    shuffled = Spectrum(spectrum().inv_freq[order], 1.0, 256, 1e4)
    expected = apply(case, spectrum(), 4.0).inv_freq[order]
    np.testing.assert_allclose(apply(case, shuffled, 4.0).inv_freq, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("field", ["inv_freq", "attention_scaling", "logit_scale"])
@pytest.mark.parametrize("case", CASES)
def test_a_factor_for_each_row_is_the_stack_of_single_calls(case: str, field: str) -> None:
    factors = torch.tensor([1.0, 1.5, 2.0, 8.0], dtype=torch.float64)
    rows = torch.as_tensor(getattr(apply(case, spectrum(), factors), field), dtype=torch.float64)
    single = [getattr(apply(case, spectrum(), float(factor)), field) for factor in factors]
    stack = torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in single])
    np.testing.assert_allclose(rows.expand_as(stack), stack, rtol=1e-15, atol=0)


@pytest.mark.parametrize("scaling", [1.0, 1.1386])
@pytest.mark.parametrize("name", WITHOUT_OPTIONS)
def test_factor_one_changes_nothing(name: str, scaling: float) -> None:
    buffer = spectrum().inv_freq.float().double()  # as read from a model
    given = Spectrum(buffer, scaling, 256, 1e4)
    assert apply(name, given, 1.0).is_identity(given)


@pytest.mark.parametrize("case", CASES)
def test_a_change_is_computed_in_float64(case: str) -> None:
    assert apply(case, spectrum(), 2.0).inv_freq.dtype is torch.float64


@pytest.mark.parametrize("case", CASES)
def test_the_spectrum_that_was_given_is_left_alone(case: str) -> None:
    given = spectrum()
    apply(case, given, 4.0)
    assert torch.equal(given.inv_freq, spectrum().inv_freq)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("yarn-logits", "yarn-attention_factor")])
def test_scaling_that_the_checkpoint_has_is_kept(case: str) -> None:
    plain, scaled = spectrum(), Spectrum(spectrum().inv_freq, 1.25, 256, 1e4)
    kept = apply(case, scaled, 4.0).attention_scaling
    assert kept == pytest.approx(1.25 * apply(case, plain, 4.0).attention_scaling, rel=1e-15)
