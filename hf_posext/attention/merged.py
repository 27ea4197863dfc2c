"""Attention over parts of the keys, joined by their sums of weights, with torch's CPU kernel and its gradients.

A part is what the kernel does fast: a staircase, a rectangle, or equal blocks of queries that meet equal runs of keys
under one small mask. Parts may read different views of the queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posext.attention.kernel import attend, attend_backward

NEAR, FAR, RIGHT = range(3)  # views of the queries; the last two meet the far keys
BLOCK = 192  # queries under one mask: a block of B meets window + B keys, but the kernel multiplies short blocks slowly


@dataclass(frozen=True)
class Span:
    """Equal runs of tokens.

    Attributes:
        begin: first token of the first run.
        size: tokens of a run.
        step: from the first token of a run to that of the next; runs overlap where it is less than `size`.
        runs: how many.
        flipped: read each run from its last token to its first; only for a single run.
    """

    begin: int
    size: int
    step: int = 1
    runs: int = 1
    flipped: bool = False

    def of(self, states: Tensor) -> Tensor:
        """[B, H, L, ...] -> [B, H, runs, size, ...], a view in the order of the tokens."""
        end = self.begin + (self.runs - 1) * self.step + self.size
        return states[:, :, self.begin : end].unfold(2, self.size, self.step).movedim(-1, 3)

    def folded(self, states: Tensor) -> Tensor:
        """[B, H, L, ...] -> [B runs, H, size, ...] in the order of reading; a view where B or `runs` is 1."""
        if self.runs == 1:
            states = states[:, :, self.begin : self.begin + self.size]
            return states.flip(2) if self.flipped else states
        return self.of(states).transpose(1, 2).flatten(0, 1)

    def unfolded(self, states: Tensor) -> Tensor:
        """[B runs, H, size, ...] in the order of reading -> [B, H, runs, size, ...] in that of the tokens."""
        states = states.unflatten(0, (-1, self.runs)).transpose(1, 2)
        return states.flip(3) if self.flipped else states

    def add(self, sums: Tensor, states: Tensor) -> None:
        """Adds [B runs, H, size, ...] to these tokens of [B, H, L, ...], in pieces of which no token has two."""
        states = self.unfolded(states)
        piece = min(self.size, self.step) if self.runs > 1 else self.size
        for begin in range(0, self.size, piece):
            some = replace(self, begin=self.begin + begin, size=min(piece, self.size - begin))
            some.of(sums).add_(states[:, :, :, begin : begin + some.size])


@dataclass(frozen=True)
class Part:
    """What one call of the kernel computes.

    Attributes:
        view: NEAR, FAR or RIGHT.
        queries: the tokens that ask; their runs do not overlap.
        keys: the tokens that are asked, in as many runs.
        causal: query i of a run sees its keys up to i.
        column: of the band mask, from which on it lies over the keys; None for no mask.
    """

    view: int
    queries: Span
    keys: Span
    causal: bool = False
    column: int | None = None

    def mask(self, band: Tensor) -> Tensor | None:
        """The piece of the band mask over one run, [1, 1, queries, keys]."""
        if self.column is None:
            return None
        return band[None, None, : self.queries.size, self.column : self.column + self.keys.size]

    def continues(self, after: Part) -> bool:
        """Whether a block that follows has the same shape and mask."""
        mine, others = (self.queries.size, self.keys.size), (after.queries.size, after.keys.size)
        return mine == others and self.column == after.column

    def pieces(self, keys: int) -> list[Part]:
        """The same in parts with at most about so many keys each, those counted twice that are in two runs."""
        runs, most = self.queries.runs, max(1, keys // self.keys.size)
        return [
            replace(self, queries=some(self.queries, first, most), keys=some(self.keys, first, most))
            for first in range(0, runs, most)
        ]


def some(span: Span, first: int, most: int) -> Span:
    """At most so many runs from the first on."""
    return replace(span, begin=span.begin + first * span.step, runs=min(most, span.runs - first))


@dataclass(frozen=True)
class Plan:
    """Parts that together are one attention.

    Attributes:
        parts: the near ones have every query once; no query meets a key twice.
        band: additive mask over a block of near queries and their keys, [block, keys].
    """

    parts: tuple[Part, ...]
    band: Tensor


def run(queries: Sequence[Tensor], keys: Sequence[Tensor], value: Tensor, plan: Plan, scale: float) -> Tensor:
    """Attention whose weights are spread over several parts.

    Args:
        queries: the views of the queries, [B, H, L, D] each.
        keys: the near and the far view of the keys, [B, G, S, D]; the far one may have fewer.
        value: [B, G, S, D].
        plan: for these lengths.
        scale: multiplier of the logits.

    Returns:
        [B, H, L, D], differentiable once in all views and the value.
    """
    return Merged.apply(plan, scale, len(queries), *queries, *keys, value)


class Merged(torch.autograd.Function):
    """`run` and its gradients."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, scale: float, views: int, *states: Tensor) -> Tensor:
        """Joins the parts one after the other in float32."""
        states = tuple(map(with_rows, states))
        output, total = joined(states[:views], states[views:-1], states[-1], plan, scale)
        ctx.save_for_backward(*states, output, total)
        ctx.plan, ctx.scale, ctx.views = plan, scale, views
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Each part alone, with the output and the sum of all of them: then its weights are those of the whole."""
        *states, output, total = ctx.saved_tensors
        gradient = with_rows(gradient)
        grads = [torch.zeros_like(one, dtype=exact_type(one)) for one in states]
        room = states[-1].shape[2]
        for part in (piece for whole in ctx.plan.parts for piece in whole.pieces(room)):
            places = (part.view, ctx.views + min(part.view, 1), len(states) - 1)
            spans = (part.queries, part.keys, part.keys)
            given = [span.folded(states[place]) for span, place in zip(spans, places, strict=True)]
            about = [part.queries.folded(one) for one in (output, total)]
            found = attend_backward(
                part.queries.folded(gradient), *given, *about, 0.0, part.causal,
                attn_mask=part.mask(ctx.plan.band), scale=ctx.scale,
            )  # fmt: skip
            for span, place, grad in zip(spans, places, found, strict=True):
                span.add(grads[place], grad)
        return None, None, None, *(grad.to(one.dtype) for grad, one in zip(grads, states, strict=True))


def joined(
    queries: Sequence[Tensor], keys: Sequence[Tensor], value: Tensor, plan: Plan, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, L, D] and the logarithm of the sum of weights [B, H, L], in the kernel's own layout."""
    batch, heads, length, width = queries[NEAR].shape
    exact = exact_type(value)
    output = value.new_empty(batch, length, heads, width, dtype=exact).transpose(1, 2)
    total = value.new_empty(batch, length, heads, dtype=exact).transpose(1, 2)
    for part in plan.parts:
        query, key = part.queries.folded(queries[part.view]), part.keys.folded(keys[min(part.view, 1)])
        result, weight = attend(
            query, key, part.keys.folded(value), 0.0, part.causal, attn_mask=part.mask(plan.band), scale=scale
        )
        result, weight = part.queries.unfolded(result), part.queries.unfolded(weight)
        merged, sums = part.queries.of(output), part.queries.of(total)
        if part.view == NEAR:
            merged.copy_(result)
            sums.copy_(weight)
        else:
            merged.lerp_(result.to(exact), torch.sigmoid(weight - sums)[..., None])
            torch.logaddexp(sums, weight, out=sums)
    return output.to(value.dtype), total


