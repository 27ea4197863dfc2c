"""Which tokens of a document need long context: by what a reference model gains from it, or as they are given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor, nn

from hf_posext.arguments import as_float, check_length
from hf_posext.evaluation.measuring import score_plan
from hf_posext.evaluation.protocols import Common
from hf_posext.evaluation.windows import Window, sliding_windows


@dataclass(frozen=True, kw_only=True)
class KeySettings(Common):
    """What is read of documents, and how.

    Attributes:
        protocol: `longppl`.
        bos: `auto`, `none` or `every`.
    """

    protocol: str = "longppl"
    bos: str


@dataclass(frozen=True)
class Selection:
    """How key tokens are chosen.

    Attributes:
        short_length: tokens of the short context.
        stride: tokens by which it moves.
        alpha: gain in nats from the long context that makes a key token.
        beta: log-likelihood in nats that it must then have.
    """

    short_length: int
    stride: int
    alpha: float
    beta: float

    @classmethod
    def resolve(
        cls,
        short_length: int | None,
        stride: int | None,
        alpha: float,
        beta: float,
        *,
        trained: int | None,
        context_length: int,
        deepest: int,
    ) -> Self:
        """Completes and checks what was asked for.

        Args:
            short_length: in tokens; N if None.
            stride: in tokens; a quarter of the short context if None.
            alpha: in nats.
            beta: in nats.
            trained: N in tokens, where it is known.
            context_length: of the long context in tokens.
            deepest: tokens of the longest document.

        Raises:
            TypeError: a value of the wrong type.
            ValueError: no short context, one that is not shorter, or no document that is longer than it.
        """
        short = trained if short_length is None else check_length("short_length", short_length)
        if short is None:
            raise ValueError("The config does not say a trained length. Give `short_length` in tokens.")
        if short >= context_length:
            raise ValueError(
                f"`short_length` must be less than `context_length` {context_length}, got {short}: no token would have "
                "more context. Lower it, or raise `context_length`."
            )
        if deepest <= short:
            raise ValueError(
                f"A key token needs more than {short} tokens before it; the longest document has {deepest}. Lower "
                "`short_length` or give longer documents."
            )
        step = max(1, short // 4) if stride is None else check_length("stride", stride)
        return cls(short, step, check_number("alpha", alpha), check_number("beta", beta))


def choose(
    judge: nn.Module,
    windows: Sequence[Window],
    selection: Selection,
    settings: KeySettings,
    bos: int | None,
    progress: bool | None,
) -> list[Tensor]:
    """Which targets of each window are key tokens, bool [targets].

    Args:
        judge: the reference model.
        windows: one for each document, from its start on.
        selection: short context and thresholds.
        settings: of the evaluation.
        bos: id in front of every window.
        progress: a bar on stderr; None shows it in a terminal.

    Source: Fang et al. 2024 (arXiv 2410.23771), eq. 5: LSD > alpha and LCL > beta.
    """
    long = score_plan(judge, {settings.longest: windows}, settings, "reference", progress)[settings.longest]
    length = selection.short_length
    pieces, _ = sliding_windows([window.tokens for window in windows], length, selection.stride, bos=bos)
    parts = score_plan(judge, {length: pieces}, settings, "reference, short", progress)[length]
    by_text: list[list[Tensor]] = [[] for _ in windows]
    for piece, part in zip(pieces, parts, strict=True):
        by_text[piece.document].append(part)
    return [
        (torch.cat(short) - whole > selection.alpha) & (-whole > selection.beta)
        for short, whole in zip(by_text, long, strict=True)
    ]


def given_masks(key_tokens: Sequence[Any], documents: Sequence[Tensor], windows: Sequence[Window]) -> list[Tensor]:
    """The given key tokens as a bool mask over the targets of each window; those that are no targets are left out.

    Raises:
        TypeError: neither indices nor a bool mask.
        ValueError: not as many as documents, a mask of another length, or an index outside its document.
    """
    if len(key_tokens) != len(documents):
        raise ValueError(
            f"`key_tokens` must have one entry for each of {len(documents)} documents, got {len(key_tokens)}."
        )
    masks = [_mask(index, key_tokens[index], len(ids)) for index, ids in enumerate(documents)]
    return [masks[window.document][_places(window, documents)] for window in windows]


def indices_of(masks: Sequence[Tensor], documents: Sequence[Tensor], windows: Sequence[Window]) -> list[list[int]]:
    """Of each document the indices of its key tokens, ascending."""
    found: list[list[int]] = [[] for _ in documents]
    for window, mask in zip(windows, masks, strict=True):
        found[window.document] += _places(window, documents)[mask].tolist()
    return found


def check_number(name: str, value: object) -> float:
    """A finite number as float.

    Raises:
        TypeError: not a number (bool included).
        ValueError: nan or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a finite number, got {value!r} of type {type(value).__name__}.")
    if not math.isfinite(as_float(value)):
        raise ValueError(f"`{name}` must be a finite number, got {value!r}.")
    return as_float(value)


def _places(window: Window, documents: Sequence[Tensor]) -> Tensor:
    """Indices of the targets of a window in its document; the window reads it from its start, maybe behind a BOS."""
    has_bos = int(window.tokens[0]) != int(documents[window.document][0])
    return torch.arange(window.first, len(window.tokens)) - int(has_bos)


def _mask(index: int, given: Any, tokens: int) -> Tensor:
    """A bool mask [tokens] of one document."""
    entry = torch.as_tensor(given)
    if entry.dtype == torch.bool:
        if entry.shape != (tokens,):
            raise ValueError(
                f"The mask of document {index} must have {tokens} entries, one for each token, got {list(entry.shape)}."
            )
        return entry.cpu()
    if entry.numel() and (entry.is_floating_point() or entry.ndim != 1):
        raise TypeError(f"Key tokens are a list of indices or a bool mask; those of document {index} are {given!r}.")
    places = entry.long().cpu()
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < tokens:
        raise ValueError(f"Document {index} has {tokens} tokens, but its key tokens are {places.tolist()[:20]}.")
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[places] = True
    return mask
