"""Longer tables by hand, to the last bit where rows are old ones, and against torch's own interpolation."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from hf_posext.functional import hierarchical_table, interpolate_table, tile_table

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
MODES = ["linear", "cubic"]


def table_of(rows: int, width: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random rows with numbers that arithmetic would not give back: a negative zero, huge and tiny ones."""
    table = torch.randn(rows, width, dtype=torch.float64)
    table[0, 0], table[rows // 2, 1], table[-1, 2] = -0.0, 3e4, 1e-7
    return table.to(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """`torch.equal` takes 0.0 for -0.0."""
    return torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_are_copies(dtype: torch.dtype) -> None:
    table = table_of(6, dtype=dtype)
    tiled = tile_table(table, 20)
    assert same_bits(tiled, torch.cat((table, table, table, table[:2])))
    assert same_bits(tile_table(table, 4), table[:4])


@pytest.mark.parametrize("alpha", [0.4, 0.3, 0.75])
def test_hierarchical_rows_by_hand(alpha: float) -> None:
    table = torch.tensor([[1.0, 5.0], [2.0, -3.0], [4.0, 0.5]], dtype=torch.float64)
    rows = table.tolist()
    u = [[(e - alpha * first) / (1 - alpha) for e, first in zip(row, rows[0], strict=True)] for row in rows]
    expected = [[alpha * u[p // 3][w] + (1 - alpha) * u[p % 3][w] for w in range(2)] for p in range(9)]
    result = hierarchical_table(table, 9, alpha=alpha)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-14)
    assert torch.equal(hierarchical_table(table, 7, alpha=alpha), result[:7])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_rows_of_a_hierarchical_table_are_the_old_ones(dtype: torch.dtype) -> None:
    table = table_of(7, dtype=dtype)
    longer = hierarchical_table(table, 49)
    assert longer.dtype == dtype
    assert same_bits(longer[:7], table)
    assert same_bits(hierarchical_table(table, 5), table[:5])
    expected = hierarchical_table(table.double(), 49).to(dtype)
    assert same_bits(longer[7:], expected[7:])  # one rounding


def test_all_rows_of_a_hierarchical_table_differ() -> None:
    longer = hierarchical_table(torch.randn(8, 4, dtype=torch.float64), 64)
    distances = torch.cdist(longer, longer) + torch.eye(64) * 9
    assert distances.min() > 1e-3


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (10, {}, "`length` must be at most 9, the square of 3 rows, got 10"),
        (9, {"alpha": 0.5}, "`alpha` must be above 0, below 1 and not 0.5, got 0.5"),
        (9, {"alpha": 1.0}, "`alpha` must be above 0, below 1 and not 0.5, got 1.0"),
        (9, {"alpha": 0}, "`alpha` must be a finite number > 0, got 0"),
        (0, {}, "`length` must be at least 1 token, got 0"),
    ],
)
def test_bad_arguments_of_hierarchical_tables_are_refused(length: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hierarchical_table(torch.zeros(3, 2), length, **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "length"), [(3, 7), (3, 1), (7, 49), (10, 33), (512, 2_048), (49, 147), (6, 4)])
def test_rows_at_whole_places_are_the_old_ones(rows: int, length: int, dtype: torch.dtype, mode: str) -> None:
    table = table_of(rows, dtype=dtype)
    factor = Fraction(length, rows)
    longer = interpolate_table(table, length, mode=mode)
    assert longer.dtype == dtype
    whole = [p for p in range(length) if (p / factor).denominator == 1]
    assert same_bits(longer[whole], table[[int(p / factor) for p in whole]])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [Fraction(n, d) for n in range(1, 14) for d in (1, 2, 3, 7, 10, 11)], ids=str)
def test_rows_are_exact_also_where_the_factor_is_no_binary_fraction(factor: Fraction, mode: str) -> None:
    """Such as 7 / 3: in float64 35 / (7 / 3) is not 15."""
    table = table_of(40, dtype=torch.float64)
    length = int(39 * factor) + 1
    longer = interpolate_table(table, length, factor=float(factor), mode=mode)
    whole = [p for p in range(length) if (p / factor).denominator == 1]
    assert same_bits(longer[whole], table[[int(p / factor) for p in whole]])


def test_a_factor_of_one_gives_the_table_back_and_beyond_it_the_last_row() -> None:
    table = table_of(6)
    assert same_bits(interpolate_table(table, 6), table)
    for mode in MODES:
        held = interpolate_table(table, 17, factor=2, mode=mode)
        assert same_bits(held[10:], table[5:].expand(7, -1))


@pytest.mark.parametrize(("length", "factor"), [(21, None), (40, 3.7), (9, 2)])
def test_linear_rows_by_hand(length: int, factor: float | None) -> None:
    table = torch.randn(8, 3, dtype=torch.float64)
    step = Fraction(length, 8) if factor is None else Fraction(factor)
    longer = interpolate_table(table, length, factor=factor)
    for p in range(length):
        place = min(p / step, Fraction(7))
        below, between = int(place), float(place - int(place))
        expected = table[below] * (1 - between) + table[min(below + 1, 7)] * between
        torch.testing.assert_close(longer[p], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("rows", "length"), [(8, 8), (8, 15), (8, 21), (8, 64), (5, 3), (2, 9), (1, 4)])
@pytest.mark.parametrize("mode", MODES)
def test_corners_are_those_of_torch(rows: int, length: int, mode: str) -> None:
    """Torch has cubic convolution for pictures only; a picture one wide is a row."""
    table = torch.randn(rows, 3, dtype=torch.float64)
    channels = table.T[None, :, :, None] if mode == "cubic" else table.T[None]
    size: Any = (length, 1) if mode == "cubic" else length
    theirs = interpolate(channels, size=size, mode="bicubic" if mode == "cubic" else mode, align_corners=True)
    ours = interpolate_table(table, length, mode=mode, align="corners")
    torch.testing.assert_close(ours, theirs.reshape(3, length).T, rtol=0, atol=1e-13)
    assert same_bits(ours[0], table[0])
    assert length == 1 or same_bits(ours[-1], table[-1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("factor", [2, 3, 8])
def test_starts_are_corners_up_to_the_last_old_row(factor: int, mode: str) -> None:
    """Places p / s and p (N - 1) / (s (N - 1)) are the same."""
    table = torch.randn(8, 3, dtype=torch.float64)
    corners = interpolate_table(table, 7 * factor + 1, mode=mode, align="corners")
    starts = interpolate_table(table, 8 * factor, mode=mode)
    torch.testing.assert_close(starts[: 7 * factor + 1], corners, rtol=0, atol=1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_tables_in_lower_precision_are_rounded_once(mode: str) -> None:
    table = table_of(9, dtype=torch.bfloat16)
    exact = interpolate_table(table.double(), 31, mode=mode)
    assert torch.equal(interpolate_table(table, 31, mode=mode), exact.bfloat16())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "bicubic"}, "Unknown value of `mode`: 'bicubic'. Did you mean `cubic`"),
        ({"align": "corner"}, "Did you mean `corners`"),
        ({"align": "corners", "factor": 2}, '`factor` has no meaning with align="corners", got 2'),
        ({"factor": 0}, "`factor` must be a finite number > 0, got 0"),
    ],
)
def test_bad_arguments_of_interpolation_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        interpolate_table(torch.zeros(3, 2), 6, **options)


@pytest.mark.parametrize("longer", [tile_table, hierarchical_table, interpolate_table])
def test_what_is_no_table_is_refused(longer: Any) -> None:
    for table, message in (
        (torch.zeros(1, 3, 2), r"\[rows, channels\], got \[1, 3, 2\]"),
        (torch.zeros(0, 2), r"got \[0, 2\]"),
        (torch.zeros(3, 2, dtype=torch.int64), "`table` must be a floating tensor, got torch.int64"),
        ([[1.0]], "`table` must be a floating tensor, got list"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            longer(table, 4)
    with pytest.raises(TypeError, match=r"`length` must be a whole number of tokens, got 4\.0"):
        longer(torch.zeros(3, 2), 4.0)


@pytest.mark.parametrize("longer", [tile_table, hierarchical_table, interpolate_table])
def test_tables_are_new_and_let_gradients_through(longer: Any) -> None:
    for length in (3, 8):
        table = torch.randn(3, 2, requires_grad=True)
        before = table.detach().clone()
        result = longer(table, length)
        result.sum().backward()
        assert table.grad is not None
        assert table.grad.abs().sum() > 0
        with torch.no_grad():
            result.zero_()
        assert torch.equal(table, before)
