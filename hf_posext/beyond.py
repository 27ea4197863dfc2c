"""Which tokens of a forward are beyond N, as the patch itself counts them, in the shape of what a layer gives out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_posext.attention.present import Present
from hf_posext.attention.reading import Forward
from hf_posext.errors import PatchError
from hf_posext.tables import RowChoice


@dataclass
class Beyond:
    """Which tokens of one forward are beyond N.

    Attributes:
        mask: [B, L] bool.
        by_row: whether all tokens of a row are alike.
        is_none: whether it is known that no token is.
        is_all: whether it is known that all are.
    """

    mask: Tensor
    by_row: bool
    is_none: bool = False
    is_all: bool = False

    def is_off(self) -> bool:
        """Whether an adapter can be left out; a loss needs its zeros, or a batch of short rows would have no graph."""
        return self.is_none and not torch.is_grad_enabled()

    def fitted(self, output: Tensor, kept: Any, axis: int) -> Tensor:
        """The mask in the shape of what a layer gives out, to be broadcast with it.

        Args:
            output: [B, L, ...] or [B, H, L, ...], [B * L, ...] where tokens stand in one row, or [B, ...] where rows
                decide.
            kept: the tokens that a head is asked for, as `logits_to_keep` of transformers; 0 for all.
            axis: of the tokens, 2 behind heads.

        Raises:
            PatchError: an output of another shape.
        """
        mask, shape = kept_tokens(self.mask, kept).to(output.device), output.shape
        rows = self.mask[:, 0].to(output.device)
        if axis == 2 and mask.shape == (shape[0], shape[2]):
            mask = mask[:, None]
        elif mask.shape == shape[: mask.dim()]:
            pass
        elif output.dim() == 2 and mask.numel() == len(output):
            mask = mask.flatten()
        elif self.by_row and len(rows) == len(output):
            mask = rows
        else:
            raise PatchError(
                f"An adapted layer gives out {list(shape)} for a text of {list(mask.shape)} tokens, so it is not known "
                "which of its rows are beyond the trained length. Leave the layer out of the adapter "
                "(`exclude_modules`), or call `ungate_adapter`."
            )
        return mask.reshape(*mask.shape, *[1] * (output.dim() - mask.dim()))


def kept_tokens(mask: Tensor, kept: Any) -> Tensor:
    """What transformers keeps of a text [B, L] in front of the head: the last tokens, or those of some places."""
    if isinstance(kept, int):
        return mask[:, -kept:]
    if kept.dim() < 2:
        return mask[:, kept]
    return mask[kept] if kept.dtype == torch.bool else mask.gather(1, kept)


def places(reader: RowChoice, forward: Forward, states: Tensor) -> Tensor:
    """[B or 1, L] int64: where the tokens of a forward stand, by what the model numbers them from."""
    now: Present = forward.now
    if now.given:
        return now.positions.amax(0) - reader.first
    if reader.by_mask and now.counted is not None:
        return now.at_slots(now.counted.cumsum(-1), now.slots(now.past, now.tokens)) - 1
    if reader.padding is not None and not states.is_floating_point():
        return (states != reader.padding).cumsum(-1) + now.past - 1
    return now.positions.amax(0)


def check_rows(beyond: Beyond, is_long: Tensor | None) -> None:
    """Demands that the rows with the adapter are those that were read with the new table.

    Raises:
        PatchError: they are not, since the model numbers padding otherwise than is known.
    """
    if is_long is not None and not torch.equal(is_long.expand(len(beyond.mask)), beyond.mask[:, 0]):
        raise PatchError(
            "The model numbers the positions of a padded batch in a way that the gate of its adapter does not know. "
            "Read rows of one length without padding, or call `ungate_adapter`."
        )
