"""What stands in a changed table, against rows written by hand: each new row, and that reserved rows stay."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from hf_posext import patch_model
from tests.dynamic import text
from tests.tables import FAMILIES, FEW, ON_SINUSOIDS, SINUSOIDAL, N, T, make, named, patched_model, read, tables_of

ROWS = ("bert", "roberta", "opt", "bart", "gpt2")
RESERVED = -7.0
"""What stands in rows that are no positions; the number comes out of no rule of a method."""


def known(row: str, **changes: Any) -> Any:
    """A model whose rows are `known_rows`."""
    model, family = make(row, **changes), FAMILIES[row]
    for path in family.tables:
        weight = model.get_submodule(path).weight
        with torch.no_grad():
            weight[: family.reserved] = RESERVED
            weight[family.reserved :] = known_rows(weight.shape[1]).float()
    return model


def known_rows(width: int) -> Tensor:
    """Row p is p^2 / 64 times 1, 2, 3 or 4, [N, W] float64: exact in float32, and nowhere a straight line."""
    return over_channels([p**2 / 64 for p in range(N)], width)


def over_channels(values: list[float], width: int = 64) -> Tensor:
    """A number for each row, [R], times 1, 2, 3, 4, 1, ... in its channels: a constant is lost in layer norms."""
    return torch.tensor(values, dtype=torch.float64)[:, None] * (1 + torch.arange(width) % 4)


def found(row: str, method: str, factor: float = 2, **options: Any) -> list[Tensor]:
    """Tables of positions after a patch; checks on the way that reserved rows stand in front as before."""
    model, reserved = patch_model(known(row), method, factor, **options), FAMILIES[row].reserved
    tables = tables_of(model)
    assert all(torch.equal(table[:reserved], torch.full_like(table[:reserved], RESERVED)) for table in tables)
    assert len(tables) == len(FAMILIES[row].tables)
    return [table[reserved:].double() for table in tables]


def halves() -> Tensor:
    """pi by 2: every old row, the mean of each and the next between them, and the last one twice."""
    expected = []
    for p in range(N - 1):
        expected += [p**2 / 64, (p**2 + (p + 1) ** 2) / 128]
    expected += [(N - 1) ** 2 / 64] * 2
    return over_channels(expected)


def quarters() -> Tensor:
    """pi by 4."""
    expected = [(p**2 * (4 - k) + (p + 1) ** 2 * k) / 256 for p in range(N - 1) for k in range(4)]
    expected += [(N - 1) ** 2 / 64] * 4
    return over_channels(expected)


def thirds() -> Tensor:
    """pi by 3/2: row p lies at 2 p / 3, so that two old rows have two new ones in place of one between them."""
    expected = []
    for p in range(T * 3 // 4):
        below = min(2 * p // 3, N - 1)
        share, above = 2 * p / 3 - 2 * p // 3, min(below + 1, N - 1)
        expected.append((below**2 * (1 - share) + above**2 * share) / 64)
    return over_channels(expected)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("factor", "expected"), [(2, halves), (4, quarters)])
def test_pi_by_a_whole_factor_to_the_last_bit(row: str, factor: int, expected: Callable[[], Tensor]) -> None:
    assert [torch.equal(table, expected()) for table in found(row, "pi", factor)] == [True] * len(FAMILIES[row].tables)


@pytest.mark.parametrize("row", ROWS)
def test_pi_by_a_broken_factor(row: str) -> None:
    for table in found(row, "pi", 1.5):
        torch.testing.assert_close(table, thirds(), rtol=1e-7, atol=0)
        assert torch.equal(table[::3], known_rows(64)[::2])


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_corners_are_those_of_torch(row: str, mode: str) -> None:
    for table in found(row, "pi", mode=mode, align="corners"):
        torch.testing.assert_close(table, by_torch(known_rows(64), T, mode), rtol=1e-6, atol=1e-6)
        assert torch.equal(table[[0, -1]], known_rows(64)[[0, -1]])


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("factor", [2, 3])
def test_cubic_rows_between_the_first_and_the_last_are_those_of_torch(row: str, factor: int) -> None:
    """s (N - 1) + 1 rows from corner to corner lie at p / s; what comes after them holds the last row."""
    inner = factor * (N - 1) + 1
    for table in found(row, "pi", factor, mode="cubic"):
        torch.testing.assert_close(table[:inner], by_torch(known_rows(64), inner, "cubic"), rtol=1e-6, atol=1e-6)
        assert torch.equal(table[::factor], known_rows(64))
        assert torch.equal(table[inner:], known_rows(64)[-1:].expand(factor - 1, -1))


def by_torch(rows: Tensor, length: int, mode: str) -> Tensor:
    """[length, W] by torch's own resizing from corner to corner."""
    if mode == "linear":
        return interpolate(rows.T[None], length, mode="linear", align_corners=True)[0].T
    return interpolate(rows[None, None], (length, rows.shape[1]), mode="bicubic", align_corners=True)[0, 0]


