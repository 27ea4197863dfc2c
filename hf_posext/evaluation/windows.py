"""Cuts documents into the windows that a protocol scores: pure arithmetic on token ids, no model and no tokenizer.

One rule holds for every protocol: **context length T is the number of tokens fed to the model at most, BOS included**.
A window holds at most T + 1 ids, the last of which is a target only. Documents are never joined.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Protocol

import torch
from torch import Tensor


class Pass(Protocol):
    """One pass of a model: what it is fed, and which rows of its output are scored against which tokens."""

    @property
    def document(self) -> int:
        """Index of the document that is read."""

    @property
    def fed(self) -> Tensor:
        """Token ids that the model reads, int64 [<= T]."""

    @property
    def rows(self) -> Tensor:
        """Indices into `fed` of the tokens whose logits are scored, int64 [targets]."""

    @property
    def targets(self) -> Tensor:
        """The token ids that they are scored against, int64 [targets]."""


@dataclass(frozen=True, eq=False)
class Window:
    """One pass of the model: it reads `tokens[:-1]`, and `tokens[first]` to `tokens[last]` are scored.

    Attributes:
        document: index of the document that the window was cut from.
        tokens: token ids, int64 [<= T + 1], a BOS in front included.
        first: index into `tokens` of the first target, >= 1 (nothing predicts the token at 0).
        last: index into `tokens` of the last target, inclusive.
    """

    document: int
    tokens: Tensor
    first: int
    last: int

    @property
    def fed(self) -> Tensor:
        """All tokens but the last, which is a target only."""
        return self.tokens[:-1]

    @property
    def rows(self) -> Tensor:
        """The token before each target, which is the one that predicts it."""
        return torch.arange(self.first - 1, self.last)

    @property
    def targets(self) -> Tensor:
        """The scored token ids, int64 [last - first + 1]."""
        return self.tokens[self.first : self.last + 1]


def tail_windows(
    documents: Sequence[Tensor],
    context_lengths: Iterable[int],
    *,
    targets: int,
    endpoints_per_document: int,
    bos: int | None = None,
    more_lengths: Iterable[int] = (),
) -> tuple[dict[int, list[Window]], list[int]]:
    """The same targets seen with contexts of each length, so that lengths differ in context and in nothing else.

    Args:
        documents: token ids, each int64 [tokens].
        context_lengths: context lengths in tokens.
        targets: tokens scored before each endpoint, at most the shortest context length.
        endpoints_per_document: places in a document where targets end, spread from the first that is deep enough for
            the longest context to the last token; fewer where targets would overlap. Those between are moved a little
            where windows then begin together, so that the shorter can be read from the longer.
        bos: id put in front of every window.
        more_lengths: further context lengths for the same targets, which say nothing on where these are.

    Returns:
        Context length -> windows, in the same order for each length; and the indices of documents that are too short.

    Raises:
        ValueError: more targets than the shortest context holds.
    """
    asked = sorted(set(context_lengths))
    lengths = sorted({*asked, *more_lengths})
    if targets > lengths[0]:
        raise ValueError(
            f"`targets` must be at most the shortest context length {lengths[0]}, got {targets}. "
            "Lower `targets` or leave that length out."
        )
    windows: dict[int, list[Window]] = {length: [] for length in lengths}
    skipped = []
    for index, document in enumerate(documents):
        ids = without_prefix(document, bos)
        shallowest = lengths[-1] - (bos is not None)
        ends = endpoints(len(ids), shallowest, targets, endpoints_per_document, asked)
        if not ends:
            skipped.append(index)
        for length in lengths:
            windows[length] += [_window(index, ids, end, length, targets, bos) for end in ends]
    return windows, skipped


def full_windows(
    documents: Sequence[Tensor], context_length: int, *, bos: int | None = None
) -> tuple[list[Window], list[int]]:
    """One pass per document over at most `context_length` tokens, in which every token that can be is scored.

    A shorter length T is read from the same pass: the targets at index <= T of the window.

    Returns:
        Windows, and the indices of documents that hold no target.
    """
    return _rolling(documents, context_length, context_length, bos, bos, passes=1)


def sliding_windows(
    documents: Sequence[Tensor], context_length: int, stride: int, *, bos: int | None = None
) -> tuple[list[Window], list[int]]:
    """Overlapping windows that move by `stride` tokens; each scores the tokens that are new, the first one all it can.

    Every token is scored exactly once, the first one of a document only behind a BOS. After the first window each
    target has at least `context_length` - `stride` tokens of context (the BOS included).

    Raises:
        ValueError: a stride above the context length, which would leave tokens out.

    Source: Press et al. 2022 (arXiv 2108.12409), appendix B; Chen et al. 2023 (arXiv 2306.15595), "S=256".
    """
    if stride > context_length:
        raise ValueError(f"`stride` must be at most the context length {context_length}, got {stride}.")
    return _rolling(documents, context_length, stride, bos, bos)


def disjoint_windows(
    documents: Sequence[Tensor], context_length: int, *, prefix: int | None = None, bos: int | None = None
) -> tuple[list[Window], list[int]]:
    """Windows that score `context_length` tokens each; the last one is shifted back so that its context is full.

    Args:
        documents: token ids, each int64 [tokens].
        context_length: context length in tokens.
        prefix: id in front of the first window of a document, so that its first token is scored too.
        bos: id in front of each later window.

    Source: lm-evaluation-harness, `get_rolling_token_windows` with `context_len=1`.
    """
    return _rolling(documents, context_length, context_length, prefix, bos)


def without_prefix(document: Tensor, prefix: int | None) -> Tensor:
    """The document without a leading `prefix`, which windows put there themselves: it must not stand there twice."""
    if prefix is not None and len(document) and int(document[0]) == prefix:
        return document[1:]
    return document


def digest(windows: Iterable[Pass]) -> str:
    """A fingerprint of what is scored: the documents' indices, the order and the ids of all targets."""
    state = hashlib.sha256()
    for window in windows:
        state.update(f"{window.document}:{len(window.targets)}:".encode())
        state.update(window.targets.numpy().tobytes())
    return state.hexdigest()[:16]


