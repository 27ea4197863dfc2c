"""What a model is fed for one row, and how rows become a batch.

Without an `attention_mask`, transformers takes positions that jump for packed documents, none of which sees another.
So packed rows come without one, and all rows beside them are of their length; any other row comes with one. Only a
model that keeps no cache looks for documents: `use_cache=False`, as `Trainer` sets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_posext.evaluation.masking import Frame
from hf_posext.training.positions import Positions, generator_of, pose_positions, randomized_positions

Ids = NDArray[np.int64]
IGNORED = -100  # what transformers leaves out of the loss
KEPT, REPLACED = 0.1, 0.1  # of the tokens that a masked LM is asked for


@dataclass(frozen=True)
class RowWriter:
    """Writes rows from the tokens of their pieces.

    Attributes:
        frame: special tokens around each piece.
        positions: as `DataConfig.positions`.
        chunks: pieces of a row with `pose`.
        target_length: T in tokens.
        seed: of every draw.
        vocabulary: ids that stand in for a masked one now and then, int64 [ids]; None for a causal LM.
        mask_share: of a masked LM: share of the tokens that are asked for.
        first_position: position of the first token of a row.
    """

    frame: Frame
    positions: str
    chunks: int
    target_length: int
    seed: int
    vocabulary: Ids | None = None
    mask_share: float = 0.0
    first_position: int = 0

    def write(self, index: int, bodies: Sequence[Tensor], *, is_short: bool) -> dict[str, list[int]]:
        """One row.

        Args:
            index: of the row, which decides its draws.
            bodies: tokens of its pieces, each int64 [tokens].
            is_short: whether its positions are 0, 1, 2, ... whatever those of other rows are.

        Returns:
            `input_ids` and `labels`, -100 where nothing is predicted; `position_ids` where they are not 0, 1, 2, ...
        """
        pieces = [self.frame.around(body).numpy() for body in bodies]
        ids = np.concatenate(pieces)
        fed, labels = ids, unscored_starts(pieces)
        if self.vocabulary is not None:
            fed, labels = self.masked(index, ids, self.vocabulary)
        row = {"input_ids": fed.tolist(), "labels": labels.tolist()}
        if len(pieces) > 1:
            row["position_ids"] = np.concatenate(
                [self.first_position + np.arange(len(piece)) for piece in pieces]
            ).tolist()
        elif self.positions in ("pose", "randomized") and not is_short:
            row["position_ids"] = (self.spread(index, len(ids)) + self.first_position).tolist()
        return row

    def spread(self, index: int, length: int) -> Positions:
        """Positions of a row that reaches up to T."""
        generator = generator_of(self.seed, "positions", index)
        if self.positions == "pose":
            return pose_positions(length, self.target_length, chunks=self.chunks, generator=generator)
        return randomized_positions(length, self.target_length, generator=generator)

    def masked(self, index: int, ids: Ids, vocabulary: Ids) -> tuple[Ids, Ids]:
        """What a masked LM is fed, and what it is asked for.

        Of the tokens that it is asked for 80 % are replaced by the mask token, 10 % by another one and 10 % are kept.

        Returns:
            Token ids and labels, both int64 [L].

        Source: Devlin et al. 2019 (arXiv 1810.04805), appendix A.1.
        """
        generator = generator_of(self.seed, "masks", index)
        asked = (generator.random(len(ids)) < self.mask_share) & ~np.isin(ids, self.frame.special)
        others, way = generator.choice(vocabulary, len(ids)), generator.random(len(ids))
        shown = np.where(way < KEPT, ids, np.where(way < KEPT + REPLACED, others, self.frame.mask))
        return np.where(asked, shown, ids), np.where(asked, ids, IGNORED)


def unscored_starts(pieces: Sequence[Ids]) -> Ids:
    """Labels of a causal LM, int64 [L]: every token but the first of each piece, which nothing predicts."""
    labels = np.concatenate(pieces)
    labels[np.cumsum([0, *map(len, pieces[:-1])])] = IGNORED
    return labels


@dataclass(frozen=True)
class Collator:
    """Makes a batch of rows.

    Attributes:
        padding: token id that a row is filled up with, on the right.
        may_pack: whether rows may hold several documents; they are all of one length then.
        first_position: position of the first token of a row.
    """

    padding: int
    may_pack: bool
    first_position: int = 0

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """The rows as tensors [B, L]; no `attention_mask` where they may be packed, else always one.

        `position_ids` are there where a row of the batch has some.
        """
        batch = {
            "input_ids": padded([row["input_ids"] for row in rows], self.padding),
            "labels": padded([row["labels"] for row in rows], IGNORED),
        }
        if not self.may_pack:
            batch["attention_mask"] = padded([[1] * len(row["input_ids"]) for row in rows], 0)
        if any("position_ids" in row for row in rows):
            batch["position_ids"] = padded([self.positions(row) for row in rows], 0)
        return batch

    def positions(self, row: dict[str, Any]) -> Sequence[int]:
        """Positions of a row, which has none of its own where they are consecutive."""
        return row.get("position_ids", range(self.first_position, self.first_position + len(row["input_ids"])))


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """The rows as int64 [B, L], filled up on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)
