"""Tables of sines against closed forms in 60 digits, the rotation identity, and the tables of six architectures."""

import math
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.ctrl.modeling_ctrl import positional_encoding
from transformers.models.fsmt.modeling_fsmt import SinusoidalPositionalEmbedding as FsmtTable
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding as M2m100Table
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding as MarianTable
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding as XglmTable
from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings

from hf_posext.functional import sinusoidal_table

FAR = [0, 1, 2, 511, 65_537, 999_983, 1_000_000]
DIGITS = Context(prec=60)
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899")
FLOAT32 = 2.0**-24  # relative error of one rounding


def series(angle: Decimal, first: int) -> float:
    """Taylor series of sine (first power 1) or cosine (0), after whole turns are taken off."""
    turns = (angle / (2 * PI)).to_integral_value()
    x = DIGITS.subtract(angle, DIGITS.multiply(2 * PI, turns))
    term = total = x if first else Decimal(1)
    for power in range(first + 2, 80, 2):
        term = DIGITS.divide(DIGITS.multiply(term, -x * x), Decimal(power * (power - 1)))
        total = DIGITS.add(total, term)
    return float(total)


def closed_form(positions: list[Any], width: int, base: float, spacing: str) -> Tensor:
    """The two formulae of section 3.5, channel by channel in 60 digits; interleaved."""
    rows = torch.zeros(len(positions), width, dtype=torch.float64)
    pairs = width // 2
    for channel in range(width if spacing == "paper" else 2 * pairs):
        exponent = Fraction(2 * (channel // 2), width) if spacing == "paper" else Fraction(channel // 2, pairs - 1)
        power = DIGITS.divide(Decimal(-exponent.numerator), Decimal(exponent.denominator))
        omega = DIGITS.power(Decimal(base), power)
        for row, position in enumerate(positions):
            rows[row, channel] = series(DIGITS.multiply(Decimal(position), omega), 1 - channel % 2)
    return rows


def as_halves(interleaved: Tensor, channels: int) -> Tensor:
    """The first channels with even ones in front; the others stay."""
    order = [*range(0, channels, 2), *range(1, channels, 2), *range(channels, interleaved.shape[1])]
    return interleaved[:, order]


@pytest.mark.parametrize("spacing", ["paper", "tensor2tensor"])
@pytest.mark.parametrize(("width", "base"), [(4, 10_000.0), (7, 10_000.0), (16, 1e6), (33, 500.0)])
def test_sinusoids_equal_the_closed_form_at_any_position(width: int, base: float, spacing: str) -> None:
    expected = closed_form(FAR, width, base, spacing)
    options: dict[str, Any] = {"base": base, "spacing": spacing}
    table = sinusoidal_table(torch.tensor(FAR), width, **options)
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-15)
    halves = sinusoidal_table(torch.tensor(FAR), width, layout="halves", **options)
    assert torch.equal(halves, as_halves(table, width if spacing == "paper" else width // 2 * 2))


def test_a_count_stands_for_its_positions() -> None:
    assert torch.equal(sinusoidal_table(9, 4), sinusoidal_table(torch.arange(9), 4))


def test_fractional_and_negative_positions_have_rows_too() -> None:
    places = [0.5, -3.25, 1 / 3, 999_999.7]
    expected = closed_form(places, 9, 10_000.0, "paper")
    table = sinusoidal_table(torch.tensor(places, dtype=torch.float64), 9)
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("width", [2, 64, 65])
@pytest.mark.parametrize("step", [1, 4_097, 250_001])
def test_a_shift_of_the_position_is_a_rotation(width: int, step: int) -> None:
    """PE(p + k) = R(k) PE(p), with R(k) written from PE(k)."""
    places = torch.cat((torch.arange(0, 64), torch.arange(0, 1_000_001 - step, 9_973)))
    before, after = sinusoidal_table(places, width), sinusoidal_table(places + step, width)
    shift = sinusoidal_table(torch.tensor([step]), width)
    pairs = width // 2 * 2
    sine, cosine = before[:, 0:pairs:2], before[:, 1:pairs:2]
    sine_k, cosine_k = shift[:, 0:pairs:2], shift[:, 1:pairs:2]
    torch.testing.assert_close(after[:, 0:pairs:2], sine * cosine_k + cosine * sine_k, rtol=0, atol=1e-12)
    torch.testing.assert_close(after[:, 1:pairs:2], cosine * cosine_k - sine * sine_k, rtol=0, atol=1e-12)


def test_one_rounded_product_would_break_that_identity() -> None:
    omega = 10_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    naive = (1_000_000 * omega).sin()
    exact = sinusoidal_table(torch.tensor([1_000_000]), 64)[0, 0::2]
    assert (naive - exact).abs().max() > 1e-11


@pytest.mark.parametrize("width", [8, 9, 64])
def test_sinusoids_are_those_of_marian_and_xlm(width: int) -> None:
    """Both compute in float64 and round once."""
    for layout, theirs in (
        ("halves", MarianTable(300, width).create_weight()),
        ("interleaved", create_sinusoidal_embeddings(300, width, torch.empty(300, width))),
    ):
        ours = sinusoidal_table(300, width, layout=layout, dtype=torch.float32)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("width", [8, 9, 64])
@pytest.mark.parametrize("table", [M2m100Table, XglmTable, FsmtTable])
def test_sinusoids_are_those_of_tensor2tensor(table: Any, width: int) -> None:
    theirs = table.get_embedding(300, width, None)
    ours = sinusoidal_table(300, width, layout="halves", spacing="tensor2tensor")
    assert ours.shape == theirs.shape
    assert bool(((ours - theirs).abs() <= float32_bound(300, width // 2, width // 2 - 1, width)).all())


@pytest.mark.parametrize("width", [8, 64])
def test_sinusoids_are_those_of_ctrl(width: int) -> None:
    theirs = positional_encoding(300, width, torch.float32)
    ours = sinusoidal_table(300, width, layout="halves")
    assert bool(((ours - theirs).abs() <= float32_bound(300, width // 2, width / 2, width)).all())


def float32_bound(count: int, pairs: int, steps: float, width: int) -> Tensor:
    """How far off angles p exp(-x) with x = i ln(b) / steps are where x (three roundings), exp and p omega are float32.

    A sine then moves by no more than its angle, and is itself rounded twice.
    """
    x = torch.arange(pairs, dtype=torch.float64) * math.log(10_000) / steps
    angles = torch.arange(count, dtype=torch.float64)[:, None] * torch.exp(-x)
    bound = FLOAT32 * (angles * (3 * x + 3) + 2)
    return torch.nn.functional.pad(torch.cat((bound, bound), 1), (0, width - 2 * pairs))


def test_an_odd_width_ends_in_a_sine_or_in_zeros() -> None:
    paper, padded = sinusoidal_table(5, 5), sinusoidal_table(5, 5, spacing="tensor2tensor")
    torch.testing.assert_close(paper[:, 4], (torch.arange(5).double() * 10_000 ** (-4 / 5)).sin(), rtol=0, atol=1e-15)
    assert padded[:, 4].eq(0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "`positions` must be at least 1 token"),
        ((4, 0), "`width` must be a whole number >= 1, got 0"),
        ((4, True), "`width` must be a whole number >= 1, got True of type bool"),
        ((torch.zeros(2, 2), 4), r"\[P\], got \[2, 2\]"),
        ((torch.zeros(2, dtype=torch.bfloat16), 4), "`positions` must be .*float64, got torch.bfloat16"),
        (([1, 2], 4), "`positions` must be a whole number of tokens"),
    ],
)
def test_bad_positions_and_widths_of_sinusoids_are_refused(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        sinusoidal_table(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "half"}, "Unknown value of `layout`: 'half'. Did you mean `halves`"),
        ({"spacing": "t2t"}, "`paper`, `tensor2tensor`"),
        ({"base": 0}, "`base` must be a finite number > 0, got 0"),
        ({"dtype": torch.int64}, "`dtype` must be a floating dtype, got torch.int64"),
        ({"spacing": "tensor2tensor"}, '`width` must be at least 4 with spacing="tensor2tensor", got 3'),
    ],
)
def test_bad_options_of_sinusoids_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sinusoidal_table(4, 3, **options)
