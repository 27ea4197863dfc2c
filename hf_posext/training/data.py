"""The rows that a fine-tuning run reads: documents are tokenised, cut, and written one row at a time.

Tokens are kept once, by `datasets`, which also caches them; rows are references into them, written when asked for. All
that is drawn follows from the seed and the index of a row, so a run that goes on reads what it would have read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_posext.errors import unknown
from hf_posext.evaluation.documents import read_documents, resolve_bos
from hf_posext.evaluation.masking import Frame, frame_of
from hf_posext.training.config import DataConfig
from hf_posext.training.cutting import Cutter, Piece, Row
from hf_posext.training.positions import generator_of
from hf_posext.training.rows import Collator, RowWriter
from hf_posext.training.sources import load_documents

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

__all__ = ["Rows", "load_documents", "training_rows"]

BATCH = 64  # documents that are tokenised at a time; a document may be a book
NO_MASK = -1  # a causal LM is asked for every token, so none is masked
REACHING = ("pose", "randomized")  # positions by which rows of N tokens reach up to T


@dataclass(frozen=True)
class Rows:
    """What a run reads. The numbers are None where documents are streamed, and so not known before they are read.

    Attributes:
        dataset: rows as dicts with `input_ids`, `labels` and, where positions are not 0, 1, 2, ..., `position_ids`.
        collate: makes a batch of tensors of a list of rows.
        documents: how many were read.
        skipped: indices of those of which no token is in a row, as a rule because they are shorter than one.
        windows: how many rows there are.
        tokens: in all rows, special tokens included.
        dropped_tokens: tokens of documents that are in no row.
    """

    dataset: torch.utils.data.Dataset
    collate: Collator
    documents: int | None = None
    skipped: tuple[int, ...] | None = None
    windows: int | None = None
    tokens: int | None = None
    dropped_tokens: int | None = None


class RowDataset(torch.utils.data.Dataset):
    """Rows of documents that are all known, in any order."""

    def __init__(self, bodies: Dataset, rows: Sequence[Row], writer: RowWriter) -> None:
        self.bodies, self.rows, self.writer = bodies.with_format("numpy"), rows, writer

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.rows[index]
        return self.writer.write(index, [self.text(piece) for piece in row.pieces], is_short=row.is_short)

    def text(self, piece: Piece) -> Tensor:
        """Its tokens, int64 [tokens]."""
        body = self.bodies[piece.document]["body"][piece.start : piece.stop]
        return torch.from_numpy(body.astype(np.int64))


class RowStream(torch.utils.data.IterableDataset):
    """Rows of documents that are read one after the other; no more of them is held than one row needs.

    Several workers of a data loader share the rows, and each of them reads all documents.
    """

    def __init__(
        self, documents: IterableDataset, tokenizer: Any, config: DataConfig, cutter: Cutter, writer: RowWriter
    ):
        self.documents, self.tokenizer, self.config = documents, tokenizer, config
        self.cutter, self.writer = cutter, writer

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        worker = torch.utils.data.get_worker_info()
        mine, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        held: dict[int, Tensor] = {}
        counts: list[int] = []
        index = -1
        for index, row in enumerate(self.cutter.rows(self.counted(held, counts))):
            if index % step == mine:
                if generator_of(self.config.seed, "short", index).random() < self.config.short_fraction:
                    row = self.cutter.shortened(row)
                yield self.writer.write(
                    index, [held[each.document][each.start : each.stop] for each in row.pieces], is_short=row.is_short
                )
            for done in [document for document in held if document < row.pieces[-1].document]:
                del held[done]
        if index < 0:
            raise no_row(counts, self.cutter)

    def counted(self, held: dict[int, Tensor], counts: list[int]) -> Iterator[int]:
        """Tokens of one document after the other, which is put into `held` first; `counts` keeps how many there are."""
        for batch in self.documents.iter(batch_size=1):
            cells = batch[column_of(batch, self.config.text_column)]
            (body,) = bodies(cells, [len(counts)], tokenizer=self.tokenizer, frame=self.writer.frame)["body"]
            held[len(counts)] = torch.from_numpy(body).long()
            counts.append(len(body))
            yield len(body)
            if not self.cutter.packs:
                held.clear()  # all windows of a document are cut before the next one is asked for


def training_rows(
    documents: Iterable[Any],
    tokenizer: Any,
    config: DataConfig,
    *,
    trained_length: int,
    target_length: int,
    is_masked: bool,
    first_position: int = 0,
) -> Rows:
    """The rows of a run, never of two documents unless they are packed.

    A row has the special tokens that the evaluation gives a window: the BOS that the tokenizer adds, or what it puts
    around a text for a masked LM. They count towards its length and are not scored.

    Args:
        documents: as `perplexity` takes them, also a stream.
        tokenizer: of the model; may be None for a causal LM where documents are token ids.
        config: how they are cut.
        trained_length: N in tokens.
        target_length: T in tokens.
        is_masked: whether the model is a masked LM.
        first_position: position of the first token where the model counts from another number than 0.

    Raises:
        TypeError: no documents, or one of no known kind.
        ValueError: lengths that cannot be, an unknown column, or no document that is long enough.
    """
    from datasets import IterableDataset

    frame = frame_of(tokenizer) if is_masked else causal_frame(tokenizer)
    cutter = cutter_for(config, frame, trained_length, target_length, is_masked=is_masked)
    vocabulary = np.setdiff1d(np.arange(len(tokenizer)), frame.special) if is_masked else None
    spread = (config.positions, config.chunks, target_length, config.seed)
    writer = RowWriter(frame, *spread, vocabulary, config.mask_share, first_position)
    collate = Collator(padding_of(tokenizer), config.positions == "full" and not is_masked, first_position)
    if isinstance(documents, IterableDataset):
        documents = documents if config.max_documents is None else documents.take(config.max_documents)
        return Rows(RowStream(documents, tokenizer, config, cutter, writer), collate)
    found = tokenized(documents, tokenizer, config, frame)
    counts = list(found["tokens"])
    rows = with_short(list(cutter.rows(counts)), cutter, config)
    if not rows:
        raise no_row(counts, cutter)
    text = sum(row.text_tokens for row in rows)
    return Rows(
        dataset=RowDataset(found, rows, writer),
        collate=collate,
        documents=len(counts),
        skipped=tuple(sorted(set(range(len(counts))) - {piece.document for row in rows for piece in row.pieces})),
        windows=len(rows),
        tokens=text + sum(len(row.pieces) for row in rows) * frame.size,
        dropped_tokens=sum(counts) - text,
    )


def cutter_for(config: DataConfig, frame: Frame, trained_length: int, target_length: int, *, is_masked: bool) -> Cutter:
    """How documents are cut.

    Raises:
        ValueError: names the key, what came and what is allowed.
    """
    reaches, varies = config.positions in REACHING, config.positions == "random_length"
    length = config.length or (trained_length if reaches else target_length)
    if length > target_length or (reaches and length == target_length):
        bound = f"less than the target length {target_length} with positions: {config.positions}"
        bound = bound if reaches else f"at most the target length {target_length}"
        raise ValueError(f"`data.length` must be {bound}, got {length}. Lower it, or patch with a larger factor.")
    shortest = (config.shortest or trained_length) if varies else None
    least = min(length, trained_length, shortest or length)
    if least <= frame.size:
        raise ValueError(
            f"A row must have more than its {frame.size} special tokens, got {least}. Raise `data.length`."
        )
    if shortest is not None and shortest > length:
        raise ValueError(f"`data.shortest` must be at most the {length} tokens of a row, got {shortest}. Lower it.")
    if config.positions == "pose" and config.chunks > length:
        raise ValueError(f"`data.chunks` must be at most the {length} tokens of a row, got {config.chunks}. Lower it.")
    if config.packing and is_masked:
        raise ValueError("`data.packing` goes with causal models only, and this is a masked LM. Leave it out.")
    splits = config.positions == "full" and not is_masked
    return Cutter(length, trained_length, frame.size, config.seed, shortest, packs=config.packing, splits=splits)


def causal_frame(tokenizer: Any) -> Frame:
    """The BOS that the evaluation puts in front of a window, where there is one."""
    bos, _ = resolve_bos("auto", "tail", tokenizer)
    return Frame(() if bos is None else (bos,), (), NO_MASK, ())


def padding_of(tokenizer: Any) -> int:
    """The id that rows are filled up with: of the padding token, else of the EOS, else 0."""
    named = [getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")]
    return next((token for token in named if token is not None), 0)


def tokenized(documents: Iterable[Any], tokenizer: Any, config: DataConfig, frame: Frame) -> Dataset:
    """Bodies and their numbers of tokens, in the columns `body` and `tokens`; from the cache where they are in it."""
    from datasets import Dataset

    if isinstance(documents, Dataset):
        most = len(documents) if config.max_documents is None else min(config.max_documents, len(documents))
        source = documents.select(range(most))
    elif isinstance(documents, list) and documents and all(isinstance(document, str) for document in documents):
        source = Dataset.from_dict({config.text_column: documents[: config.max_documents]})
    else:
        read = read_documents(documents, tokenizer, text_column=config.text_column, max_documents=config.max_documents)
        source = Dataset.from_dict({"input_ids": [ids.numpy() for ids in read]})
    return source.with_format(None).map(
        bodies,
        batched=True,
        batch_size=BATCH,
        writer_batch_size=BATCH,
        with_indices=True,
        input_columns=column_of(source.column_names, config.text_column),
        remove_columns=source.column_names,
        num_proc=config.workers,
        fn_kwargs={"tokenizer": tokenizer, "frame": frame},
        desc="Tokenising",
    )


def column_of(names: Iterable[str], text_column: str) -> str:
    """Where the documents are: token ids before text.

    Raises:
        ValueError: there is no such column, with the nearest one.
    """
    names = list(names)
    if "input_ids" in names:
        return "input_ids"
    if text_column not in names:
        raise ValueError(unknown("column", text_column, names) + " Name it with `data.text_column`.")
    return text_column


def bodies(cells: Sequence[Any], indices: Sequence[int], *, tokenizer: Any, frame: Frame) -> dict[str, list[Any]]:
    """Tokens of documents without the special tokens around them, which each row gets again.

    Args:
        cells: texts or lists of token ids.
        indices: of the documents, for messages.
        tokenizer: of the model.
        frame: what each row gets.

    Returns:
        `body`, each int32 [tokens], and `tokens`, how many.

    Raises:
        TypeError, ValueError: no text and no token ids.
    """
    try:
        read = read_documents(list(cells), tokenizer)
    except (TypeError, ValueError) as error:
        raise type(error)(f"Counted from document {indices[0]}: {error}") from error
    found = [frame.strip(ids).numpy().astype(np.int32) for ids in read]
    return {"body": found, "tokens": [len(body) for body in found]}


def with_short(rows: list[Row], cutter: Cutter, config: DataConfig) -> list[Row]:
    """The rows, a share of which are short: as many as the share says to the nearest row, drawn with the seed."""
    count = round(config.short_fraction * len(rows))
    short = set(generator_of(config.seed, "short", 0).permutation(len(rows))[:count].tolist())
    return [cutter.shortened(row) if index in short else row for index, row in enumerate(rows)]


def no_row(counts: Sequence[int], cutter: Cutter) -> ValueError:
    """What is said where the documents make no row."""
    way = "Give more text" if cutter.packs else "Give longer documents, set packing: true for a causal model"
    return ValueError(
        f"The {len(counts)} documents make no row of {cutter.shortest or cutter.length} tokens: the longest has "
        f"{max(counts, default=0)}, and each row {cutter.around} special ones. {way}, or lower `data.length`."
    )
