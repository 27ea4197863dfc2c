"""Perplexity at several context lengths, on the same tokens, beside the bars that an extension has to beat."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from hf_posext.errors import quoted
from hf_posext.evaluation.documents import check_vocabulary, read_documents, resolve_bos
from hf_posext.evaluation.perplexity_report import Measurement, PerplexityReport
from hf_posext.evaluation.protocols import BARS, Plan, Settings, cut, default_bars
from hf_posext.evaluation.scoring import causal_lm, check_causal, score
from hf_posext.evaluation.statistics import RESAMPLES
from hf_posext.evaluation.windows import Window, digest
from hf_posext.lengths import trained_length
from hf_posext.patching import suspended
from hf_posext.records import record_of

logger = logging.getLogger(__name__)

BUCKETS_PER_OCTAVE = 2
NAMED = 20  # indices of skipped documents that a note spells out; the report has all of them

Scores = dict[int, list[Tensor]]  # context length -> NLL per window, fp32 [targets]


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
        bars: `truncate` (protocol `tail`: the unpatched model given only the last N tokens, N its trained length) and
            `none` (the unpatched model given all). By default `truncate` for `tail`, nothing for the others.
        text_column: column of a dataset or key of a dict that holds the text.
        max_documents: read as many documents at most.
        batch_size: windows per forward pass.
        chunk: rows of hidden states that the head sees at a time.
        seed: of the bootstrap.
        resamples: of the bootstrap.
        arm: name of this arm in the report; the method's name if None, `none` for an unpatched model.
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
        batch_size=batch_size, chunk=chunk, seed=seed, resamples=resamples,
    )  # fmt: skip
    check_causal(model)
    arm, record, trained = _identity(model, arm)
    ids = read_documents(documents, tokenizer, text_column=text_column, max_documents=settings.max_documents)
    check_vocabulary(ids, _vocabulary(model))
    plan, skipped = cut(
        settings, ids, resolve_bos(bos, protocol, tokenizer), _truncated_lengths(settings, trained).values()
    )
    own = {length: plan[length] for length in plan if length in settings.context_lengths}
    scores = _score(model, own, settings, arm, progress)
    report = PerplexityReport(
        protocol={**asdict(settings), "digest": digest(window for length in own for window in own[length])},
        measurements=_measurements(settings, arm, plan, scores),
        records={arm: None if record is None else record.to_dict()},
        trained_length=trained,
        skipped=skipped,
        notes=_reach(settings, arm, record, trained) + _short(settings, ids, skipped),
        curve=_curve(arm, own, scores) if protocol == "full" else [],
    )
    _add_bars(report, model, settings, plan, scores if record is None else {}, progress)
    return report


def _identity(model: nn.Module, arm: str | None) -> tuple[str, Any, int | None]:
    """Name of the arm, patch record (None for an unpatched model) and trained length N in tokens (None if unknown)."""
    record = record_of(model)
    if arm is not None and arm in BARS and not (arm == "none" and record is None):
        raise ValueError(f"`arm` must not be the name of a bar ({quoted(BARS)}), got {arm!r}. Give another name.")
    if record is not None:
        return arm or record.method, record, int(record.trained_length)
    config = getattr(model, "config", None)
    return arm or "none", None, None if config is None else trained_length(config)


def _vocabulary(model: nn.Module) -> int | None:
    """Number of token ids that the model can read, None where it does not say."""
    network: Any = causal_lm(model)
    embedding = network.get_input_embeddings() if hasattr(network, "get_input_embeddings") else None
    return getattr(embedding, "num_embeddings", None)


def _truncated_lengths(settings: Settings, trained: int | None) -> dict[int, int]:
    """Context length -> tokens that the bar `truncate` is given; empty without that bar or without a trained length.

    Raises:
        ValueError: more targets than the trained length holds.
    """
    if "truncate" not in settings.bars or trained is None:
        return {}
    if (settings.targets or 0) > trained:
        raise ValueError(
            f"`targets` must be at most the trained length {trained} for the bar `truncate`, got {settings.targets}. "
            "Lower `targets`, or leave the bar out with bars=[]."
        )
    return {length: min(length, trained) for length in settings.context_lengths}


def _score(model: nn.Module, plan: Plan, settings: Settings, arm: str, progress: bool | None) -> Scores:
    """NLL of every window of a plan, one length after the other."""
    return {
        length: score(
            model,
            windows,
            batch_size=settings.batch_size,
            chunk=settings.chunk,
            progress=progress,
            description=f"{arm}, {length} tokens",
        )
        for length, windows in plan.items()
    }


def _measurements(settings: Settings, arm: str, plan: Plan, scores: Scores) -> list[Measurement]:
    """One measurement per context length; for `full` all of them from the one pass."""
    if settings.protocol != "full":
        return [_measurement(arm, length, plan[length], scores[length]) for length in settings.context_lengths]
    windows = plan[settings.longest]
    found = []
    for length in settings.context_lengths:
        pairs = zip(windows, scores[settings.longest], strict=True)
        found.append(_measurement(arm, length, windows, [row[: length + 1 - window.first] for window, row in pairs]))
    return found


def _measurement(arm: str, length: int, windows: list[Window], nll: list[Tensor]) -> Measurement:
    """Sums per document, in float64."""
    sums: dict[int, float] = defaultdict(float)
    tokens: dict[int, int] = defaultdict(int)
    for window, row in zip(windows, nll, strict=True):
        sums[window.document] += float(row.double().sum())
        tokens[window.document] += len(row)
    return Measurement(arm, length, tuple(sums), tuple(sums.values()), tuple(tokens.values()))


def _add_bars(
    report: PerplexityReport, model: nn.Module, settings: Settings, plan: Plan, scores: Scores, progress: bool | None
) -> None:
    """Adds the arms of the unpatched model; `scores` holds what was already measured of it."""
    truncated = _truncated_lengths(settings, report.trained_length)
    bars = [bar for bar in settings.bars if bar == "truncate" or report.record is not None]
    if "truncate" in bars and not truncated:
        bars.remove("truncate")
        report.notes.append("The bar `truncate` is left out: the config does not say a trained length.")
    needed = set(truncated.values()) | (set(plan) & set(settings.context_lengths) if "none" in bars else set())
    missing = {length: plan[length] for length in sorted(needed - set(scores))}
    if missing:
        with suspended(model):
            scores = scores | _score(model, missing, settings, "unpatched", progress)
    for bar in bars:
        report.records[bar] = None
        if bar == "none":
            report.measurements += _measurements(settings, bar, plan, scores)
            report.curve += _curve(bar, plan, scores) if settings.protocol == "full" else []
        else:
            report.measurements += [
                _measurement(bar, length, plan[given], scores[given]) for length, given in truncated.items()
            ]


def _reach(settings: Settings, arm: str, record: Any, trained: int | None) -> list[str]:
    """Says, and logs once, that lengths are beyond what the arm was made for."""
    if trained is None:
        return []
    usable = trained if record is None else round(trained * record.factor)
    beyond = [length for length in settings.context_lengths if length > usable]
    if not beyond:
        return []
    note = (
        f"`{arm}` is made for {usable} tokens; {', '.join(map(str, beyond))} "
        f"{'is' if len(beyond) == 1 else 'are'} beyond its reach. Patch with a factor that covers the longest context."
    )
    logger.warning(note)
    return [note]


def _short(settings: Settings, documents: list[Tensor], skipped: list[int]) -> list[str]:
    """Names documents that were left out, counts those that do not fill a context, says where there is no interval."""
    notes = []
    if skipped:
        names = ", ".join(map(str, skipped[:NAMED])) + (", ..." if len(skipped) > NAMED else "")
        notes.append(f"{len(skipped)} of {len(documents)} documents are too short and were left out: {names}.")
    if settings.protocol != "tail":
        short = [index for index, ids in enumerate(documents) if len(ids) < settings.longest and index not in skipped]
        if short:
            notes.append(f"{len(short)} of {len(documents)} documents have fewer than {settings.longest} tokens.")
    if len(documents) - len(skipped) < 2:
        notes.append("One document only: there is no interval over documents.")
    return notes


def _curve(arm: str, plan: Plan, scores: Scores) -> list[dict[str, Any]]:
    """Mean NLL in log-spaced buckets of the number of tokens read before the target."""
    ((longest, windows),) = plan.items()
    edges = _bucket_edges(longest)
    sums, tokens = [0.0] * len(edges), [0] * len(edges)
    for window, row in zip(windows, scores[longest], strict=True):
        for bucket, (first, last) in enumerate(edges):
            part = row[max(0, first - window.first) : last + 1 - window.first]
            sums[bucket] += float(part.double().sum())
            tokens[bucket] += len(part)
    return [
        {"arm": arm, "first": first, "last": last, "nll": total / count, "tokens": count}
        for (first, last), total, count in zip(edges, sums, tokens, strict=True)
        if count
    ]


def _bucket_edges(longest: int) -> list[tuple[int, int]]:
    """First and last position, inclusive, of buckets that together cover 1 to `longest`, each once."""
    steps = range(BUCKETS_PER_OCTAVE * longest.bit_length())
    starts = sorted({start for step in steps if (start := round(2 ** (step / BUCKETS_PER_OCTAVE))) <= longest})
    return [(first, after - 1) for first, after in zip(starts, [*starts[1:], longest + 1], strict=True)]
