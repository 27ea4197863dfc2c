"""Positions of short rows are those of the papers, reach all of T, and are the same wherever they are drawn."""

import subprocess
import sys
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from hf_posext.training.positions import generator_of, pose_positions, random_lengths, randomized_positions

ROWS = 4000
SIZES = [(2, 2, 2), (2, 9, 2), (8, 9, 2), (8, 32, 2), (8, 32, 3), (8, 32, 8), (64, 4096, 4)]


def drawn(index: int) -> np.random.Generator:
    """What row `index` of a run with seed 0 draws from."""
    return generator_of(0, "positions", index)


def pose_rows(length: int, target: int, chunks: int, rows: int = ROWS) -> np.ndarray:
    """Positions of many rows, [rows, L]."""
    return np.stack([pose_positions(length, target, chunks=chunks, generator=drawn(row)) for row in range(rows)])


@pytest.mark.parametrize(("length", "target", "chunks"), SIZES)
def test_pose_rises_from_zero_and_ends_below_the_target(length: int, target: int, chunks: int) -> None:
    rows = pose_rows(length, target, chunks, rows=200)
    assert rows.shape == (200, length)
    assert rows.dtype == np.int64
    assert (rows[:, 0] == 0).all()
    assert (np.diff(rows, axis=1) >= 1).all()
    assert rows.max() < target


@pytest.mark.parametrize(("length", "target", "chunks"), SIZES)
def test_pose_jumps_between_chunks_only(length: int, target: int, chunks: int) -> None:
    jumps = (np.diff(pose_rows(length, target, chunks, rows=200), axis=1) > 1).sum(1)
    assert jumps.max() <= chunks - 1


@pytest.mark.parametrize("chunks", [2, 3])
def test_pose_reaches_every_position_and_every_distance(chunks: int) -> None:
    rows = pose_rows(8, 24, chunks)
    distances = rows[:, :, None] - rows[:, None, :]
    assert set(rows.ravel().tolist()) == set(range(24))
    assert set(distances.ravel().tolist()) == set(range(-23, 24))


def test_pose_of_two_chunks_draws_what_the_code_of_the_paper_draws() -> None:
    """There `rt1 = randint(1, (L + 1) // 2)` and `rt = randint(0, T - L)`, both ends included."""
    length, target = 7, 12
    steps = np.diff(pose_rows(length, target, 2), axis=1)
    split = steps[steps.max(1) > 1]
    found = list(zip((1 + split.argmax(1)).tolist(), (split.max(1) - 1).tolist(), strict=True))
    expected = set(product(range(1, 5), range(1, target - length + 1)))
    assert set(found) == expected
    counts = np.array([found.count(pair) for pair in expected])
    mean = ROWS / (4 * (target - length + 1))  # a skip of 0, where no split shows, is as frequent as any other
    assert np.abs(counts - mean).max() < 5 * mean**0.5


def test_pose_draws_each_skip_from_the_one_before_to_the_end() -> None:
    """u_2 ~ U{u_1, ..., T - L} for three chunks, so its mean is a quarter below the largest skip."""
    last = pose_rows(16, 116, 3)[:, -1] - 15
    assert abs(last.mean() - 75) < 5 * 22.1 / ROWS**0.5  # its deviation: (100^2 (1/48 + 1/36))^0.5


@pytest.mark.parametrize(("length", "target"), [(1, 1), (1, 9), (9, 9), (8, 32), (100, 4096)])
def test_randomized_positions_are_sorted_and_distinct(length: int, target: int) -> None:
    found = randomized_positions(length, target, generator=drawn(0))
    assert len(found) == length
    assert (np.diff(found) >= 1).all()
    assert found[0] >= 0
    assert found[-1] < target


def test_randomized_positions_are_a_uniform_sample() -> None:
    """The k-th of L numbers drawn from T without replacement is (k + 1) (T + 1) / (L + 1) - 1 on average."""
    rows = np.stack([randomized_positions(4, 19, generator=drawn(row)) for row in range(ROWS)])
    assert rows.mean(0) == pytest.approx([3, 7, 11, 15], abs=5 * 3.5 / ROWS**0.5)
    assert np.bincount(rows.ravel(), minlength=19) == pytest.approx(ROWS * 4 / 19, abs=5 * (ROWS * 4 / 19) ** 0.5)


@pytest.mark.parametrize("total", [0, 3, 4, 5, 9, 10, 23, 1000])
@pytest.mark.parametrize(("shortest", "longest"), [(4, 9), (4, 4), (1, 9)])
def test_random_lengths_fill_a_text_but_for_a_rest_that_is_too_short(total: int, shortest: int, longest: int) -> None:
    lengths = random_lengths(total, shortest=shortest, longest=longest, generator=drawn(total))
    assert total - shortest < sum(lengths) <= total
    assert all(shortest <= length <= longest for length in lengths)


def test_random_lengths_are_uniform() -> None:
    lengths = random_lengths(ROWS * 6, shortest=4, longest=8, generator=drawn(0))
    counts = np.bincount(lengths)[4:]
    assert counts == pytest.approx(len(lengths) / 5, abs=5 * (len(lengths) / 5) ** 0.5)


DRAWS: dict[str, Callable[[np.random.Generator], list[int]]] = {
    "pose": lambda generator: pose_positions(64, 4096, chunks=3, generator=generator).tolist(),
    "randomized": lambda generator: randomized_positions(64, 4096, generator=generator).tolist(),
    "lengths": lambda generator: random_lengths(4096, shortest=8, longest=64, generator=generator),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("other", [(1, "positions", 4), (2, "positions", 3), (-1, "positions", 3), (1, "masks", 3)])
def test_another_row_seed_or_purpose_draws_otherwise(
    draw: Callable[[np.random.Generator], list[int]], other: tuple[int, str, int]
) -> None:
    assert draw(generator_of(1, "positions", 3)) == draw(generator_of(1, "positions", 3))
    assert draw(generator_of(1, "positions", 3)) != draw(generator_of(*other))


def test_another_process_draws_the_same() -> None:
    program = (
        "from hf_posext.training.positions import *; "
        "print(pose_positions(8, 4096, chunks=3, generator=generator_of(5, 'positions', 7)).tolist())"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    here = pose_positions(8, 4096, chunks=3, generator=generator_of(5, "positions", 7))
    assert found.stdout.strip() == str(here.tolist())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pose_positions(9, 8, chunks=2, generator=drawn(0)),
            "`length` must be from 1 to the target length 8, got",
        ),
        (
            lambda: pose_positions(4, 8, chunks=5, generator=drawn(0)),
            "`chunks` must be from 2 to the 4 tokens of a row",
        ),
        (
            lambda: pose_positions(4, 8, chunks=1, generator=drawn(0)),
            "`chunks` must be from 2 to the 4 tokens of a row",
        ),
        (
            lambda: randomized_positions(9, 8, generator=drawn(0)),
            "`length` must be from 1 to the target length 8, got 9",
        ),
        (
            lambda: random_lengths(9, shortest=5, longest=4, generator=drawn(0)),
            "`shortest` must be from 1 to the longest",
        ),
        (
            lambda: random_lengths(9, shortest=0, longest=4, generator=drawn(0)),
            "`shortest` must be from 1 to the longest",
        ),
    ],
)
def test_lengths_that_cannot_be_say_so(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