@pytest.mark.parametrize("row", ROWS)
def test_tiles_are_copies(row: str) -> None:
    old = known_rows(64)
    for table in found(row, "tile", 2.25):
        assert torch.equal(table, torch.cat((old, old, old[:8])))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("options", [{}, {"alpha": 0.3}])
def test_hierarchical_rows_are_pairs_of_old_ones(row: str, options: dict[str, float]) -> None:
    alpha, old = options.get("alpha", 0.4), known_rows(64)
    unit = (old - alpha * old[0]) / (1 - alpha)
    later = torch.stack([alpha * unit[p // N] + (1 - alpha) * unit[p % N] for p in range(N, 3 * N)])
    for table in found(row, "hierarchical", 3, **options):
        assert torch.equal(table[:N], old)
        torch.testing.assert_close(table[N:], later, rtol=1e-6, atol=0)


def test_hierarchical_reaches_the_square_of_n_and_no_further() -> None:
    model = patch_model(known("bert"), "hierarchical", target_length=N**2)
    assert read(model, text(N**2))[0, -1].isfinite().all()
    with pytest.raises(ValueError, match=f"at most {N**2}, the square of {N} rows, got {N**2 + N}"):
        patch_model(known("bert"), "hierarchical", N + 1)


def waves(length: int, width: int) -> Tensor:
    """sin and cos of p / 10000^(2 i / W), one by one."""
    rows = [
        [(math.sin, math.cos)[channel % 2](p / 10_000 ** (channel // 2 * 2 / width)) for channel in range(width)]
        for p in range(length)
    ]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("row", ROWS)
def test_sinusoids_have_the_size_of_the_table(row: str) -> None:
    old, rows = known_rows(64), waves(T, 64)
    expected = rows * (old.pow(2).mean() / rows[:N].pow(2).mean()).sqrt()
    for table in found(row, "sinusoidal"):
        torch.testing.assert_close(table, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("width", "heads"), [(63, 3), (5, 1)])
def test_sinusoids_of_odd_width(width: int, heads: int) -> None:
    model = known("bert", hidden_size=width, num_attention_heads=heads)
    (table,) = tables_of(patch_model(model, "sinusoidal", 2))
    old, rows = known_rows(width), waves(T, width)
    expected = rows * (old.pow(2).mean() / rows[:N].pow(2).mean()).sqrt()
    torch.testing.assert_close(table.double(), expected, rtol=1e-6, atol=1e-5)


def test_sinusoids_in_place_of_weights_are_never_trained() -> None:
    model = patched_model("bart", "sinusoidal")
    assert [name for name, _ in model.named_parameters() if "embed_positions" in name] == []
    assert [name for name, _ in model.named_buffers() if "embed_positions" in name] == [
        f"{path}.weight" for path in FAMILIES["bart"].tables
    ]


BY_PAPER = ("marian", "pegasus")
"""These space their angles by 2 i / W, the others by i / (W / 2 - 1); all have the sines first."""


@pytest.mark.parametrize(("row", "kind"), named((row, kind) for row in SINUSOIDAL for kind in ON_SINUSOIDS))
def test_longer_sinusoids_by_their_own_formula(row: str, kind: str) -> None:
    """Published code numbers rows, reserved ones too: position p of a patched table is at (p / s) + reserved."""
    family, (table, *_) = FAMILIES[row], tables_of(patched_model(row, kind))
    rows = table[family.reserved :].double()
    places = torch.arange(len(rows), dtype=torch.float64) / (1 if kind == "sinusoidal" else 2) + family.reserved
    angles = places[:, None] * 10_000.0 ** (-torch.arange(32, dtype=torch.float64) / (32 if row in BY_PAPER else 31))
    assert len(rows) >= T
    torch.testing.assert_close(rows, torch.cat((angles.sin(), angles.cos()), 1), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("row", "kind"), FEW)
def test_each_position_looks_up_its_own_row(row: str, kind: str) -> None:
    """Seen from outside, as what the module that holds the rows gives out for a text of 2 N tokens."""
    family, model, seen = FAMILIES[row], patched_model(row, kind), []
    for path in family.tables:
        model.get_submodule(path).register_forward_hook(lambda _, __, output: seen.append(output))
    read(model, text(T))
    for rows, table in zip(seen, tables_of(model), strict=True):
        assert torch.equal(rows.reshape(T, -1), table[family.reserved : family.reserved + T])