def endpoints(length: int, shallowest: int, targets: int, count: int, context_lengths: Sequence[int] = ()) -> list[int]:
    """Indices of last targets, ascending, from `shallowest` to the last token of a document, spread evenly.

    Two windows begin together where their ends are as far apart as their lengths. If any ends can be, all but the first
    are put on the grid of these differences.
    """
    span = length - 1 - shallowest
    if span < 0:
        return []
    count = min(count, 1 + span // targets)
    if count == 1:
        return [length - 1]
    even = span / (count - 1)
    grid = math.gcd(*(longer - shorter for shorter, longer in pairwise(context_lengths)))
    on_grid = grid * int(even // grid) if grid else 0
    if context_lengths and targets <= on_grid <= context_lengths[-1] - context_lengths[0]:
        return [shallowest, *(length - 1 - step * on_grid for step in reversed(range(count - 1)))]
    return [shallowest + round(step * even) for step in range(count)]


def _rolling(
    documents: Sequence[Tensor],
    length: int,
    stride: int,
    first_bos: int | None,
    later_bos: int | None,
    passes: int | None = None,
) -> tuple[list[Window], list[int]]:
    """The windows of each document in turn (at most `passes` of each), and the documents without a single target."""
    windows: list[Window] = []
    skipped = []
    for index, document in enumerate(documents):
        ids = without_prefix(document, first_bos)
        start = 0 if first_bos is not None else 1
        if len(ids) <= start:
            skipped.append(index)
        windows += islice(_roll(index, ids, start, length, stride, first_bos, later_bos), passes)
    return windows, skipped


def _roll(
    index: int, ids: Tensor, start: int, length: int, stride: int, first_bos: int | None, later_bos: int | None
) -> Iterator[Window]:
    """One document: targets from `start` on, `length` of them in the first window and `stride` in each later one."""
    scored, count, bos = start, length, first_bos
    while scored < len(ids):
        count = min(count, len(ids) - scored)
        scored += count
        yield _window(index, ids, scored - 1, length, count, bos)
        count, bos = stride, later_bos


def _window(index: int, ids: Tensor, end: int, length: int, targets: int, bos: int | None) -> Window:
    """The window whose last target is `ids[end]`, with as much context as `length` fed tokens allow."""
    begin = max(0, end - length + (bos is not None))
    tokens = ids[begin : end + 1]
    if bos is not None:
        tokens = torch.cat([tokens.new_tensor([bos]), tokens])
    return Window(index, tokens, len(tokens) - targets, len(tokens) - 1)
