"""Where the tokens of one forward stand and how long their rows are now, as tensor arithmetic without a host sync.

Positions are those that the model is given. Those of cached tokens are noted in the cache as it is filled; where
nothing was noted (a cache that the model filled before it was patched) or where rows were moved without a note, they
follow from the attention mask and the positions of the new tokens, as those of any text without gaps do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MASK_OF_DICT = "full_attention"


@dataclass(frozen=True)
class Present:
    """The tokens of one forward.

    Attributes:
        positions: [A, B or 1, L] int64, on each position axis.
        past: tokens that the cache held before, an int or a 0-dim tensor.
        counted: [B or 1, W] bool, the slots that count towards a position and a length; None where all do.
        by_slot: [B or 1] bool, rows whose positions are slot numbers, padding included; None where all are.
        given: whether the model was given positions, which may then be others than slot numbers.
        noted: [A, B, past], positions of the cached tokens as they were noted when they were new; None where they
            have to follow from the first new one.
        follows: whether what was noted has followed every change of the cache's rows.
        fixed: [B] int64, lengths at which the rows are read whatever their tokens are; None where these decide.
    """

    positions: Tensor
    past: int | Tensor
    counted: Tensor | None
    by_slot: Tensor | None
    given: bool = False
    noted: Tensor | None = None
    follows: bool = False
    fixed: Tensor | None = None

    @property
    def tokens(self) -> int:
        """L, tokens of this forward."""
        return self.positions.shape[-1]

    @property
    def total(self) -> int | Tensor:
        """Slots in use once this forward has run."""
        return self.past + self.tokens

    def token_lengths(self) -> Tensor:
        """[B or 1, L] int64: tokens of each row up to and with each new one, without padding.

        Positions that are slot numbers say nothing about padding on the left, so there the unmasked slots are counted.
        Other positions (set for each row, packed documents, gaps) are one less than the length of their piece.
        """
        if self.fixed is not None:
            return self.fixed[:, None].expand(-1, self.tokens)
        reach = self.positions.amax(0) + 1
        if self.counted is None or self.by_slot is None:
            return reach
        used = self.at_slots(self.counted.cumsum(-1), self.slots(self.past, self.tokens))
        return torch.where(self.by_slot[:, None], used, reach)

    def row_lengths(self) -> Tensor:
        """[B or 1] int64: tokens of each row, padding on either side left out."""
        lengths = self.token_lengths()
        if self.counted is not None and self.fixed is None:
            lengths = torch.where(self.at_slots(self.counted, self.slots(self.past, self.tokens)), lengths, 0)
        return lengths.amax(-1)

    def padding(self) -> Tensor | None:
        """[B] int64: slots in front of the first token of each row that its positions count; None where all are 0."""
        if self.counted is None or self.by_slot is None:
            return None
        return torch.where(self.by_slot, self.counted.long().argmax(-1), 0)

    def key_positions(self, keys: int) -> Tensor:
        """[A, B or 1, S] int64: positions of the last S slots in use, of the first S where fewer are in use.

        These are the keys that a cache layer returns: all of them, those within its window, or its whole allocation.
        """
        if keys == self.tokens and isinstance(self.past, int) and self.past == 0:
            return self.positions
        start = self.total - keys
        start = max(start, 0) if isinstance(start, int) else start.clamp(min=0)
        if isinstance(self.past, int) and keys == self.total:
            cached = self.cached_positions(self.slots(0, self.past))
            return torch.cat((cached, self.positions.expand(*cached.shape[:2], -1)), dim=-1)
        slots = self.slots(start, keys)
        cached = self.cached_positions(slots)
        new = self.positions.index_select(-1, (slots - self.past).clamp(0, self.tokens - 1))
        return torch.where(slots < self.past, cached, new)

    def cached_positions(self, slots: Tensor) -> Tensor:
        """[A, B or 1, S] int64: positions at some slots before the new tokens.

        What was noted is believed where it has followed the rows of the cache, where it has several axes (which nothing
        else tells), and where the new tokens go on from it.
        """
        if self.noted is not None and (self.follows or len(self.noted) > 1):
            return self.at_slots(self.noted, slots)
        slot, position = self.anchor()
        derived = position[..., None] - self.distance(slots, slot)
        if self.noted is None or not self.noted.shape[-1]:
            return derived
        goes_on = self.noted[..., -1].amax(0) + 1 == self.positions[..., 0].amax(0)
        return torch.where(goes_on[:, None], self.at_slots(self.noted, slots), derived)

    def anchor(self) -> tuple[Tensor, Tensor]:
        """Slot [B or 1] and position [A, B or 1] of the first new token of each row, padding left out."""
        if self.counted is None:
            return self.slots(self.past, 1), self.positions[..., 0]
        valid = self.at_slots(self.counted, self.slots(self.past, self.tokens))
        first = valid.long().argmax(-1)
        batch = max(len(first), self.positions.shape[1])
        places = self.positions.expand(-1, batch, -1)
        index = first.expand(batch)[None, :, None].expand(len(places), -1, 1)
        return first + self.past, places.gather(-1, index)[..., 0]

    def distance(self, slots: Tensor, anchor: Tensor) -> Tensor:
        """[B or 1, S] int64: how far before the token at slot `anchor` [B or 1] the tokens at some slots stand."""
        plain = anchor[:, None] - slots
        if self.counted is None or self.by_slot is None:
            return plain
        before = torch.nn.functional.pad(self.counted.cumsum(-1), (1, 0))  # counted slots before each slot
        ahead = before.gather(-1, anchor.expand(len(before))[:, None].clamp(max=before.shape[-1] - 1))
        return torch.where(self.by_slot[:, None], plain, ahead - self.at_slots(before, slots))

    def slots(self, start: int | Tensor, count: int) -> Tensor:
        """[count] int64: consecutive slot numbers."""
        return torch.arange(count, device=self.positions.device) + start

    @staticmethod
    def at_slots(values: Tensor, slots: Tensor) -> Tensor:
        """Values [..., W] at slots [S]; those past the end read as the last one."""
        return values.index_select(-1, slots.clamp(0, values.shape[-1] - 1))


def present(position_ids: Tensor | None, attention_mask: Any, past: int | Tensor, states: Tensor) -> Present:
    """Reads the arguments of a forward.

    Args:
        position_ids: [B or 1, L], or [A, B, L] with several axes (a leading text axis of four is left out); None where
            the model numbers slots.
        attention_mask: [B, W] of zeros and ones, [B, 1, L, W] additive or bool, a dict of these by layer type, or None.
        past: tokens in the cache.
        states: [B, L, ...], ids or embeddings, for the number of tokens and the device.
    """
    length, device = states.shape[1], states.device
    slots = torch.arange(length, device=device) + past
    if position_ids is None:
        positions, by_slot = slots[None, None], None
    else:
        positions = position_ids if position_ids.dim() == 3 else position_ids.reshape(1, -1, length)
        positions = positions[-3:].to(device)
        by_slot = positions[0] == slots
    given = position_ids is not None
    counted = counted_slots(attention_mask)
    if counted is None:
        return Present(positions, past, None, None, given)
    counted = counted.to(device)
    if by_slot is None:
        return Present(positions, past, counted, torch.ones(1, dtype=torch.bool, device=device), given)
    valid = Present.at_slots(counted, slots)
    return Present(positions, past, counted, (by_slot | ~valid).all(-1), given)


def counted_slots(attention_mask: Any) -> Tensor | None:
    """[B, W] bool: slots with a token that some token sees; None where the mask does not say it for every slot."""
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get(MASK_OF_DICT)
    if not torch.is_tensor(attention_mask):
        return None
    if attention_mask.dim() == 2:
        return attention_mask != 0
    if attention_mask.dim() != 4:
        return None
    seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
    return seen.flatten(1, 2).any(1)
