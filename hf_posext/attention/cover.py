"""Which keys each block of queries must meet: those of a window, or all but keys that provably weigh nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_posext.attention.toeplitz import ROWS, Plan, Rectangle, parts

COLUMNS = 64  # keys whose norms are bounded together
LEVEL = 64.0  # of a bias by columns, which is centred
NOTHING = 26 * math.log(2)  # a weight of 2^-26 is less than half a unit in the last place of float32
FAR = 1024  # queries that meet far keys together in a backward pass, where each meeting costs a sum over all keys
Range = tuple[int, int]


def spans(length: int) -> list[Range]:
    """Blocks of queries: (first, the one after the last)."""
    return [(first, min(first + ROWS, length)) for first in range(0, length, ROWS)]


def largest(values: Tensor, size: int) -> Tensor:
    """[B, H, tokens] -> [H, blocks]: the largest of each block, over the batch; NaN where there is one."""
    missing = -values.shape[-1] % size
    return pad(values, (0, missing), value=-math.inf).unflatten(-1, (-1, size)).amax((0, 3))


def margin(slopes: Tensor) -> Tensor:
    """How far a logit must lie under another, so that it and all further ones together weigh 2^-26 of it: [H]."""
    return NOTHING - torch.log(-torch.expm1(-slopes))


def steep(slopes: Sequence[float], size: int, share: int) -> range:
    """The heads between the first and the last that can leave out any of `size` keys, in whole groups of `share`."""
    heads = [head for head, slope in enumerate(slopes) if slope * size > NOTHING]
    return range(heads[0] // share * share, heads[-1] // share * share + share) if heads else range(0)


@torch.no_grad()
def needed(
    query: Tensor, key: Tensor, before: Tensor, after: Tensor | None, scale: float
) -> tuple[list[list[int]], list[list[int]]]:
    """The first key, and the key after the last, that each block of queries needs: two lists [H][blocks].

    The product of two vectors is at most that of their norms (Cauchy-Schwarz), so a key beyond a distance cannot reach
    the logit of the query's own key. What is left out on one side weighs less than 2^-26 of the own key altogether.

    Args:
        query: [B, H, L, D].
        key: [B, G, S, D]; the last query stands on the last key.
        before: [H], slopes towards earlier keys.
        after: [H], slopes towards later keys, None for causal attention.
        scale: of the logits.
    """
    (_, heads, length, _), (groups, size) = query.shape, key.shape[1:3]
    share, offset = heads // groups, size - length
    rows = torch.tensor(spans(length))
    first, last = offset + rows[:, :1], offset + rows[:, 1:]
    begin = torch.arange(0, size, COLUMNS)
    end = (begin + COLUMNS).clamp(max=size)

    query, key = query.float(), key.float()
    norms = [torch.linalg.vector_norm(states, dim=-1) for states in (query, key)]
    own = torch.linalg.vecdot(query.unflatten(1, (groups, share)), key[:, :, None, offset:]).flatten(1, 2)
    gain = largest(norms[0], ROWS)[:, :, None] * largest(norms[1], COLUMNS).repeat_interleave(share, 0)[:, None]
    gain = abs(scale) * gain + largest(-scale * own, ROWS)[:, :, None]

    def seen(slopes: Tensor, distance: Tensor) -> Tensor:
        """[H, blocks of queries, blocks of keys]; written so that a bound of NaN prunes nothing."""
        lost = gain + margin(slopes)[:, None, None] < slopes[:, None, None] * distance
        return ~(lost & (distance > 0))

    seen_before = seen(before, first - (end - 1))
    starts = seen_before.int().argmax(-1) * COLUMNS
    if after is None:
        return starts.tolist(), last.flatten().expand(heads, -1).tolist()
    seen_after = seen(after, begin - (last - 1))
    ends = (len(begin) - seen_after.flip(-1).int().argmax(-1)) * COLUMNS
    return starts.tolist(), ends.clamp(max=size).tolist()


def undivided(starts: list[list[int]], slopes: Sequence[float], length: int, size: int) -> list[bool]:
    """[H]: heads of causal attention that are better off in one piece with a bias by columns.

    That bias is off by a number per query; up to `LEVEL` it is about as large as logits are, and costs no digits. It is
    worth it where few keys are left out.
    """
    full = sum(size - length + last for _, last in spans(length))
    return [
        length == size and slope * size <= LEVEL and sum(one) < full / 8
        for one, slope in zip(starts, slopes, strict=True)
    ]


def everything(heads: int, length: int, size: int, causal: bool) -> tuple[list[list[int]], list[list[int]]]:
    """As `needed`, with nothing left out."""
    blocks = spans(length)
    ends = [size - length + last if causal else size for _, last in blocks]
    return [[0] * len(blocks)] * heads, [ends] * heads


def plan(
    starts: list[list[int]], ends: list[list[int]], length: int, size: int, groups: int, causal: bool, whole: list[bool]
) -> Plan:
    """The plan of attention whose blocks of queries meet the keys from `starts` to `ends`, lists [H][blocks].

    Args:
        starts: first keys.
        ends: the keys after the last ones.
        length: L.
        size: S.
        groups: G.
        causal: whether keys end with the queries' own.
        whole: [H], heads that are not to be divided.
    """
    rows = spans(length)
    blocks: list[list[Rectangle]] = [
        [] if undivided else [(*one, begin, end) for one, begin, end in zip(rows, *both, strict=True)]
        for *both, undivided in zip(starts, ends, whole, strict=True)
    ]
    return Plan(
        parts((wide(one, causal) for one in blocks), groups),
        parts((split(one, size - length, causal) for one in blocks), groups),
        parts(([(0, length, 0, size)] if undivided else [] for undivided in whole), groups),
    )


def reach(blocks: list[Rectangle]) -> int:
    """How many keys a block of queries meets on average."""
    return sum(end - begin for _, _, begin, end in blocks) // max(1, len(blocks))


def hulls(blocks: list[Rectangle], count: int) -> list[Rectangle]:
    """Every `count` neighbouring blocks of queries as one, with all the keys that any of them meets."""
    groups = [blocks[index : index + count] for index in range(0, len(blocks), count)]
    return [(one[0][0], one[-1][1], min(begin for *_, begin, _ in one), max(end for *_, end in one)) for one in groups]


def is_full(blocks: list[Rectangle]) -> bool:
    """Whether all blocks of queries meet the same keys."""
    return len({(begin, end) for _, _, begin, end in blocks}) == 1


def wide(blocks: list[Rectangle], causal: bool) -> list[Rectangle]:
    """Blocks of one head for a forward pass: wide ones are faster, but meet keys that they do not need."""
    if not causal and is_full(blocks):
        return hulls(blocks, len(blocks))
    return hulls(blocks, FAR // ROWS if reach(blocks) >= (4 * FAR if causal else FAR) else 1)


def split(blocks: list[Rectangle], offset: int, causal: bool) -> list[Rectangle]:
    """Blocks of one head for a backward pass: wide ones for far keys, narrow ones at the diagonal."""
    if not causal:
        return wide(blocks, causal)
    count = max(1, min(FAR, reach(blocks) // 4) // ROWS)
    found: list[Rectangle] = []
    for index, (first, last, begin, _) in enumerate(hulls(blocks, count)):
        narrow, diagonal = blocks[index * count : (index + 1) * count], offset + first
        if len(narrow) == 1 or diagonal - begin < ROWS:
            found += narrow
        else:
            found.append((first, last, begin, diagonal))
            found += [(one, two, max(three, diagonal), four) for one, two, three, four in narrow]
    return found


def sliding(length: int, size: int, width: int, sinks: int, causal: bool) -> list[Rectangle]:
    """Blocks of queries with the range of keys that a window shows them: from 0 where the sinks touch the window."""
    offset = size - length
    found = []
    for first, last in spans(length):
        begin = max(0, offset + first - width + 1)
        end = offset + last if causal else min(size, offset + last - 1 + width)
        found.append((first, last, 0 if begin <= sinks else begin, end))
    return found


def ramps(size: int, width: int, sinks: int, causal: bool) -> tuple[Tensor, Tensor | None]:
    """The bias of a window and that of sinks (None without), [1, distances] float32; distance 0 stands at S - 1."""
    distance = torch.arange(size - 1, -size - ROWS, -1)[None]
    past = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    zeros = torch.zeros(distance.shape)
    near = zeros.where(past & (distance.abs() < width), -torch.inf)
    return near, zeros.where(past, -torch.inf) if sinks else None


def sliding_plan(blocks: list[Rectangle], heads: int, groups: int, offset: int, causal: bool, sinks: int) -> Plan:
    """The plan of a sliding window, the same for all heads; with sinks, no block is cut at the diagonal."""
    backward = blocks if sinks else split(blocks, offset, causal)
    return Plan(parts([blocks] * heads, groups), parts([backward] * heads, groups), [])