def with_rows(states: Tensor) -> Tensor:
    """The kernel takes for granted that the numbers of a head lie side by side."""
    return states if states.stride(-1) == 1 else states.contiguous()


def exact_type(states: Tensor) -> torch.dtype:
    """Of sums over parts, and of masks: float32 for half precision."""
    return torch.promote_types(states.dtype, torch.float32)


def causal_plan(length: int, keys: int, window: int, dtype: torch.dtype) -> Plan:
    """Causal attention in which keys `window` or more before the query are far; the last query is the last key."""
    parts, far = band_parts(length, keys, window - 1, 0), keys - window
    rows = min(length, far)
    asking, before = Span(length - rows, rows), far - rows
    if rows == 1:
        parts.append(Part(FAR, asking, Span(0, far)))
    elif rows > 1:
        parts.append(Part(FAR, asking, Span(before, rows), causal=True))
        if before:
            parts.append(Part(FAR, asking, Span(0, before)))
    return Plan(tuple(parts), band_mask(length, window - 1, 0, dtype))


def symmetric_plan(length: int, window: int, dtype: torch.dtype) -> Plan:
    """Attention to all keys, where those `window` or more before or after the query are far; length > window."""
    far = length - window
    early, late = Span(0, far), Span(window, far)
    mirrored = replace(early, flipped=True), replace(late, flipped=True)
    parts = band_parts(length, length, window - 1, window - 1)
    parts += [Part(FAR, late, early, causal=True), Part(RIGHT, *mirrored, causal=True)]
    return Plan(tuple(parts), band_mask(length, window - 1, window - 1, dtype))


def band_parts(length: int, keys: int, before: int, after: int) -> list[Part]:
    """Near parts: each query meets its own key, so many before it and so many after; the last is the last key.

    Blocks whose keys are cut off at the ends of the text are parts of their own, all others make one part.
    """
    parts: list[Part] = []
    for begin in range(0, length, BLOCK):
        rows = min(BLOCK, length - begin)
        start = keys - length + begin - before
        first, last = max(0, start), min(keys, start + before + rows + after)
        column = first - start if rows > 1 else None
        part = Part(NEAR, Span(begin, rows, BLOCK), Span(first, last - first, BLOCK), column=column)
        if parts and parts[-1].continues(part):
            runs = parts[-1].queries.runs + 1
            queries, asked = replace(parts[-1].queries, runs=runs), replace(parts[-1].keys, runs=runs)
            parts[-1] = replace(parts[-1], queries=queries, keys=asked)
        else:
            parts.append(part)
    return parts


def band_mask(length: int, before: int, after: int, dtype: torch.dtype) -> Tensor:
    """[block, before + block + after]: row r sees columns r to r + before + after, its own key and those around it."""
    rows = min(BLOCK, length)
    seen = torch.ones(rows, before + rows + after, dtype=torch.bool).triu_().tril_(before + after)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(seen.logical_not_(), -torch.inf)
