"""Perplexity at several context lengths, on the same tokens, beside the bars that an extension has to beat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from hf_posext.evaluation.arms import identify, left_out, no_interval, vocabulary
from hf_posext.evaluation.bars import add_bars, truncated_lengths
from hf_posext.evaluation.documents import check_vocabulary, read_documents, resolve_bos
from hf_posext.evaluation.measuring import curve, measurements, score_plan
from hf_posext.evaluation.perplexity_report import PerplexityReport
from hf_posext.evaluation.protocols import Settings, cut, default_bars
from hf_posext.evaluation.scoring import check_causal
from hf_posext.evaluation.statistics import RESAMPLES
from hf_posext.evaluation.windows import digest


def perplexity(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[Any],
    *,
    context_lengths: Sequence[int],
    protocol: str = "tail",
    targets: int = 128,
    endpoints_per_document: int = 4,
    stride: int | None = None,
    bos: str = "auto",
    bars: Sequence[str] | None = None,
    text_column: str = "text",
    max_documents: int | None = None,
    batch_size: int = 1,
    chunk: int = 1024,
    prefill_chunk_size: int | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
    arm: str | None = None,
    progress: bool | None = None,
) -> PerplexityReport:
    """Perplexity of a causal model at several context lengths, with a 95 % interval over documents.

    A context length is the number of tokens fed to the model at most, BOS included. Documents are never joined and
    nothing is truncated silently: a document too short is left out, counted and named.

    Args:
        model: a causal LM, patched or not, also wrapped by PEFT.
        tokenizer: its tokenizer; None where documents are token ids.
        documents: strings, lists of token ids, dicts with `input_ids`, or a `datasets` dataset, also a streaming one.
        context_lengths: lengths in tokens, in any order.
        protocol: `tail` scores the same targets with contexts of each length; `full` reads every length and a curve
            over positions from one pass per document; `sliding` moves a window by `stride`; `disjoint` is what lm-eval
            calls rolling.
        targets: protocol `tail`: tokens scored at each endpoint.
        endpoints_per_document: protocol `tail`: places in each document where targets end.
        stride: protocol `sliding`: tokens by which the window moves, capped at the context length; 256 if None.
        bos: `auto` as the protocol is known for, `none`, or `every` window; a BOS is context and never scored.
        bars: what the patched model has to beat. Of the unpatched model, N its trained length: `truncate` (protocol
            `tail`: given only the last N tokens), `window` (given all, each token sees only the last N) and `none`
            (given all). By default `truncate` and `window` for `tail`, nothing for the others. A bar that the model
            cannot have is left out, and a note says why.
        text_column: column of a dataset or key of a dict that holds the text.
        max_documents: read as many documents at most.
        batch_size: windows per forward pass.
        chunk: rows of hidden states that the head sees at a time, fewer where the vocabulary is large.
        prefill_chunk_size: tokens fed at a time, with a cache of those before; contexts that begin alike are then read
            once. Equal to whole passes to rounding. On long text it takes less memory, and in layers with a sliding
            window less time. None feeds each context at once.
        seed: of the bootstrap.
        resamples: of the bootstrap.
        arm: name of this arm in the report; the method's name if None (`patched window` for the method `window`, whose
            name is that of the bar), `none` for an unpatched model.
        progress: a bar on stderr; None shows it in a terminal.

    Raises:
        TypeError: an argument or a document of the wrong type.
        ValueError: an argument out of range, documents that are all too short, ids outside the vocabulary, or a model
            without a causal LM head.
    """
    settings = Settings(
        protocol=protocol, context_lengths=context_lengths, targets=targets, stride=stride, bos=bos,
        endpoints_per_document=endpoints_per_document, text_column=text_column, max_documents=max_documents,
        bars=default_bars(protocol) if bars is None else bars,
        batch_size=batch_size, chunk=chunk, prefill_chunk_size=prefill_chunk_size, seed=seed, resamples=resamples,
    )  # fmt: skip
    check_causal(model)
    measured = identify(model, arm)
    ids = read_documents(documents, tokenizer, text_column=text_column, max_documents=settings.max_documents)
    check_vocabulary(ids, vocabulary(model))
    more_lengths = truncated_lengths(settings, measured.trained_length).values()
    plan, skipped = cut(settings, ids, resolve_bos(bos, protocol, tokenizer), more_lengths)
    own = {length: plan[length] for length in plan if length in settings.context_lengths}
    scores = score_plan(model, own, settings, measured.name, progress)
    report = PerplexityReport(
        protocol={**asdict(settings), "digest": digest(window for length in own for window in own[length])},
        measurements=measurements(settings, measured.name, plan, scores),
        records=measured.records,
        trained_length=measured.trained_length,
        skipped=skipped,
        notes=measured.notes_beyond(settings.context_lengths) + _short(settings, ids, skipped),
        curve=curve(measured.name, own, scores) if protocol == "full" else [],
    )
    add_bars(report, model, settings, plan, {} if measured.is_patched else scores, progress)
    return report


def _short(settings: Settings, documents: list[Tensor], skipped: list[int]) -> list[str]:
    """Names documents that were left out, counts those that do not fill a context, says where there is no interval."""
    notes = left_out(skipped, len(documents), "too short")
    if settings.protocol != "tail":
        short = [index for index, ids in enumerate(documents) if len(ids) < settings.longest and index not in skipped]
        if short:
            notes.append(f"{len(short)} of {len(documents)} documents have fewer than {settings.longest} tokens.")
    return notes + no_interval(len(documents) - len(skipped))
