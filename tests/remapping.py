"""Queries and keys rotated pair by pair in double precision, by their mapped distance: what remapped attention is."""

from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH, SCALE, GROUP, SLOPE = 8, 0.35, 3, 0.25
FREQUENCIES = 100.0 ** -(torch.arange(WIDTH // 2).double() / (WIDTH // 2))
DOUBLE = {"rtol": 0, "atol": 1e-11}
SINGLE = {"rtol": 0, "atol": 5e-6}
SEEN_NONE = -torch.inf
METHODS = ("self_extend", "rerope", "leaky_rerope")
CASES = {
    "whole": (64, 64, 16),
    "ragged": (61, 61, 16),
    "window_not_in_length": (61, 61, 7),
    "window_1": (33, 33, 1),
    "window_2": (33, 33, 2),
    "one_far_key": (33, 33, 32),
    "chunk": (16, 61, 16),
    "short_chunk": (3, 61, 16),
    "chunk_at_the_window": (9, 20, 16),
    "chunk_inside_the_window": (9, 14, 16),
    "one_token": (1, 61, 16),
    "one_token_one_far_key": (1, 17, 16),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def as_pairs(states: Tensor) -> Tensor:
    """[..., D] -> [..., D / 2] complex: channel c and channel c + D / 2."""
    return torch.complex(*states.chunk(2, dim=-1))


def rotated(states: Tensor, positions: Tensor) -> Tensor:
    """[B, H, L, D] at positions [B or 1, L]."""
    angles = positions.double()[:, None, :, None] * FREQUENCIES
    turned = as_pairs(states) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def mapped(method: str, query: Tensor, key: Tensor, window: int) -> Tensor:
    """The relative position at which a pair is read, by the papers, from int64 positions that broadcast."""
    apart = (query - key).abs()
    sign = torch.where(query >= key, 1, -1)
    if method == "self_extend":
        far = (query // GROUP - key // GROUP) * sign + window - window // GROUP
    elif method == "rerope":
        far = torch.full_like(apart, window)
    else:
        far = window + (apart - window) * SLOPE
    return sign * torch.where(apart < window, apart, far).double()


@dataclass
class Views:
    """What the caller of the kernels gives, and what it comes from."""

    unrotated: tuple[Tensor, Tensor]
    near: tuple[Tensor, Tensor]
    far: tuple[Tensor, Tensor]
    right: Tensor
    value: Tensor
    positions: tuple[Tensor, Tensor]
    method: str
    window: int

    def pairs(self) -> Tensor:
        """Logits [B, H, L, S]: each pair of vectors at its own relative position."""
        query, key = map(as_pairs, self.unrotated)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        at, of = self.positions[0][:, :, None], self.positions[1][:, None, :]
        angles = mapped(self.method, at, of, self.window)[:, None, :, :, None] * FREQUENCIES
        turn = torch.polar(torch.ones_like(angles), angles)
        return SCALE * (query[:, :, :, None] * key[:, :, None].conj() * turn).real.sum(-1)

    def expected(self, seen: Tensor) -> Tensor:
        """Attention of these logits to the keys that are seen, bool that broadcasts to [B, H, L, S]."""
        weights = self.pairs().masked_fill(~seen, -torch.inf).softmax(-1)
        return weights @ self.value.repeat_interleave(weights.shape[1] // self.value.shape[1], 1)

    def two(self) -> tuple:
        """Arguments of `two_regions`; of the far keys no more than are needed."""
        query, key = self.near
        far_query, far_key = self.far
        needed = max(key.shape[2] - self.window, 0)
        return query, key, far_query, far_key[:, :, :needed], self.value, self.window, SCALE

    def three(self) -> tuple:
        """Arguments of `three_regions`."""
        return *self.near, self.far[0], self.right, self.far[1], self.value, self.window, SCALE

    def all(self) -> tuple:
        """First arguments of `selected`."""
        return *self.near, *self.far, self.value, SCALE


def build(
    method: str,
    length: int,
    keys: int,
    window: int,
    *,
    heads: int = 4,
    groups: int = 2,
    positions: tuple[Tensor, Tensor] | None = None,
) -> Views:
    """Random states of two rows, the last query on the last key, or both at these positions, [B or 1, L or S]."""
    query, key = draw(2, heads, length, WIDTH, seed=1), draw(2, groups, keys, WIDTH, seed=2)
    at, of = positions or (torch.arange(keys - length, keys)[None], torch.arange(keys)[None])
    if method == "self_extend":
        shift, far_at, far_of = window - window // GROUP, at // GROUP, of // GROUP
    elif method == "rerope":
        shift, far_at, far_of = window, at * 0, of * 0
    else:
        shift, far_at, far_of = window - window * SLOPE, at * SLOPE, of * SLOPE
    return Views(
        (query, key),
        (rotated(query, at), rotated(key, of)),
        (rotated(query, far_at + shift), rotated(key, far_of)),
        rotated(query, far_at - shift),
        draw(2, groups, keys, WIDTH, seed=3),
        (at, of),
        method,
        window,
    )


def causal(views: Views) -> Tensor:
    at, of = views.positions
    return (at[:, :, None] >= of[:, None, :])[:, None]


def scores(
    query: Tensor, key: Tensor, far_query: Tensor, far_key: Tensor, window: int, right_query: Tensor | None = None
) -> Tensor:
    """Logits from two (or three) whole score matrices, [B, H, L, S]; the last query is the last key."""
    copies, length, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, far_key = key.repeat_interleave(copies, 1), far_key.repeat_interleave(copies, 1)
    apart = torch.arange(keys - length, keys)[:, None] - torch.arange(keys)
    chosen = torch.where(apart.abs() < window, query @ key.mT, far_query @ far_key.mT)
    if right_query is None:
        return (chosen * SCALE).masked_fill(apart < 0, -torch.inf)
    return torch.where(apart <= -window, right_query @ far_key.mT, chosen) * SCALE


def attended(logits: Tensor, value: Tensor) -> Tensor:
    return logits.softmax(-1) @ value.repeat_interleave(logits.shape[1] // value.shape[1], 1)


def leaves(length: int, keys: int, dtype: torch.dtype = torch.float64, batch: int = 2) -> list[Tensor]:
    """query, far_query, right_query, key, far_key, value; the kernels read them through a transposed layout."""
    shapes = [(batch, length, 4, WIDTH)] * 3 + [(batch, keys, 2, WIDTH)] * 3
    return [draw(*shape, seed=seed).to(dtype).transpose(1, 2).requires_grad_() for seed, shape in enumerate(shapes)]


def check_gradients(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Same output and same gradients of a random weighting; None counts as zero."""
    torch.testing.assert_close(found, expected, **DOUBLE)
    weight = draw(*found.shape, seed=9)
    ours = torch.autograd.grad(found, inputs, weight, allow_unused=True)
    theirs = torch.autograd.grad(expected, inputs, weight)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.zeros_like(their) if our is None else our, their, **DOUBLE)
