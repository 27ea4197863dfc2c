"""Exact length-dependent scaling: keys are cached as the unpatched model rotates them, and turned on as they are read.

The rotary modules keep the frequencies for short text. As attention is entered, queries and keys are turned by what the
frequencies for the present length differ from these. A cached key is therefore rounded once when it is rotated and once
when it is read, whatever the number of steps; nothing in the cache depends on the length; and up to N tokens nothing is
turned, or turned by angle 0, which gives back every bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from hf_posext.attention import blocks
from hf_posext.attention.interface import Attended, Call
from hf_posext.attention.layout import Layout
from hf_posext.attention.reading import Forward, is_expression
from hf_posext.attention.schedule import Schedule
from hf_posext.attention.turning import table, turn

if TYPE_CHECKING:
    from hf_posext.attention.scaling import Dynamics

ROOM = 256  # positions that a table for generation has beyond those asked for


@dataclass
class ScaledForward(Forward):
    """A forward in which the scale follows the length."""

    room_for_tables: int = 1 << 25  # angles; 256 MiB of cosines and sines

    def host_levels(self, schedule: Schedule) -> tuple[float, ...] | None:
        """Level of each row where there is one new token and numbers can be read without waiting for a device."""
        name = f"levels {schedule.name}"
        if name not in self.made:
            lengths = self.now.token_lengths()
            readable = lengths.shape[1] == 1 and lengths.device.type == "cpu" and not is_expression()
            self.made[name] = tuple(schedule.level(lengths).flatten().tolist()) if readable else None
        return self.made[name]

    def differences(self, schedule: Schedule, whole: bool) -> tuple[Tensor, Tensor, Tensor]:
        """`Schedule.differences` for each token [B or 1, L, ...], or for each row as a whole [B or 1, 1, ...]."""
        name = f"differences {schedule.name} {whole}"
        if name not in self.made:
            lengths = self.now.row_lengths()[:, None] if whole else self.now.token_lengths()
            levels = None if whole else self.host_levels(schedule)
            if levels is None:
                self.made[name] = schedule.differences(lengths)
            else:
                self.made[name] = schedule.remembered("differences", levels, lambda: schedule.differences(lengths))
        return self.made[name]

    def runs(self, schedule: Schedule) -> list[tuple[int, int, bool]]:
        """Blocks of tokens that share a scale."""
        name = f"runs {schedule.name}"
        if name not in self.made:
            self.made[name] = blocks.runs(schedule.level(self.now.token_lengths()))
        return self.made[name]

    def is_short(self, schedule: Schedule) -> bool:
        """Whether no new token is beyond short text; False where that cannot be read without waiting for a device."""
        if self.now.tokens > 1:
            runs = self.runs(schedule)
            return len(runs) == 1 and runs[0][2]
        levels = self.host_levels(schedule)
        return levels is not None and not any(levels)

    def query_table(self, schedule: Schedule, layout: Layout, whole: bool) -> tuple[Tensor, Tensor]:
        """cos and sin for the new queries, [B, 1, L, P], with the temperature of rotated channels, of both q and k."""
        name = f"queries {schedule.name} {layout.name} {whole}"
        if name not in self.made:
            difference, ratio, _ = self.differences(schedule, whole)
            cosine, sine = table(self.now.positions, difference, layout)
            self.made[name] = cosine * ratio[:, None, :, None], sine * ratio[:, None, :, None]
        return self.made[name]

    def key_table(
        self, schedule: Schedule, layout: Layout, keys: int, seen: int, whole: bool, at: int
    ) -> tuple[Tensor, Tensor]:
        """cos and sin for the first `seen` of the last S keys as the token `at` reads them, [B, 1, seen, P]."""
        if torch.compiler.is_compiling():
            return table(
                self.key_positions(keys)[..., :seen], self.differences(schedule, whole)[0][:, at, None], layout
            )
        name = f"keys {schedule.name} {layout.name} {keys} {seen} {whole} {at}"
        if name not in self.made:
            difference = self.differences(schedule, whole)[0][:, at, None]
            positions = self.key_positions(keys)[..., :seen]
            size = difference.shape[0] * seen * difference.shape[-1]
            if size > self.room_for_tables:  # a very long prompt makes them again in each layer
                return table(positions, difference, layout)
            self.room_for_tables -= size
            levels = None if whole else self.host_levels(schedule)
            if levels is None:
                self.made[name] = table(positions, difference, layout)
            else:
                self.made[name] = grown_table(schedule, layout, levels, positions, difference)
        return self.made[name]


def grown_table(
    schedule: Schedule, layout: Layout, levels: tuple[float, ...], positions: Tensor, difference: Tensor
) -> tuple[Tensor, Tensor]:
    """`table` with some positions more than asked for, remembered while level and beginning are the same."""
    count, first = positions.shape[-1], positions[..., :1]
    if not torch.equal(positions, first + torch.arange(count)):
        return table(positions, difference, layout)
    kind, beginning = f"table {layout.name}", (levels, tuple(first.flatten().tolist()))
    kept, room = schedule.memo.get(kind, ((None, 0), None))[0]
    if kept != beginning or room < count:
        room = count + ROOM
    cosine, sine = schedule.remembered(
        kind, (beginning, room), lambda: table(first + torch.arange(room), difference, layout)
    )
    return cosine[:, :, :count], sine[:, :, :count]


@dataclass
class Turning:
    """What one attention module does with its queries and keys: the adapter that `interface` looks for."""

    layout: Layout
    schedule: Schedule
    is_causal: bool
    dynamics: Dynamics

    def attend(self, call: Call) -> Attended:
        """Attention in which each query meets the keys at the scale of its own length."""
        plain, call = self.dynamics.of(call)
        forward = cast(ScaledForward, plain)
        compiling = torch.compiler.is_compiling()
        if self.dynamics.is_set or (self.is_causal and not compiling and forward.is_short(self.schedule)):
            return call.run()
        if call.query.shape[2] == 1 or not self.is_causal:
            whole = not self.is_causal
            query = self.turned_queries(forward, call.query, whole)
            return replace(call, query=query, key=self.turned_keys(forward, call.key, call.key, 0, whole)).run()
        return self.attend_compiled(forward, call) if compiling else self.attend_in_blocks(forward, call)

    def attend_in_blocks(self, forward: ScaledForward, call: Call) -> Attended:
        """`attend` of several queries: those that share a scale share keys turned for it."""
        length, keys, has_rows = call.query.shape[2], call.key.shape[2], blocks.has_rows(call.mask)
        parts = []
        for begin, end, is_short in forward.runs(self.schedule):
            seen = keys if has_rows else min(forward.past(), keys - length) + end
            query, key = call.query[:, :, begin:end], call.key[:, :, :seen]
            if not is_short:
                query = self.turned_queries(forward, query, False, begin)
                key = self.turned_keys(forward, key, call.key, begin)
            part = blocks.block(call, begin, end, query, key)
            parts.append(part.run() if has_rows else blocks.run_causal(part))
        return blocks.joined(parts, keys)

    def attend_compiled(self, forward: ScaledForward, call: Call) -> Attended:
        """`attend` of several queries without a branch on values: keys turned for each query, in L times the memory.

        Long prompts are better read before the model is compiled; a compiled step of generation has one query.
        """
        length, keys = call.query.shape[2], call.key.shape[2]
        difference = forward.differences(self.schedule, False)[0]  # [B or 1, L, F]
        places = forward.key_positions(keys)  # [A, B or 1, S]
        batch = max(len(difference), places.shape[1])
        difference = difference.expand(batch, -1, -1).flatten(0, 1)[:, None]
        places = places.expand(-1, batch, -1).repeat_interleave(length, dim=1)
        many = call.key.shape[0] // batch  # one row of positions may stand for all rows of the batch
        cosine, sine = (each.repeat(many, 1, 1, 1) for each in table(places, difference, self.layout))
        return blocks.each_query_alone(
            replace(
                call,
                query=self.turned_queries(forward, call.query, False),
                key=turn(blocks.as_rows(call.key, length), cosine, sine, self.layout),
                mask=blocks.causal(length, keys, call.key.device) if call.mask is None else call.mask,
            )
        )

    def turned_queries(self, forward: ScaledForward, query: Tensor, whole: bool, begin: int = 0) -> Tensor:
        """Queries from `begin` at the scale of their own length, or of their row's, with the temperature of it."""
        here = slice(begin, begin + query.shape[2])
        cosine, sine = forward.query_table(self.schedule, self.layout, whole)
        cosine, sine = cosine[:, :, here].to(query.device), sine[:, :, here].to(query.device)
        if not self.schedule.scales_logits:
            return turn(query, cosine, sine, self.layout, forward.room(query, "queries"))
        logit = forward.differences(self.schedule, whole)[2].to(query.device)[:, None, :, None]
        logit = logit if whole else logit[:, :, here]
        exact = query.float() * logit  # channels without rotation too, rounded once together with the turn
        return turn(exact, cosine, sine, self.layout, forward.room(exact, "queries")).to(query.dtype)

    def turned_keys(self, forward: ScaledForward, key: Tensor, keys: Tensor, at: int, whole: bool = False) -> Tensor:
        """The first of all keys as the token `at` reads them."""
        cosine, sine = forward.key_table(self.schedule, self.layout, keys.shape[2], key.shape[2], whole, at)
        return turn(key, cosine.to(key.device), sine.to(key.device), self.layout, forward.room(key, "keys"))
