"""Methods that act in attention as pure functions: published numbers, defaults, and what is said to a bad value."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from hf_posext import NoSiteError, list_methods, patch_model
from hf_posext.contract import Host, LinearBias, NoPosition, PositionTable, Remap, Spectrum
from hf_posext.methods import get_method
from tests.in_attention import KINDS, make
from tests.snapshots import differences, snapshot

N = 4096
SPECTRUM = Spectrum(10_000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128), 1.0, N, 1e4)
TABLE = PositionTable(512, 64, 512)


def change(name: str, factor: float = 4.0, **options: Any) -> Any:
    """What a method makes of a rotary site of N tokens."""
    return get_method(name).functions["rotary"](SPECTRUM, factor, **options)


def slopes(heads: int, **options: Any) -> list[float]:
    """Slopes of a layer of H heads."""
    return change("alibi", **options).slopes(heads).tolist()


PUBLISHED = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    8: [2.0**-power for power in range(1, 9)],
    12: [*(2.0**-power for power in range(1, 9)), *(2.0 ** -(power + 0.5) for power in range(4))],
    16: [2 ** (-power / 2) for power in range(1, 17)],
    20: [*(2 ** (-power / 2) for power in range(1, 17)), *(2 ** -(power / 2 + 0.25) for power in range(4))],
    71: [*(2 ** (-power / 8) for power in range(1, 65)), *(2 ** -(power / 8 + 1 / 16) for power in range(7))],
}
"""Heads -> slopes, by hand from the paper and, beyond powers of two, from the published code."""


@pytest.mark.parametrize("heads", PUBLISHED)
def test_slopes_are_the_published_ones(heads: int) -> None:
    assert slopes(heads) == pytest.approx(PUBLISHED[heads], rel=1e-12)


@pytest.mark.parametrize("heads", PUBLISHED)
def test_a_greater_exponent_makes_every_slope_a_power_of_what_it_was(heads: int) -> None:
    assert slopes(heads, bias_max=16) == pytest.approx([slope**2 for slope in PUBLISHED[heads]], rel=1e-12)


def test_slopes_do_not_depend_on_the_factor_or_the_mechanism() -> None:
    table = get_method("alibi").functions["learned"](TABLE, 16.0)
    assert isinstance(table, LinearBias)
    assert table.slopes(12).tolist() == table.after(12).tolist() == slopes(12) == slopes(12, factor=1.0)


def test_other_slopes_behind_the_query_are_given_or_those_of_the_heads_in_reverse() -> None:
    assert change("alibi", asymmetric=True).after(6).tolist() == slopes(6)[::-1]
    given = change("alibi", slopes=[1, 0.5], asymmetric=(0, 2.0))
    assert (given.slopes(2).tolist(), given.after(2).tolist()) == ([1.0, 0.5], [0.0, 2.0])


def test_no_position_is_no_bias() -> None:
    assert change("nope") == NoPosition()


ROOM = Fraction(2 * N, 3)
"""Tokens into which the target is brought where nothing else is asked for."""


@pytest.mark.parametrize(
    ("factor", "window", "group"),
    [(1, None, 2), (2, None, 5), (4, None, 9), (8, None, 19), (4, 2048, 21), (4, 1, 7), (1.5, 2000, 6)],
)
def test_a_group_is_the_smallest_with_which_the_target_fits_into_two_thirds(
    factor: float, window: int | None, group: int
) -> None:
    """(R - W) G + W >= T > (R - W)(G - 1) + W. Source: SelfExtend, sec. 3, with R for N."""
    found = change("self_extend", factor, window=window)
    near = N // 4 if window is None else window
    assert (found.window, found.group, found.follows, found.logn) == (near, group, False, False)
    assert (ROOM - near) * group + near >= Fraction(N * factor)
    assert (ROOM - near) * (group - 1) + near < Fraction(N * factor)


def test_defaults_are_a_quarter_and_a_half_of_the_trained_length() -> None:
    assert change("self_extend").window == N // 4
    assert change("rerope") == Remap(N // 2, 0, 0.0, N)
    assert change("leaky_rerope").window == N // 2
    assert change("leaky_rerope").rate == pytest.approx(float((ROOM - 2048) / (4 * N - 2048)), rel=1e-15)
    assert get_method("window").functions["attention"](Host(N), 4.0).width == N


@pytest.mark.parametrize(("factor", "window"), [(2, 100), (4, 2048), (16, 2500)])
def test_the_slope_of_a_leak_just_brings_the_target_into_two_thirds(factor: float, window: int) -> None:
    rate = change("leaky_rerope", factor, window=window).rate
    assert window + rate * (factor * N - window) == pytest.approx(float(ROOM), rel=1e-12)


def test_given_values_are_used_as_they_are() -> None:
    assert change("self_extend", group_size=7, window=5000, logn=True) == Remap(5000, 7, 0.0, N, logn=True)
    assert change("self_extend", group_size="dynamic", window=64).follows is True
    assert change("leaky_rerope", slope=0, window=9000) == Remap(9000, 0, 0.0, N)
    assert change("leaky_rerope", slope=0.25).rate == 0.25


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("alibi", {"slopes": [0.5] * 3}, ValueError, r"4 heads.*4 slopes.*got 3"),
    ("alibi", {"slopes": [0.5] * 5}, ValueError, r"4 heads.*4 slopes.*got 5"),
    ("alibi", {"asymmetric": [0.5] * 3}, ValueError, r"4 heads.*got 3"),
    ("alibi", {"slopes": []}, ValueError, r"`slopes`.*one number for each head"),
    ("alibi", {"slopes": 0.5}, TypeError, r"`slopes`.*list.*0\.5"),
    ("alibi", {"slopes": "auto"}, TypeError, r"`slopes`.*list.*'auto'"),
    ("alibi", {"slopes": [0.5, 0.5, 0.5, "x"]}, TypeError, r"slopes\[3\].*number.*'x'"),
    ("alibi", {"slopes": [0.5, -1.0, 0.5, 0.5]}, ValueError, r"slopes\[1\].*got -1\.0"),
    ("alibi", {"slopes": [0.5, math.nan, 0.5, 0.5]}, ValueError, r"slopes\[1\].*nan"),
    ("alibi", {"slopes": [0.5, 0.5, math.inf, 0.5]}, ValueError, r"slopes\[2\].*inf"),
    ("alibi", {"slopes": [True, 0.5, 0.5, 0.5]}, TypeError, r"slopes\[0\].*True"),
    ("alibi", {"bias_max": 0}, ValueError, r"`bias_max`.*> 0.*got 0"),
    ("alibi", {"bias_max": "8"}, TypeError, r"`bias_max`.*'8'"),
    ("alibi", {"asymmetric": "yes"}, TypeError, r"`asymmetric`.*'yes'"),
    ("alibi", {"asymmetric": None}, TypeError, r"`asymmetric`.*None"),
    ("alibi", {"asymmetric": 1}, TypeError, r"`asymmetric`.*1"),
    ("alibi", {"slope": [0.5] * 4}, TypeError, r"'slope'.*Did you mean `slopes`.*`bias_max`"),
    ("nope", {"window": 8}, TypeError, r"option of `nope`: 'window'.*Allowed: none"),
    ("self_extend", {"group_size": 0}, ValueError, r"`group_size`.*at least 1.*got 0"),
    ("self_extend", {"group_size": 2.0}, TypeError, r"`group_size`.*whole number.*2\.0"),
    ("self_extend", {"group_size": True}, TypeError, r"`group_size`.*whole number.*True"),
    ("self_extend", {"group_size": "dynamics"}, ValueError, r"'dynamics'.*Did you mean `dynamic`"),
    ("self_extend", {"window": 0}, ValueError, r"`window`.*at least 1.*got 0"),
    ("self_extend", {"window": 32}, ValueError, r"`window`.*less than 21.*got 32.*group_size"),
    ("self_extend", {"window": 40, "group_size": "dynamic"}, ValueError, r"`window`.*32.*got 40"),
    ("self_extend", {"window": "8"}, TypeError, r"`window`.*'8'"),
    ("self_extend", {"logn": 1}, TypeError, r"`logn`.*True or False.*1"),
    ("rerope", {"window": -3}, ValueError, r"`window`.*-3"),
    ("rerope", {"logn": "yes"}, TypeError, r"`logn`.*'yes'"),
    ("rerope", {"slope": 0.5}, TypeError, r"option of `rerope`: 'slope'.*`window`"),
    ("leaky_rerope", {"slope": 1.5}, ValueError, r"`slope`.*>= 0 and below 1.*1\.5"),
    ("leaky_rerope", {"slope": 1}, ValueError, r"`slope`.*below 1.*got 1"),
    ("leaky_rerope", {"slope": -0.1}, ValueError, r"`slope`.*>= 0 and below 1.*-0\.1"),
    ("leaky_rerope", {"slope": math.nan}, ValueError, r"`slope`.*nan"),
    ("leaky_rerope", {"slope": "0.5"}, TypeError, r"`slope`.*'0\.5'"),
    ("leaky_rerope", {"slope": True}, TypeError, r"`slope`.*True"),
    ("leaky_rerope", {"window": 32}, ValueError, r"`window`.*32.*`slope`"),
    ("window", {"width": 0}, ValueError, r"`width`.*at least 1.*got 0"),
    ("window", {"width": 8.0}, TypeError, r"`width`.*8\.0"),
    ("window", {"sinks": -1}, ValueError, r"`sinks`.*0 or more.*-1"),
    ("window", {"sinks": 1.5}, TypeError, r"`sinks`.*1\.5"),
    ("window", {"sinks": True}, TypeError, r"`sinks`.*True"),
    ("window", {"window": 8}, TypeError, r"option of `window`: 'window'.*`width`"),
]


@pytest.fixture(scope="module")
def model() -> Any:
    """One unpatched Llama of 4 heads for all refusals: each leaves it as it was."""
    return make("llama")


@pytest.mark.parametrize(("name", "options", "error", "words"), BAD)
def test_a_bad_value_is_named_with_what_is_allowed(
    model: Any, name: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    before = snapshot(model, 0)
    with pytest.raises(error, match=words):
        patch_model(model, name, 4, **options)
    assert differences(before, snapshot(model, 0)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_dynamic_is_for_frequencies(model: Any, kind: str) -> None:
    method, options = KINDS[kind]
    with pytest.raises(ValueError, match=rf"`dynamic`=True.*scale positions.*`{method}`"):
        patch_model(model, method, 4, dynamic=True, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_scale_is_for_a_factor_that_follows_the_length(model: Any, kind: str) -> None:
    method, options = KINDS[kind]
    with pytest.raises(ValueError, match="`scale`='frozen'"):
        patch_model(model, method, 4, scale="frozen", **options)


@pytest.mark.parametrize("name", ["self_extend", "rerope", "leaky_rerope"])
@pytest.mark.parametrize("row", ["bert", "gpt2"])
def test_maps_of_rotation_mean_nothing_for_a_table(row: str, name: str) -> None:
    with pytest.raises(
        NoSiteError, match=rf"`{name}` has no meaning for a learned encoding.*`alibi`.*`nope`.*`window`"
    ):
        patch_model(make(row), name, 4)


def test_methods_are_listed_for_the_mechanisms_that_they_have_a_meaning_for() -> None:
    names = {"alibi", "nope", "self_extend", "rerope", "leaky_rerope", "window"}
    assert {info.name for info in list_methods(make("llama"))} >= names
    assert {info.name for info in list_methods(make("bert"))} & names == {"alibi", "nope", "window"}
    known = {info.name: info for info in list_methods()}
    assert set(known["alibi"].mechanisms) == {"rotary", "learned", "sinusoidal"}
    assert set(known["self_extend"].options) == {"group_size", "window", "logn"}
    assert known["window"].options == {"width": None, "sinks": 0}
    assert all(known[name].paper for name in names)


@pytest.mark.parametrize(
    ("alias", "name"), [("none", "nope"), ("selfextend", "self_extend"), ("sliding_window", "window")]
)
def test_other_names(alias: str, name: str) -> None:
    assert get_method(alias) is get_method(name)


@pytest.mark.parametrize(("target", "group"), [(512, 5), (1024, 9), (2048, 19), (4096, 38)])
def test_default_groups_keep_the_text_within_two_thirds_of_n(target: int, group: int) -> None:
    spectrum = Spectrum(torch.ones(4, dtype=torch.float64), 1.0, 256, 10000.0)
    remap = get_method("self_extend").change("rotary", spectrum, target / 256, target / 256, {})
    assert (remap.window, remap.group, remap.follows) == (64, group, False)
    reach, smaller = (64 + Fraction(target - 64, size) for size in (group, group - 1))
    assert reach <= Fraction(2 * 256, 3) < smaller
