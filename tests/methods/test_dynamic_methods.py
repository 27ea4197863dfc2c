"""Methods that follow the length, in closed form in double precision and by transformers itself."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import hf_posext
from hf_posext import PatchError, dynamic, mechanisms
from hf_posext.attention.schedule import Schedule
from hf_posext.contract import RotaryChange, Spectrum
from hf_posext.methods import REGISTRY, get_method
from hf_posext.methods.registry import method
from hf_posext.planning import make_plan
from tests import reference
from tests.architectures import tiny_inputs, tiny_model

D, BASE, N = 16, 1e4, 32
ONES, RAMP = [1.0] * (D // 2), [1.0 + channel / 2 for channel in range(D // 2)]


def spectrum(d: int = D, base: float = BASE, trained: int = N, scaling: float = 1.0) -> Spectrum:
    return Spectrum(torch.from_numpy(reference.geometric(d, base)), scaling, trained, base)


def apply(name: str, given: Spectrum, scale: float | Tensor, limit: float, **options: Any) -> RotaryChange:
    return get_method(name).change("rotary", given, scale, limit, options)


def schedule_of(name: str, factor: float, row: str = "llama", **options: Any) -> Schedule:
    """What a patch of a tiny model would follow."""
    plan = make_plan(tiny_model(row), name, factor, None, None, "full", options, dynamic=True)
    return dynamic.schedule_of(plan.sites[0], plan.spectra[0], plan)


def by_transformers(factor: float, length: int, d: int = D, base: float = BASE, trained: int = N) -> Tensor:
    """Frequencies of `rope_type="dynamic"` for a text of some length, float32 [F]."""
    rope = {"rope_type": "dynamic", "rope_theta": base, "factor": factor}
    config = LlamaConfig(head_dim=d, max_position_embeddings=trained, rope_parameters=rope)
    return ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)[0]


@pytest.mark.parametrize(("d", "base", "trained"), [(16, 1e4, 32), (64, 1e4, 2048), (128, 5e5, 8192)])
@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("share", [1.0, 1.03125, 1.5, 2.0, 3.0, 10.0])
def test_dynamic_ntk_is_the_formula_of_transformers(
    share: float, factor: float, d: int, base: float, trained: int
) -> None:
    change = apply("dynamic_ntk", spectrum(d, base, trained), share, factor)
    expected = by_transformers(factor, round(share * trained), d, base, trained)
    np.testing.assert_allclose(change.inv_freq, expected, rtol=2e-6, atol=0)
    assert change.attention_scaling == 1.0


@pytest.mark.parametrize("length", [1, 31, 32, 33, 40, 63, 64, 66, 96, 128, 300])
@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_a_model_patched_with_dynamic_ntk_follows_the_formula_also_beyond_its_factor(
    factor: float, length: int
) -> None:
    """Exactly for these lengths, which are whole steps or, at 300, the length of the next step."""
    schedule = schedule_of("dynamic_ntk", factor)
    seen = {300: 304}.get(length, length)
    inv_freq = schedule.differences(torch.tensor([length]))[0][0].double() + schedule.base
    expected = reference.geometric(D, BASE * max(1.0, factor * seen / N - (factor - 1)) ** (D / (D - 2)))
    np.testing.assert_allclose(inv_freq, expected, rtol=2e-6, atol=1e-9)
    np.testing.assert_allclose(inv_freq, by_transformers(factor, seen), rtol=2e-6, atol=1e-9)


def test_report_071_the_base_at_twice_the_length() -> None:
    change = apply("dynamic_ntk", spectrum(), 64 / N, 2.0)
    np.testing.assert_allclose(change.inv_freq, reference.geometric(D, 1e4 * 3 ** (16 / 14)), rtol=1e-12)
    np.testing.assert_allclose(change.inv_freq, apply("ntk", spectrum(), 3.0, 3.0).inv_freq, rtol=1e-14)


@pytest.mark.parametrize("length", [32, 33, 48, 64, 96, 128])
def test_the_form_of_the_paper_is_ntk_with_a_factor_that_follows(length: int) -> None:
    """YaRN, section 3.3: s = max(1, l / L), put into the base of eq. 16."""
    schedule = schedule_of("ntk", 4.0)
    inv_freq = schedule.differences(torch.tensor([length]))[0][0].double() + schedule.base
    np.testing.assert_allclose(inv_freq, reference.ntk(D, BASE, length / N), rtol=2e-6, atol=1e-9)
    alone = apply("dynamic_ntk", spectrum(), length / N, 1.0).inv_freq
    np.testing.assert_allclose(alone, reference.ntk(D, BASE, length / N), rtol=1e-12)


@pytest.mark.parametrize("length", [32, 33, 48, 64, 96, 128, 1000])
def test_dynamic_yarn_has_the_temperature_of_the_present_scale(length: int) -> None:
    schedule = schedule_of("yarn", 4.0)
    s = min(max(1.0, length / N), 4.0)
    difference, ratio, logit = schedule.differences(torch.tensor([length]))
    gamma = reference.ramp_over_index(D, BASE, N, 32, 1, True)
    expected = reference.by_parts(D, BASE, s, gamma) - reference.geometric(D, BASE)
    np.testing.assert_allclose(difference[0], expected, rtol=1e-5, atol=1e-7)
    assert float(ratio) == pytest.approx((0.1 * math.log(s) + 1) ** 2, rel=1e-6)
    assert float(logit) == 1.0


def test_a_temperature_that_is_given_is_in_force_beyond_n_alone() -> None:
    ratio = schedule_of("yarn", 4.0, attention_factor=1.5).differences(torch.tensor([1, 32, 33, 128]))[1]
    assert ratio.tolist() == [1.0, 1.0, 2.25, 2.25]


@pytest.mark.parametrize("name", ["pi", "ntk", "ntk_by_parts", "yarn", "llama3", "dynamic_ntk"])
def test_a_tensor_of_scales_is_one_scale_at_a_time(name: str) -> None:
    scales = torch.tensor([[1.0, 1.25], [2.0, 3.5]], dtype=torch.float64)
    together = apply(name, spectrum(), scales, 4.0)
    assert together.inv_freq.shape == (2, 2, D // 2)
    for row in range(2):
        for column in range(2):
            alone = apply(name, spectrum(), float(scales[row, column]), 4.0)
            np.testing.assert_allclose(together.inv_freq[row, column], alone.inv_freq, rtol=1e-14)
            scaling = torch.as_tensor(together.attention_scaling).expand(2, 2)[row, column]
            assert float(scaling) == pytest.approx(float(alone.attention_scaling), rel=1e-14)


@pytest.mark.parametrize("length", [1, 31, 32])
def test_longrope_has_its_short_list_up_to_n(length: int) -> None:
    short = [1.0 + channel / 16 for channel in range(D // 2)]
    schedule = schedule_of("longrope", 4.0, short_factor=short, long_factor=RAMP)
    difference, ratio, _ = schedule.differences(torch.tensor([length]))
    np.testing.assert_allclose(difference[0].double() + schedule.base, reference.longrope(D, BASE, short), rtol=1e-6)
    assert float(ratio) == 1.0
    assert torch.equal(difference, torch.zeros_like(difference))


@pytest.mark.parametrize("length", [33, 34, 64, 128, 10_000])
def test_longrope_has_its_long_list_and_the_temperature_of_the_patch_beyond_n(length: int) -> None:
    schedule = schedule_of("longrope", 4.0, short_factor=ONES, long_factor=RAMP)
    difference, ratio, _ = schedule.differences(torch.tensor([length]))
    inv_freq = difference[0].double() + schedule.base
    np.testing.assert_allclose(inv_freq, reference.longrope(D, BASE, RAMP), rtol=1e-6, atol=1e-9)
    assert float(ratio) == pytest.approx(reference.longrope_attention_factor(4.0, N) ** 2, rel=1e-6)


def test_longrope_beyond_n_is_what_transformers_computes() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": BASE,
        "factor": 4.0,
        "original_max_position_embeddings": N,
        "short_factor": ONES,
        "long_factor": RAMP,
    }
    config = LlamaConfig(head_dim=D, max_position_embeddings=4 * N, rope_parameters=rope)
    schedule = schedule_of("longrope", 4.0, short_factor=ONES, long_factor=RAMP)
    for length in (N, N + 1):
        inv_freq, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
        difference, ratio, _ = schedule.differences(torch.tensor([length]))
        np.testing.assert_allclose(difference[0].double() + schedule.base, inv_freq, rtol=2e-6, atol=1e-9)
        if length > N:
            assert float(ratio) == pytest.approx(scaling**2, rel=1e-6)


def test_longrope_with_a_given_attention_factor_and_one_list() -> None:
    one = apply("longrope", spectrum(), 4.0, 4.0, long_factor=RAMP, attention_factor=1.3)
    assert one.attention_scaling == 1.3
    both = schedule_of("longrope", 4.0, short_factor=ONES, long_factor=RAMP, attention_factor=1.3)
    assert both.differences(torch.tensor([32, 33]))[1].tolist() == pytest.approx([1.0, 1.69])


@pytest.mark.parametrize("which", ["short_factor", "long_factor"])
@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ([1.0] * 7, ValueError, r"must have 8 values, half of the 16 channels that rotate, got 7"),
        ([1.0] * 7 + [0.0], ValueError, "> 0"),
        ([1.0] * 7 + [-1.0], ValueError, "> 0"),
        ([1.0] * 7 + [math.nan], ValueError, "> 0"),
        ([1.0] * 7 + [math.inf], ValueError, "> 0"),
        (2.0, TypeError, "must be a list of 8 numbers"),
        ("11111111", TypeError, "must be a list of 8 numbers"),
    ],
)
def test_longrope_refuses_a_list_that_is_none(which: str, value: Any, error: type[Exception], words: str) -> None:
    model = tiny_model("llama")
    options = {"short_factor": ONES, "long_factor": RAMP, which: value}
    with pytest.raises(error, match=words) as caught:
        hf_posext.patch_model(model, "longrope", 4, **options)
    assert which in str(caught.value)
    assert hf_posext.inspect_model(model).record is None


def test_methods_say_by_themselves_whether_they_follow_the_length() -> None:
    follows = {
        "dynamic_ntk": {},
        "longrope": {"short_factor": ONES, "long_factor": RAMP},
    }
    for name, options in follows.items():
        assert hf_posext.patch_model(tiny_model("llama"), name, 4, **options).config.posext["dynamic"] is True
    assert not get_method("longrope").follows_length({"long_factor": RAMP})
    assert get_method("dynamic") is get_method("dynamic_ntk")
    others = set(REGISTRY) - set(follows)
    assert not any(REGISTRY[name].follows_length({}) for name in others)
    assert {name for name in REGISTRY if not REGISTRY[name].is_bounded} == {"dynamic_ntk"}


@pytest.fixture
def throwaway() -> Iterator[Any]:
    """A method that exists for one test."""
    made = method("unit_throwaway", summary="for one test", paper="none")
    yield made
    del REGISTRY["unit_throwaway"]


def test_a_method_that_asks_what_number_the_scale_is_is_refused_with_advice(throwaway: Any) -> None:
    @throwaway.on("rotary")
    def rotary(spectrum: Spectrum, factor: Any) -> RotaryChange:
        return RotaryChange(spectrum.inv_freq / (factor if factor > 1.5 else 1.0), spectrum.attention_scaling)

    model = tiny_model("llama")
    with torch.no_grad():
        before = model(**tiny_inputs(48)).logits
    with pytest.raises(PatchError, match=r"`unit_throwaway` cannot follow the length.*dynamic=False"):
        hf_posext.patch_model(model, "unit_throwaway", 2, dynamic=True)
    assert hf_posext.inspect_model(model).record is None
    with torch.no_grad():
        assert torch.equal(model(**tiny_inputs(48)).logits, before)
    hf_posext.patch_model(model, "unit_throwaway", 2)
    torch.testing.assert_close(mechanisms.read(mechanisms.find_sites(model)[0], N).inv_freq, spectrum().inv_freq / 2)


@pytest.mark.parametrize(
    "take", [float, int, bool, lambda factor: math.log(factor), lambda factor: factor.item(), lambda factor: [*factor]]
)
def test_every_way_to_ask_for_the_number_is_refused(throwaway: Any, take: Any) -> None:
    @throwaway.on("rotary")
    def rotary(spectrum: Spectrum, factor: Any) -> RotaryChange:
        if not isinstance(factor, float):
            take(factor)
        return RotaryChange(spectrum.inv_freq / factor, spectrum.attention_scaling)

    with pytest.raises(PatchError):
        hf_posext.patch_model(tiny_model("llama"), "unit_throwaway", 2, dynamic=True)


def test_a_method_in_tensor_operations_needs_nothing_else(throwaway: Any) -> None:
    @throwaway.on("rotary")
    def rotary(spectrum: Spectrum, factor: Any) -> RotaryChange:
        scale = torch.as_tensor(factor, dtype=torch.float64) if isinstance(factor, float) else factor
        return RotaryChange(spectrum.inv_freq / scale.unsqueeze(-1), spectrum.attention_scaling)

    difference, _, _ = schedule_of("unit_throwaway", 4.0).differences(torch.tensor([32, 64]))
    theta = spectrum().inv_freq
    torch.testing.assert_close(difference.double(), torch.stack((0 * theta, theta / 2 - theta)), rtol=1e-6, atol=1e-9)
