"""Attention on CPU with a bias that depends on the distance of query and key alone, in blocks of queries.

The bias of a block of queries is a strided view of one vector per head: with the queries in reverse order, the entry of
row i and column j depends on i + j only. So no matrix of queries by keys is made, and each block may meet the keys that
it needs and no others. The numbers in a view are small where weights are large, so nothing is lost in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_posext.attention.kernel import attend, attend_backward

ROWS = 256  # queries in a block: few enough that little is computed beyond the diagonal


class Part(NamedTuple):
    """Queries `first` to `last` of heads `low` to `high`, which meet keys `begin` to `end` (all ends excluded)."""

    low: int
    high: int
    first: int
    last: int
    begin: int
    end: int


Rectangle = tuple[int, int, int, int]  # first, last, begin, end


@dataclass(frozen=True)
class Bias:
    """A bias by distance.

    Attributes:
        ramp: [H or 1, distances] float32, contiguous; the bias at distance d is `ramp[:, origin - d]`, at all
            distances that a part can have.
        origin: where the bias at distance 0 stands.
        offset: the number of keys before the key of the first query.
        sinks: the number of first keys that are seen at any distance.
        open: [1, distances] float32 like `ramp`, the bias of sinks.
        columns: [H, S] float32, for heads in one piece: the bias but for a number per query.
    """

    ramp: Tensor
    origin: int
    offset: int
    sinks: int = 0
    open: Tensor | None = None
    columns: Tensor | None = None

    def view(self, ramp: Tensor, part: Part) -> Tensor:
        """[1, heads or 1, rows, keys]: the bias of a part's queries in reverse order."""
        rows, keys = part.last - part.first, part.end - part.begin
        furthest = self.offset + part.last - 1 - part.begin
        shared = ramp.shape[0] == 1
        heads, row = (1, 0) if shared else (part.high - part.low, part.low)
        start = row * ramp.shape[1] + self.origin - furthest
        return ramp.as_strided((1, heads, rows, keys), (0, ramp.shape[1], 1, 1), start)

    def mask(self, part: Part) -> Tensor:
        """[1, heads or 1, rows, keys]: as `view`, with the sinks."""
        near = self.view(self.ramp, part)
        if self.open is None:
            return near
        if part.begin > 0:
            return torch.cat([near.new_zeros(*near.shape[:3], self.sinks), near], dim=-1)
        near = near.clone()
        near[..., : self.sinks] = self.view(self.open, part)[..., : self.sinks]
        return near

    def column(self, part: Part) -> Tensor:
        """[1, heads, 1, S]: the bias of a part in one piece."""
        return self.columns[None, part.low : part.high, None]  # type: ignore[index]

    def keys(self, states: Tensor, part: Part, heads: int) -> Tensor:
        """The keys or values [B, heads of the part, keys, D] that a part meets, sinks first; H is `heads`."""
        groups = states.shape[1]
        if groups == heads:
            states = states[:, part.low : part.high]
        else:
            group = part.low * groups // heads
            states = states[:, group : group + 1].expand(-1, part.high - part.low, -1, -1)
        near = states[:, :, part.begin : part.end]
        if self.open is None or part.begin == 0:
            return near
        return torch.cat([states[:, :, : self.sinks], near], dim=2)

    def add(self, total: Tensor, gradient: Tensor, part: Part, heads: int) -> None:
        """Adds the gradient of what `keys` gave to the gradient of all keys or values, in place."""
        groups = total.shape[1]
        if groups == heads:
            total = total[:, part.low : part.high]
        else:
            group = part.low * groups // heads
            total, gradient = total[:, group : group + 1], gradient.sum(1, keepdim=True)
        if self.open is not None and part.begin > 0:
            total[:, :, : self.sinks] += gradient[:, :, : self.sinks]
            gradient = gradient[:, :, self.sinks :]
        total[:, :, part.begin : part.end] += gradient


@dataclass(frozen=True)
class Plan:
    """How attention is divided.

    Attributes:
        forward: each query of the heads in blocks once.
        backward: the same, each pair of query and key once.
        whole: ranges of heads in one piece, with a bias by columns.
    """

    forward: list[Part]
    backward: list[Part]
    whole: list[Part]


