"""Positions of a row that is shorter than the target length, and lengths of rows that vary: pure functions.

Only `position_ids` differ from an ordinary row: the text is contiguous, and each token sees all earlier ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


def generator_of(seed: int, purpose: str, index: int) -> np.random.Generator:
    """The source of the draws of one row, the same in every process.

    Args:
        seed: of the run.
        purpose: what is drawn, so that a row's positions say nothing about its masks.
        index: of the row or document, from 0.
    """
    return np.random.default_rng([abs(seed), int(seed < 0), index, *purpose.encode()])


def pose_positions(length: int, target_length: int, *, chunks: int, generator: np.random.Generator) -> Positions:
    """Skip-wise positions: a few contiguous chunks with jumps between them, so that a short row reaches up to T.

    Chunk i begins at u_i + st_i, where st_i counts the tokens before it, u_0 = 0 and u_i ~ U{u_(i-1), ..., T - L}. So
    the first position is 0, the last one below T, and every distance below T occurs. The lengths of the chunks are
    drawn anew for each row: the cuts are distinct places in the first 1 - 1/`chunks` of it, which for two chunks is the
    rule of the paper's own code (the first has 1 to L/2 tokens). The text is contiguous (v_i = 0 in the paper).

    Args:
        length: tokens of the row L, from `chunks` to T.
        target_length: T in tokens.
        chunks: how many, at least 2.
        generator: source of the draws.

    Returns:
        Positions in tokens, int64 [L], strictly increasing.

    Raises:
        ValueError: a row with fewer tokens than chunks, or with more than T.

    Source: Zhu et al. 2024 (arXiv 2309.10400), section 3.2, equations 3 to 5; lengths of chunks as in their
        `train_preprocess_function_pose`.
    """
    check_room(length, target_length)
    if not 2 <= chunks <= length:
        raise ValueError(f"`chunks` must be from 2 to the {length} tokens of a row, got {chunks}.")
    places = -(-length * (chunks - 1) // chunks)
    cuts = 1 + np.sort(generator.choice(places, chunks - 1, replace=False))
    skips = [0]
    for _ in cuts:
        skips.append(int(generator.integers(skips[-1], target_length - length, endpoint=True)))
    sizes = np.diff(cuts, prepend=0, append=length)
    return np.arange(length) + np.repeat(skips, sizes)


def randomized_positions(length: int, target_length: int, *, generator: np.random.Generator) -> Positions:
    """Positions drawn from all below T without replacement, sorted, so that only their order says anything.

    Args:
        length: tokens of the row L, at most T.
        target_length: T in tokens.
        generator: source of the draws.

    Returns:
        Positions in tokens, int64 [L], strictly increasing.

    Raises:
        ValueError: a row with more than T tokens.

    Source: Ruoss et al. 2023 (arXiv 2305.16843), section 3.1; positions from 0, where theirs are from 1.
    """
    check_room(length, target_length)
    return np.sort(generator.choice(target_length, length, replace=False, shuffle=False))


def random_lengths(total: int, *, shortest: int, longest: int, generator: np.random.Generator) -> list[int]:
    """Lengths of consecutive pieces of a text, each uniform from the shortest to the longest.

    The last one is what is left of the text; where that is less than the shortest it is none.

    Args:
        total: tokens of the text.
        shortest: tokens of the shortest piece, at least 1.
        longest: tokens of the longest one.
        generator: source of the draws.

    Returns:
        Lengths in tokens, in the order of the text; their sum is more than `total` - `shortest`, and at most `total`.

    Raises:
        ValueError: a shortest piece that is empty or longer than the longest.

    Source: the training on varied lengths of arXiv 2405.13226, with uniform lengths.
    """
    if not 1 <= shortest <= longest:
        raise ValueError(f"`shortest` must be from 1 to the longest, {longest} tokens, got {shortest}.")
    lengths: list[int] = []
    while total >= shortest:
        lengths.append(min(total, int(generator.integers(shortest, longest, endpoint=True))))
        total -= lengths[-1]
    return lengths


def check_room(length: int, target_length: int) -> None:
    """Refuses a row that is longer than the target length.

    Raises:
        ValueError: names both.
    """
    if not 1 <= length <= target_length:
        raise ValueError(f"`length` must be from 1 to the target length {target_length}, got {length}.")
