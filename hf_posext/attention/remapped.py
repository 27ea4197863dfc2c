"""The adapter that reads distances beyond a window as other ones: SelfExtend, ReRoPE, leaky ReRoPE.

Queries and keys arrive rotated by their true positions, and rotations compose: turned on by the difference between
mapped and true position they are what they would be at the mapped one. So each call has two views of its queries and
keys, one for distances within the window and one for those beyond; in bidirectional attention a third one of queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posext.attention import blocks, masks
from hf_posext.attention.growing import made_of
from hf_posext.attention.interface import Attended, Call
from hf_posext.attention.layout import Layout
from hf_posext.attention.reading import Forward, Reader
from hf_posext.attention.remap import selected, three_regions, two_regions
from hf_posext.attention.turning import table, turn
from hf_posext.contract import Remap
from hf_posext.errors import PatchError


@dataclass
class Remapped:
    """What one attention module does with distances beyond the window.

    Attributes:
        reader: tells where the tokens stand.
        is_causal: whether the module sees only earlier tokens.
        remap: the map.
        layout: channel pairs of its heads.
        inv_freq: [F] float64 on the CPU, radians per token, by which it rotates.
        layer: index of its layer in a cache.
    """

    reader: Reader
    is_causal: bool
    remap: Remap
    layout: Layout
    inv_freq: Tensor
    layer: int | None

    def attend(self, call: Call) -> Attended:
        """As `Call.run`, with mapped distances."""
        forward, call = self.reader.of(call)
        if self.is_within_window(call, forward):
            return call.run()
        call = masks.in_one_dtype(call)
        if call.options.get("position_bias") is not None:
            raise PatchError(
                f"{type(call.module).__name__} adds a bias of its own by position, which mapped distances would not "
                "reach."
            )
        plain = masks.is_plain(call, forward, self.is_causal)
        parts = [
            self.attend_run(call, forward, begin, end, groups, plain) for begin, end, groups in self.runs(call, forward)
        ]
        return blocks.joined(parts, call.key.shape[2])

    def is_within_window(self, call: Call, forward: Forward) -> bool:
        """Whether no distance of a call reaches the window; False where that would have to be asked of a device."""
        if torch.compiler.is_compiling() or (self.remap.logn and not self.is_short(call, forward)):
            return False
        if self.remap.follows and self.is_ungrouped(forward):
            return True
        reach = call.options.get("sliding_window") or getattr(call.module, "sliding_window", None)
        if reach is not None and reach <= self.remap.window:
            return True
        return call.key.shape[2] <= self.remap.window and masks.is_gapless(call, forward)

    def is_short(self, call: Call, forward: Forward) -> bool:
        """Whether no query stands beyond N, so that none of its logits grows; waits for a device."""
        places = masks.places(call, forward)[0]
        return forward.remembered(f"short {self.remap}", lambda: bool((places < self.remap.trained_length).all()))

    def is_ungrouped(self, forward: Forward) -> bool:
        """Whether the text fits into N, so that every group is one token; waits for a device."""
        return forward.remembered(f"ungrouped {self.remap}", lambda: bool((self.groups_of(forward) == 1).all()))

    def runs(self, call: Call, forward: Forward) -> list[tuple[int, int, Tensor | None]]:
        """Blocks of queries with one group size in each row: begin, end, sizes [B or 1] (None: the map has none)."""
        length = call.query.shape[2]
        if not self.remap.follows:
            return [(0, length, torch.tensor([self.remap.group]) if self.remap.group else None)]
        groups = self.groups_of(forward)
        if not self.is_causal or length == 1:
            return [(0, length, groups[:, 0])]
        if torch.compiler.is_compiling():
            raise PatchError(
                'A compiler cannot follow `group_size="dynamic"`, whose blocks depend on the text. Give a number.'
            )
        return [(begin, end, groups[:, begin]) for begin, end, _ in blocks.runs(groups)]

    def groups_of(self, forward: Forward) -> Tensor:
        """`groups`, computed once in a forward."""
        return forward.remembered(f"groups {self.remap}", lambda: self.groups(forward))

    def groups(self, forward: Forward) -> Tensor:
        """[B or 1, L] int64: the smallest group size with which the text up to each token fits into N."""
        window, trained = self.remap.window, self.remap.trained_length
        lengths = forward.now.token_lengths() if self.is_causal else forward.now.row_lengths()[:, None]
        return (-((window - lengths) // (trained - window))).clamp(min=1)  # minus the floor of a negative: the ceiling

    def attend_run(
        self, call: Call, forward: Forward, begin: int, end: int, groups: Tensor | None, plain: bool
    ) -> Attended:
        """The answer for queries begin to end."""
        scale, window = masks.scale_of(call), self.remap.window
        query_places, key_places = masks.places(call, forward)
        query_places = query_places[:, begin:end]
        query = self.with_logn(call.query[:, :, begin:end], query_places)
        keys = call.key.shape[2]
        seen = keys - call.query.shape[2] + end if plain and self.is_causal else keys
        key, value = call.key[:, :, :seen], call.value[:, :, :seen]
        far_query = self.turned(query, forward, groups, 1, begin)
        far_key = self.far_keys(call, forward, groups, seen, plain and end > begin + 1)
        right = None if self.is_causal else self.turned(query, forward, groups, -1, begin)
        if plain and right is None:
            output = two_regions(query, key, far_query, far_key, value, window, scale)
        elif plain and right is not None:
            output = three_regions(query, key, far_query, right, far_key, value, window, scale)
        else:
            mask = masks.additive(call, self.is_causal)
            output, weights = selected(
                query,
                key,
                far_query,
                far_key,
                value,
                scale,
                lambda first, last: query_places[:, first:last, None] - key_places[:, None, :],
                lambda first, last: mask(begin + first, begin + last),
                window,
                right_query=right,
                cap=call.options.get("softcap") if masks.is_eager(call) else None,
                sinks=call.options.get("s_aux") if masks.is_eager(call) else None,
                dropout=masks.dropout_of(call),
                weights=masks.is_eager(call),
            )
            return output.transpose(1, 2).contiguous(), weights
        return output.transpose(1, 2).contiguous(), None

    def mapped(self, places: Tensor, groups: Tensor | None) -> Tensor:
        """f(p), float64, of the shape of `places` [A, B or 1, S]."""
        if groups is None:
            return places.double() * self.remap.rate
        return (places // groups.to(places.device)[None, :, None]).double()

    def shift(self, groups: Tensor | None) -> Tensor:
        """W - f(W), float64 [1, B or 1, 1]."""
        window = torch.full((1, 1, 1), self.remap.window)
        return window - self.mapped(window, groups)

    def turned(self, query: Tensor, forward: Forward, groups: Tensor | None, side: int, begin: int) -> Tensor:
        """Queries from `begin` as they meet keys beyond the window, before (side 1) or behind (side -1) them."""
        places = forward.in_row(forward.now.positions)[..., begin : begin + query.shape[2]]
        delta = self.mapped(places, groups) + side * self.shift(groups).to(places.device) - places
        return self.turn(query, delta, forward, f"queries {side} {begin} {query.shape[2]}", groups)

    def far_keys(self, call: Call, forward: Forward, groups: Tensor | None, seen: int, is_prompt: bool) -> Tensor:
        """The first keys as queries beyond the window meet them; those of a cache are turned once for all steps."""
        places = forward.in_row(forward.key_positions(call.key.shape[2]))

        def make(begin: int, end: int) -> Tensor:
            here = places[..., begin:end]
            name = f"keys {begin} {end} {call.key.shape[2]}"
            return self.turn(call.key[:, :, begin:end], self.mapped(here, groups) - here, forward, name, groups)

        if is_prompt or torch.compiler.is_compiling():
            return make(0, max(seen - self.remap.window, 0) if is_prompt and self.is_causal else seen)
        kind = self.remap, None if groups is None else tuple(groups.tolist())
        return made_of(
            forward.cache, self.layer, call.key, "remapped", kind, lambda begin: make(begin, call.key.shape[2])
        )[:, :, :seen]

    def turn(self, states: Tensor, delta: Tensor, forward: Forward, name: str, groups: Tensor | None) -> Tensor:
        """States turned on by so many positions, [A, B or 1, S] float64."""

        def tables() -> tuple[Tensor, Tensor]:
            return table(delta, self.inv_freq.to(delta.device)[None, None], self.layout)

        if torch.compiler.is_compiling():
            cosine, sine = tables()
        else:
            which = None if groups is None else tuple(groups.tolist())
            cosine, sine = forward.remembered((name, self.layout.name, which, self.remap, id(self.inv_freq)), tables)
        return turn(states, cosine.to(states.device), sine.to(states.device), self.layout)

    def with_logn(self, query: Tensor, places: Tensor) -> Tensor:
        """Queries times max(1, ln(p + 1) / ln N), where that is asked for.

        Source: Su, kexue.fm/archives/8823; as in the code of ReRoPE.
        """
        if not self.remap.logn:
            return query
        factor = ((places.clamp(min=0) + 1).float().log() / math.log(self.remap.trained_length)).clamp(min=1)
        return (query.float() * factor[:, None, :, None]).to(query.dtype)