def parts(rectangles: Iterable[Iterable[Rectangle]], groups: int) -> list[Part]:
    """Rectangles of every head as parts, equal ones of neighbouring heads joined where their keys allow it.

    Args:
        rectangles: for each head.
        groups: heads of keys.
    """
    heads_of: dict[Rectangle, list[int]] = {}
    heads = 0
    for head, one in enumerate(rectangles):
        heads = head + 1
        for rectangle in one:
            heads_of.setdefault(rectangle, []).append(head)
    share = heads // groups
    found = []
    for rectangle, members in heads_of.items():
        low = members[0]
        for head, following in zip(members, [*members[1:], -1], strict=True):
            if following != head + 1 or (share > 1 and following % share == 0):
                found.append(Part(low, head + 1, *rectangle))
                low = following
    return found


class Attention(torch.autograd.Function):
    """Attention with a bias by distance."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Bias, plan: Plan, scale: float) -> Tensor:
        """[B, H, L, D] for query [B, H, L, D], key and value [B, G, S, D]."""
        batch, heads, length, width = query.shape
        output = query.new_empty(batch, length, heads, width).transpose(1, 2)
        sums = query.new_empty((batch, heads, length), dtype=torch.float32)
        for part in plan.whole:
            run = slice(part.low, part.high)
            output[:, run], sums[:, run] = attend(
                query[:, run], bias.keys(key, part, heads), bias.keys(value, part, heads), 0.0, True,
                attn_mask=bias.column(part), scale=scale,
            )  # fmt: skip
        for part in plan.forward:
            rows = slice(part.low, part.high), slice(part.first, part.last)
            result, logarithm = attend(
                query[:, *rows].flip(2), bias.keys(key, part, heads), bias.keys(value, part, heads),
                attn_mask=bias.mask(part), scale=scale,
            )  # fmt: skip
            output[:, *rows] = result.flip(2)
            sums[:, *rows] = logarithm.flip(2)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.bias, ctx.plan, ctx.scale = bias, plan, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value, summed in float32."""
        query, key, value, output, sums = ctx.saved_tensors
        totals = [torch.zeros_like(states, dtype=torch.float32) for states in (query, key, value)]
        heads = query.shape[1]
        for part in ctx.plan.whole:
            run = slice(part.low, part.high)
            totals[0][:, run], of_key, of_value = attend_backward(
                gradient[:, run], query[:, run], ctx.bias.keys(key, part, heads), ctx.bias.keys(value, part, heads),
                output[:, run], sums[:, run], 0.0, True, attn_mask=ctx.bias.column(part), scale=ctx.scale,
            )  # fmt: skip
            ctx.bias.add(totals[1], of_key, part, heads)
            ctx.bias.add(totals[2], of_value, part, heads)
        for part in ctx.plan.backward:
            rows = slice(part.low, part.high), slice(part.first, part.last)
            of_query, of_key, of_value = attend_backward(
                gradient[:, *rows].flip(2), query[:, *rows].flip(2),
                ctx.bias.keys(key, part, heads), ctx.bias.keys(value, part, heads),
                output[:, *rows].flip(2), sums[:, *rows].flip(2), 0.0, False,
                attn_mask=ctx.bias.mask(part), scale=ctx.scale,
            )  # fmt: skip
            totals[0][:, *rows] += of_query.flip(2)
            ctx.bias.add(totals[1], of_key, part, heads)
            ctx.bias.add(totals[2], of_value, part, heads)
        of_query, of_key, of_value = (total.to(query.dtype) for total in totals)
        return of_query, of_key, of_value, None, None, None


def run(query: Tensor, key: Tensor, value: Tensor, bias: Bias, plan: Plan, scale: float) -> Tensor:
    """[B, H, L, D]: attention of query [B, H, L, D] to key and value [B, G, S, D]; differentiable in all three."""
    query, key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, value))
    return Attention.apply(query, key, value, bias, plan, scale)
