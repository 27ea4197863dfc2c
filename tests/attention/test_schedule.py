"""The scale of a length, in exact fractions, and what the frequencies make of it."""

import math
from fractions import Fraction

import pytest
import torch

from hf_posext.attention.schedule import STEPS, Schedule, stepped, steps_for
from hf_posext.contract import Spectrum
from hf_posext.methods import get_method
from tests import reference

TRAINED = (1, 3, 7, 32, 100, 256, 1000, 2048, 4095, 4096, 8192, 131072)
D, BASE = 16, 1e4


def exact_step(scale: Fraction) -> Fraction:
    """The least of 1, 33/32, ..., 2, 66/32, ... that is not below a scale >= 1."""
    doubling = Fraction(1)
    while 2 * doubling <= scale:
        doubling *= 2
    step = doubling / STEPS
    return math.ceil(scale / step) * step


def lengths_for(trained: int) -> list[int]:
    """All lengths up to 4 N where these are few; else those around every step and some others, up to 64 N."""
    if trained <= 256:
        return list(range(trained, 4 * trained + 2))
    edges = [trained * (STEPS + step) * 2**power // STEPS for power in range(6) for step in range(STEPS)]
    others = torch.randint(trained, 64 * trained, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    return sorted({length + near for length in edges for near in (0, 1)} | set(others))


def schedule(method: str = "yarn", trained: int = 32, limit: float = 4.0, **options: object) -> Schedule:
    """A schedule that computes the method at every scale as it is."""
    theta = torch.from_numpy(reference.geometric(D, BASE))
    spectrum = Spectrum(theta, 1.0, trained, BASE)

    def changes(scale: torch.Tensor) -> tuple[object, object, object]:
        change = get_method(method).change("rotary", spectrum, scale, limit, dict(options))
        return change.inv_freq, change.attention_scaling, change.logit_scale

    return Schedule("a", theta, spectrum, changes, 1.0, trained, trained, limit, options.get("temperature") == "logits")


@pytest.mark.parametrize("trained", TRAINED)
def test_a_scale_is_the_next_step_exactly(trained: int) -> None:
    lengths = lengths_for(trained)
    scales = stepped(torch.tensor(lengths).double() / trained)
    expected = [exact_step(Fraction(length, trained)) for length in lengths]
    assert [Fraction(scale) for scale in scales.tolist()] == expected


@pytest.mark.parametrize("trained", TRAINED)
def test_a_scale_is_at_least_that_of_the_length_and_less_than_a_step_more(trained: int) -> None:
    lengths = lengths_for(trained)
    scales = [Fraction(scale) for scale in stepped(torch.tensor(lengths).double() / trained).tolist()]
    assert scales == sorted(scales)
    for length, scale in zip(lengths, scales, strict=True):
        assert Fraction(length, trained) <= scale < Fraction(length, trained) * (1 + Fraction(1, STEPS))


def test_scales_are_those_of_the_lengths_up_to_as_many_doublings_as_n_allows() -> None:
    lengths = torch.arange(32, 65)
    assert torch.equal(stepped(lengths.double() / 32), lengths.double() / 32)
    even = torch.arange(64, 129, 2)
    assert torch.equal(stepped(even.double() / 32), even.double() / 32)
    assert float(stepped(torch.tensor(65 / 32, dtype=torch.float64))) == 66 / 32


def test_a_doubling_has_32_steps() -> None:
    for power in range(5):
        lengths = torch.arange(4096 * 2**power, 4096 * 2 ** (power + 1))
        assert len(stepped(lengths.double() / 4096).unique()) in (STEPS, STEPS + 1)


def test_scales_start_at_1_and_stop_at_the_limit() -> None:
    lengths = torch.tensor([1, 31, 32, 33, 64, 97, 100, 10_000])
    expected = [1, 1, 1, 33 / 32, 2, 3.0625, 3.1, 3.1]  # 97 / 32 = 3.03, whose next step is beyond no limit
    assert schedule(limit=3.1).scale(lengths).tolist() == expected


def test_lengths_share_a_level_exactly_if_they_share_their_frequencies() -> None:
    each = schedule(limit=4.0)
    lengths = torch.arange(1, 200)
    levels = each.level(lengths)
    differences, ratios, _ = each.differences(lengths)
    assert torch.equal(levels == 0, lengths <= 32)
    for left in range(len(lengths) - 1):
        same = torch.equal(differences[left], differences[left + 1]) and ratios[left] == ratios[left + 1]
        assert bool(levels[left] == levels[left + 1]) == bool(same)


@pytest.mark.parametrize("method", ["pi", "ntk", "yarn", "dynamic_ntk", "llama3"])
@pytest.mark.parametrize("trained", [32, 100])
def test_up_to_n_there_is_no_difference_at_all(method: str, trained: int) -> None:
    lengths = torch.arange(1, trained + 1).reshape(2, -1)
    difference, ratio, logit = schedule(method, trained).differences(lengths)
    assert difference.shape == (2, trained // 2, D // 2)
    assert torch.equal(difference, torch.zeros_like(difference))
    assert torch.equal(ratio, torch.ones_like(ratio))
    assert torch.equal(logit, torch.ones_like(logit))
    assert {difference.dtype, ratio.dtype, logit.dtype} == {torch.float32}


@pytest.mark.parametrize("length", [33, 48, 64, 66, 96, 128])
def test_beyond_n_the_differences_are_those_of_the_papers(length: int) -> None:
    s, theta = length / 32, reference.geometric(D, BASE)
    forms = {
        "pi": reference.pi(D, BASE, s),
        "ntk": reference.ntk(D, BASE, s),
        "yarn": reference.by_parts(D, BASE, s, reference.ramp_over_index(D, BASE, 32, 32, 1, True)),
        "dynamic_ntk": reference.ntk(D, BASE, 4 * s - 3),
    }
    for method, expected in forms.items():
        difference, ratio, logit = schedule(method).differences(torch.tensor([length]))
        torch.testing.assert_close(difference[0].double(), torch.from_numpy(expected - theta), rtol=1e-6, atol=0)
        temperature = reference.yarn_attention_factor(s) ** 2 if method == "yarn" else 1.0
        assert float(ratio) == pytest.approx(temperature, rel=1e-6)
        assert float(logit) == 1.0


def test_a_temperature_on_the_logits_goes_there() -> None:
    _, ratio, logit = schedule("yarn", temperature="logits").differences(torch.tensor([32, 64]))
    assert ratio.tolist() == [1.0, 1.0]
    torch.testing.assert_close(logit.double(), torch.tensor([1, reference.yarn_attention_factor(2) ** 2]).double())


@pytest.mark.parametrize(
    ("trained", "steps"),
    [(1, 32), (32, 32), (256, 32), (2047, 32), (2048, 8), (4095, 8), (4096, 16), (8191, 16), (8192, 32), (131072, 32)],
)
def test_a_step_has_256_tokens_where_that_leaves_8_steps(trained: int, steps: int) -> None:
    assert steps_for(trained) == steps


@pytest.mark.parametrize("steps", [8, 16, 32])
def test_fewer_steps_are_rounded_up_to_as_well(steps: int) -> None:
    scales = torch.linspace(1, 9, 4097, dtype=torch.float64)
    found = stepped(scales, steps)
    doubling = 2 ** scales.log2().floor()
    assert bool((found >= scales).all())
    assert bool((found - scales < doubling / steps).all())
    assert bool(((found / doubling * steps).frac() == 0).all())
