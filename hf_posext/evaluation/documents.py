"""Reads documents of every accepted kind as token ids, and decides which BOS a protocol puts in front of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hf_posext.arguments import check_choice
from hf_posext.errors import unknown

BOS = ("auto", "none", "every")
KINDS = "a string, a list or 1-D array of token ids, a dict with `input_ids`, or a row of a dataset"


def read_documents(
    documents: Iterable[Any], tokenizer: Any = None, *, text_column: str = "text", max_documents: int | None = None
) -> list[Tensor]:
    """Token ids of each document, without special tokens, never truncated and never joined.

    Args:
        documents: strings, lists or 1-D arrays of token ids, dicts with `input_ids`, or a `datasets` dataset, also a
            streaming one. Rows that have `input_ids` are taken as tokenised already; others are read at `text_column`.
        tokenizer: a transformers tokenizer; may be None where documents are token ids.
        text_column: column or key that holds the text.
        max_documents: stop after as many; no more are drawn from a stream.

    Returns:
        One int64 tensor [tokens] per document.

    Raises:
        TypeError: something that is no list of documents, or a document of no known kind.
        ValueError: no documents, an unknown column, or text without a tokenizer.
    """
    if isinstance(documents, str | Mapping) or not isinstance(documents, Iterable):
        hint = f"choose one of its parts: {', '.join(map(repr, documents))}" if isinstance(documents, Mapping) else ""
        raise TypeError(
            f"`documents` must be a list of documents or a dataset, got one {type(documents).__name__}: "
            f"{hint or 'put it in a list'}."
        )
    found = list(_encoded(islice(documents, max_documents), tokenizer, text_column))
    if not found:
        raise ValueError("`documents` is empty. Give at least one document.")
    return found


def check_vocabulary(documents: Iterable[Tensor], vocabulary: int | None) -> None:
    """Refuses ids that the model has no embedding for.

    Raises:
        ValueError: names the document, the id and the size of the vocabulary.
    """
    for index, ids in enumerate(documents):
        if not len(ids):
            continue
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            raise ValueError(
                f"Document {index} has the token id {low if low < 0 else high}, but the model's ids are "
                f"0 to {(vocabulary or high + 1) - 1}. Tokenise it with the tokenizer of this model."
            )


def resolve_bos(bos: str, protocol: str, tokenizer: Any) -> tuple[int | None, int | None]:
    """Ids in front of the first window of a document and of each later one; None where nothing stands there.

    `auto` does what the protocol is known for: `disjoint` has the BOS, else the EOS, before the first window only (as
    lm-eval); the others put a BOS in front of every window if and only if the tokenizer adds one when it encodes.

    Raises:
        ValueError: an unknown word, or `every` where there is no BOS.
    """
    check_choice("bos", bos, BOS)
    if bos == "none" or (bos == "auto" and tokenizer is None):
        return None, None
    if bos == "auto" and protocol == "disjoint":
        return (tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id), None
    added = None if tokenizer is None else added_prefix(tokenizer)
    if bos == "every" and added is None:
        added = getattr(tokenizer, "bos_token_id", None)
        if added is None:
            raise ValueError(
                "`bos='every'` needs a tokenizer with a BOS token and there is none. "
                "Set `tokenizer.bos_token`, or use bos='none'."
            )
    return added, added


def added_prefix(tokenizer: Any) -> int | None:
    """The id that a tokenizer puts in front of a text, found by encoding one; None where it adds none."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    return int(whole[0]) if list(whole[:1]) != list(bare[:1]) else None


def _encoded(documents: Iterable[Any], tokenizer: Any, text_column: str) -> Iterator[Tensor]:
    """Token ids of one document after the other."""
    for index, document in enumerate(documents):
        if isinstance(document, Mapping):
            document = _cell(document, text_column)
        if isinstance(document, str):
            if tokenizer is None:
                raise ValueError(f"Document {index} is text, which needs a `tokenizer`; got None. Or give token ids.")
            # `verbose=False`: a document longer than the tokenizer's maximum is no mistake, it is cut into windows.
            document = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"]
        yield _as_ids(document, index)


def _cell(row: Mapping[str, Any], text_column: str) -> Any:
    """What a row holds: its token ids, else its text."""
    if "input_ids" in row:
        return row["input_ids"]
    if text_column not in row:
        raise ValueError(unknown("column", text_column, map(str, row)) + " Name it with `text_column`.")
    return row[text_column]


def _as_ids(document: Any, index: int) -> Tensor:
    """Token ids as int64 [tokens]; a batch of one, as tokenizers return it, counts as its only row."""
    try:
        ids = torch.as_tensor(document)
    except (TypeError, ValueError, RuntimeError):
        ids = None
    if ids is not None and ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    whole = ids is not None and (ids.numel() == 0 or not (ids.is_floating_point() or ids.dtype == torch.bool))
    if ids is None or ids.ndim != 1 or not whole:
        shown = f"{type(document).__name__}: {str(document)[:60]!r}"
        raise TypeError(f"A document is {KINDS}; document {index} is {shown}.")
    return ids.detach().cpu().long()
