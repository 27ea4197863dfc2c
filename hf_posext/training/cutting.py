"""Which tokens of which documents make up each row: arithmetic on lengths, no token and no model.

A **body** is a document without the special tokens around it; a **piece** is a part of a body, which a row holds with
special tokens around it. Only rows that are packed, or short, hold more than one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hf_posext.training.positions import generator_of, random_lengths


class Piece(NamedTuple):
    """Tokens of one document, next to each other."""

    document: int
    """Its index."""
    start: int
    """Index of the first token in the body."""
    stop: int
    """Index after the last one; an empty piece is special tokens only, and fills the end of a row."""


@dataclass(frozen=True)
class Row:
    """What one row holds, in order."""

    pieces: tuple[Piece, ...]
    is_short: bool = False
    """Whether it is one of the rows that hold text of N tokens only."""

    @property
    def text_tokens(self) -> int:
        """Tokens of documents."""
        return sum(piece.stop - piece.start for piece in self.pieces)


@dataclass(frozen=True)
class Cutter:
    """Cuts documents into rows.

    Attributes:
        length: tokens of a row, of the longest one where lengths vary.
        short_length: tokens of text in a short row at most, N.
        around: special tokens around each piece.
        seed: of every draw.
        shortest: tokens of the shortest row where lengths vary; None where they do not.
        packs: whether a row goes on with the next document where one ends.
        splits: whether a short row is as long as the others and holds several pieces; else it is one piece.
    """

    length: int
    short_length: int
    around: int
    seed: int
    shortest: int | None = None
    packs: bool = False
    splits: bool = False

    def rows(self, counts: Iterable[int]) -> Iterator[Row]:
        """Rows in the order of the documents; none is read before its row is wanted.

        Args:
            counts: tokens of each body.
        """
        return self._packed(counts) if self.packs else self._windows(counts)

    def shortened(self, row: Row) -> Row:
        """The row with text of N tokens only; where it is split, as many tokens as before, some of them special."""
        body = self.short_length - self.around
        if not self.splits:
            (piece,) = row.pieces
            return Row((piece._replace(stop=min(piece.stop, piece.start + body)),), is_short=True)
        parts = [
            Piece(piece.document, start, min(start + body, piece.stop))
            for piece in row.pieces
            for start in range(piece.start, max(piece.stop, piece.start + 1), body)
        ]
        return Row(tuple(self._filling(parts)), is_short=True)

    def _filling(self, parts: list[Piece]) -> Iterator[Piece]:
        """As many of the parts as a row holds, the last one cut."""
        room = self.length
        for part in parts:
            stop = min(part.stop, part.start + room - self.around)
            yield part._replace(stop=stop)
            room -= stop - part.start + self.around
            if not room:
                return

    def _windows(self, counts: Iterable[int]) -> Iterator[Row]:
        """Windows next to each other in one document; what is left of it is divided at random between both ends."""
        for document, count in enumerate(counts):
            generator = generator_of(self.seed, "cut", document)
            sizes = [self.length - self.around] * (count // (self.length - self.around))
            if self.shortest is not None:
                bounds = {"shortest": self.shortest - self.around, "longest": self.length - self.around}
                sizes = random_lengths(count, **bounds, generator=generator)
            start = int(generator.integers(count - sum(sizes), endpoint=True))
            for size in sizes:
                yield Row((Piece(document, start, start + size),))
                start += size

    def _packed(self, counts: Iterable[int]) -> Iterator[Row]:
        """Rows filled with one document after the other; one that is cut goes on in the next row as a new document."""
        pieces: list[Piece] = []
        room = self.length
        for document, count in enumerate(counts):
            start = 0
            while start < count:
                stop = min(count, start + room - self.around)
                pieces.append(Piece(document, start, stop))
                room -= stop - start + self.around
                start = stop
                if not room:
                    yield Row(tuple(pieces))
                    pieces, room = [], self.length
