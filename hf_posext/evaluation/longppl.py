"""LongPPL: perplexity of the tokens that need long context, chosen by a reference model or given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext.evaluation.arms import identify, left_out, no_interval, vocabulary
from hf_posext.evaluation.documents import check_vocabulary, read_documents, resolve_bos
from hf_posext.evaluation.key_tokens import KeySettings, Selection, choose, given_masks, indices_of
from hf_posext.evaluation.longppl_report import KEY, LongPplReport
from hf_posext.evaluation.measuring import measurement, score_plan
from hf_posext.evaluation.perplexity_report import Measurement
from hf_posext.evaluation.scoring import check_causal
from hf_posext.evaluation.statistics import RESAMPLES
from hf_posext.evaluation.windows import Window, digest, full_windows

GIVEN, SELF, REFERENCE = "given", "the model itself", "a reference model"
JUDGE = (
    "The model chose the key tokens itself, so its LongPPL is too low and cannot be compared with that of another. "
    "Give a `reference` that reads long text well, or the `key_tokens` of another report."
)
NO_KEYS = "No token is a key token, so there is no LongPPL. Lower `alpha` or `beta`, or give longer documents."
FEW = "{short} of {documents} documents have fewer than {length} tokens."


def longppl(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[Any],
    *,
    context_length: int,
    short_length: int | None = None,
    reference: nn.Module | None = None,
    key_tokens: Sequence[Any] | None = None,
    alpha: float = 2.0,
    beta: float = -2.0,
    stride: int | None = None,
    bos: str = "auto",
    text_column: str = "text",
    max_documents: int | None = None,
    batch_size: int = 1,
    chunk: int = 1024,
    prefill_chunk_size: int | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
    arm: str | None = None,
    progress: bool | None = None,
) -> LongPplReport:
    """Perplexity of a causal model on key tokens, and on all tokens, of one pass over each document.

    A token is a key token if a reference model gains more than `alpha` nats on it from the long context against a short
    one, and then predicts it with a log-likelihood above `beta`. Perplexity of all tokens hardly depends on far text;
    that of the key tokens does.

    Args:
        model: a causal LM, patched or not, also wrapped by PEFT.
        tokenizer: its tokenizer; None where documents are token ids.
        documents: as for `perplexity`.
        context_length: tokens of each document that are read at most, BOS included; the long context.
        short_length: tokens of the short context, less than the long one; N of the model if None.
        reference: a causal LM with the same tokens, sound at the long context; if neither it nor `key_tokens` is given,
            the model judges itself, and a note says what that is worth.
        key_tokens: in place of `reference`, of each document the indices of its key tokens or a bool mask over all of
            its tokens; those of a report fit.
        alpha: gain in nats from the long context that makes a key token.
        beta: log-likelihood in nats that it must then have.
        stride: tokens by which the short context moves, so that it is short_length - stride to short_length tokens; a
            quarter of `short_length` if None.
        bos: as for `perplexity`, in front of every window.
        text_column: column of a dataset or key of a dict that holds the text.
        max_documents: read as many documents at most.
        batch_size: windows per forward pass.
        chunk: rows of hidden states that the head sees at a time, fewer where the vocabulary is large.
        prefill_chunk_size: tokens fed at a time, with a cache of those before; contexts that begin alike are then read
            once. Equal to whole passes to rounding. On long text it takes less memory, and in layers with a sliding
            window less time. None feeds each context at once.
        seed: of the bootstrap.
        resamples: of the bootstrap.
        arm: name of this arm in the report; the method's name if None, `none` for an unpatched model.
        progress: a bar on stderr; None shows it in a terminal.

    Raises:
        TypeError: an argument or a document of the wrong type.
        ValueError: an argument out of range, both `reference` and `key_tokens`, documents that are all too short, ids
            outside a vocabulary, or a model without a causal LM head.

    Source: Fang et al. 2024 (arXiv 2410.23771), with its defaults alpha 2 and beta -2; there the short context is 4096
    tokens that move by 1024.
    """
    settings = KeySettings(
        context_lengths=[context_length], bos=bos, text_column=text_column, max_documents=max_documents, bars=(),
        batch_size=batch_size, chunk=chunk, prefill_chunk_size=prefill_chunk_size, seed=seed, resamples=resamples,
    )  # fmt: skip
    if reference is not None and key_tokens is not None:
        raise ValueError("Give `reference` or `key_tokens`, not both: it would choose what is there already.")
    measured = identify(model, arm)
    judge = model if reference is None else reference
    ids = read_documents(documents, tokenizer, text_column=text_column, max_documents=settings.max_documents)
    check_readers((model, judge), ids)
    first, _ = resolve_bos(bos, "tail", tokenizer)
    windows, skipped = full_windows(ids, settings.longest, bos=first)
    if not windows:
        raise ValueError("No document has a token that can be scored: each needs two at least. Give longer documents.")
    if key_tokens is not None:
        masks, selection = given_masks(key_tokens, ids, windows), {"chosen_by": GIVEN}
    else:
        asked = Selection.resolve(
            short_length, stride, alpha, beta,
            trained=measured.trained_length, context_length=settings.longest, deepest=max(map(len, ids)),
        )  # fmt: skip
        masks = choose(judge, windows, asked, settings, first, progress)
        selection = {"chosen_by": SELF if reference is None else REFERENCE, **asdict(asked)}
    scores = score_plan(model, {settings.longest: windows}, settings, measured.name, progress)[settings.longest]
    keys = indices_of(masks, ids, windows)
    return LongPplReport(
        protocol={**asdict(settings), "targets": None, "digest": f"{digest(windows)}:{_fingerprint(keys)}"},
        measurements=[
            measurement(measured.name, settings.longest, windows, scores),
            *key_measurement(measured.name, settings.longest, windows, scores, masks),
        ],
        records=measured.records,
        trained_length=measured.trained_length,
        skipped=skipped,
        notes=measured.notes_beyond(settings.context_lengths)
        + _notes(settings, selection["chosen_by"], ids, skipped, keys),
        key_tokens=keys,
        selection=selection,
    )


def check_readers(models: Iterable[nn.Module], documents: Sequence[Tensor]) -> None:
    """Refuses models that are not causal, or that have no embedding for a token.

    Raises:
        ValueError: says what is wrong with which model or document.
    """
    for model in models:
        check_causal(model)
        check_vocabulary(documents, vocabulary(model))


def key_measurement(
    arm: str, length: int, windows: Sequence[Window], nll: Sequence[Tensor], masks: Sequence[Tensor]
) -> list[Measurement]:
    """Sums over the key tokens of each document that has any, in float64; nothing without a key token."""
    sums: dict[int, float] = defaultdict(float)
    tokens: dict[int, int] = defaultdict(int)
    for window, row, mask in zip(windows, nll, masks, strict=True):
        if mask.any():
            sums[window.document] += float(row[mask].double().sum())
            tokens[window.document] += int(mask.sum())
    return [Measurement(arm, length, tuple(sums), tuple(sums.values()), tuple(tokens.values()), KEY)] if sums else []


def _notes(
    settings: KeySettings, chosen_by: str, documents: list[Tensor], skipped: list[int], keys: list[list[int]]
) -> list[str]:
    """Who judged, documents that were left out or do not fill the context, and where there is no number or interval."""
    short = sum(len(ids) < settings.longest for ids in documents)
    notes = [JUDGE] if chosen_by == SELF else []
    notes += left_out(skipped, len(documents), "too short")
    notes += [FEW.format(short=short, documents=len(documents), length=settings.longest)] if short else []
    with_keys = sum(map(bool, keys))
    return [*notes, *(no_interval(with_keys) if with_keys else [NO_KEYS])]


def _fingerprint(keys: list[list[int]]) -> str:
    """Tells sets of key tokens apart."""
    flat = [Window(index, torch.tensor([0, *each]), 1, len(each)) for index, each in enumerate(keys)]
    return digest(flat)
