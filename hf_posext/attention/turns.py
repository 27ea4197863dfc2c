"""Exact length-dependent scaling: keys are cached as the unpatched model rotates them, and turned on as they are read.

The rotary modules keep the frequencies for short text. As attention is entered, queries and keys are turned by what the
frequencies for the present length differ from these. A cached key is therefore rounded once when it is rotated and once
when it is read, whatever the number of steps; nothing in the cache depends on the length; and up to N tokens nothing is
turned, or turned by angle 0, which gives back every bit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_posext.attention import blocks, interface
from hf_posext.attention.layout import Layout
from hf_posext.attention.present import Present
from hf_posext.attention.schedule import Schedule
from hf_posext.attention.turning import turn
from hf_posext.errors import PatchError

if TYPE_CHECKING:
    from hf_posext.attention.scaling import Dynamics

KEYWORD = "posext_scaling"
ROOM = 256  # positions that a table for generation has beyond those asked for


@dataclass
class Forward:
    """One forward of a model: where its tokens stand, and what follows from it, each made when first asked for.

    It travels with the keyword arguments of the layers, so that a layer that gradient checkpointing runs again sees the
    lengths of its own forward and not of a later one.
    """

    now: Present
    made: dict[str, Any] = field(default_factory=dict)
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

    def past(self) -> int:
        """Tokens that the cache held before, as a number of the host."""
        if "past" not in self.made:
            self.made["past"] = int(self.now.past)
        return self.made["past"]

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

    def key_positions(self, keys: int) -> Tensor:
        """`Present.key_positions`."""
        if torch.compiler.is_compiling():  # a name made of a length would compile again for every length
            return self.now.key_positions(keys)
        name = f"positions {keys}"
        if name not in self.made:
            self.made[name] = self.now.key_positions(keys)
        return self.made[name]

    def room(self, states: Tensor, use: str) -> Tensor | None:
        """Memory for turned states, the same for all blocks and layers; None where results must be expressions."""
        if is_expression():
            return None
        name = f"{use} {states.dtype} {states.device}"
        if name not in self.made or self.made[name].numel() < states.numel():
            self.made[name] = states.new_empty(states.numel() * 5 // 4)  # blocks grow: not for each of them anew
        return self.made[name][: states.numel()].view(states.shape)


def is_expression() -> bool:
    """Whether results must be differentiable (autograd keeps them, so memory cannot be used again) or traceable."""
    return torch.compiler.is_compiling() or torch.is_grad_enabled()


def table(positions: Tensor, difference: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency difference.

    Args:
        positions: [A, B or 1, S].
        difference: [B or 1, S or 1, F] float32, radians per token.
        layout: which frequency and which axis each of P pairs takes.

    Returns:
        Two tensors [B or 1, 1, S, P] float32.
    """
    if layout.frequencies is not None:
        difference = difference.index_select(-1, layout.frequencies.to(difference.device))
    if layout.axes is None or len(positions) == 1:
        places = positions[0, :, :, None]
    else:
        places = positions[layout.axes].permute(1, 2, 0)
    angles = places.float() * difference
    return angles.cos()[:, None], angles.sin()[:, None]


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

    eager: interface.Attention | None
    layout: Layout
    schedule: Schedule
    is_causal: bool
    dynamics: Dynamics

    def attend(
        self,
        attention: interface.Attention,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Attention in which each query meets the keys at the scale of its own length."""
        forward: Forward | None = options.pop(KEYWORD, None) if self.dynamics.by_keyword else self.dynamics.forward
        if forward is None:
            raise PatchError(
                "An attention layer with dynamic scaling ran outside of the forward of its model. Call the model, not "
                "its layers; if this is gradient checkpointing, train without it or patch with dynamic=False."
            )
        length, keys = query.shape[2], key.shape[2]
        compiling = torch.compiler.is_compiling()
        set_already = self.dynamics.level is not None  # the rotary modules turn by the fixed scale themselves
        if set_already or (self.is_causal and not compiling and forward.is_short(self.schedule)):
            return attention(module, query, key, value, mask, **options)
        if length == 1 or not self.is_causal:
            whole = not self.is_causal
            turned, near = self.turned_queries(forward, query, whole), self.turned_keys(forward, key, keys, 0, whole)
            return attention(module, turned, near, value, mask, **options)
        if compiling:
            return self.attend_compiled(forward, attention, module, query, key, value, mask, options)
        turned = self.turned_queries(forward, query, False)
        parts = []
        for begin, end, is_short in forward.runs(self.schedule):
            has_rows = mask is not None and not (torch.is_tensor(mask) and mask.dim() == 2)
            seen = keys if has_rows else min(forward.past(), keys - length) + end  # rows may let a token see later ones
            near = key[:, :, :seen]
            if not is_short:
                near = self.turned_keys(forward, near, keys, begin)
            part = blocks.mask_of_block(mask, begin, end, seen, attention, key)
            states = turned[:, :, begin:end], near, value[:, :, :seen]
            attend = attention if has_rows else functools.partial(blocks.attend_block, attention)
            parts.append(attend(module, *states, part, **options))
        return blocks.joined(parts, keys)

    def attend_compiled(
        self,
        forward: Forward,
        attention: interface.Attention,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """`attend` of several queries without a branch on values: keys turned for each query, in L times the memory.

        Long prompts are better read before the model is compiled; a compiled step of generation has one query.
        """
        length, keys = query.shape[2], key.shape[2]
        difference = forward.differences(self.schedule, False)[0]  # [B or 1, L, F]
        places = forward.key_positions(keys)  # [A, B or 1, S]
        batch = max(len(difference), places.shape[1])
        difference = difference.expand(batch, -1, -1).flatten(0, 1)[:, None]
        places = places.expand(-1, batch, -1).repeat_interleave(length, dim=1)
        cosine, sine = table(places, difference, self.layout)
        many = key.shape[0] // batch  # one row of positions may stand for all rows of the batch
        turned = turn(
            blocks.as_rows(key, length), cosine.repeat(many, 1, 1, 1), sine.repeat(many, 1, 1, 1), self.layout
        )
        if mask is None:
            mask = blocks.causal(length, keys, key.device)
        query = self.turned_queries(forward, query, False)
        return blocks.each_query_alone(attention, module, query, turned, value, mask, options)

    def turned_queries(self, forward: Forward, query: Tensor, whole: bool) -> Tensor:
        """Queries at the scale of their own length, or of their row's, with the temperature that goes with it."""
        cosine, sine = forward.query_table(self.schedule, self.layout, whole)
        cosine, sine = cosine.to(query.device), sine.to(query.device)
        if not self.schedule.scales_logits:
            return turn(query, cosine, sine, self.layout, forward.room(query, "queries"))
        logit = forward.differences(self.schedule, whole)[2].to(query.device)[:, None, :, None]
        exact = query.float() * logit  # channels without rotation too, rounded once together with the turn
        return turn(exact, cosine, sine, self.layout, forward.room(exact, "queries")).to(query.dtype)

    def turned_keys(self, forward: Forward, key: Tensor, keys: int, at: int, whole: bool = False) -> Tensor:
        """The first of the last `keys` keys as the token `at` reads them."""
        cosine, sine = forward.key_table(self.schedule, self.layout, keys, key.shape[2], whole, at)
        return turn(key, cosine.to(key.device), sine.to(key.device), self.layout, forward.room(key, "keys"))
