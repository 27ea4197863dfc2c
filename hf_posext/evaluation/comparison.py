"""Many methods and the bars at several context lengths on the same targets, with one model in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import nn

from hf_posext.arguments import check_flag, check_length
from hf_posext.errors import PatchError, cause_of, quoted
from hf_posext.evaluation.arms import identify, left_out, no_interval, vocabulary
from hf_posext.evaluation.bars import add_bars, truncated_lengths
from hf_posext.evaluation.comparison_arms import Contender, read_contenders
from hf_posext.evaluation.comparison_meter import Meter, cut_all
from hf_posext.evaluation.comparison_report import ComparisonReport
from hf_posext.evaluation.documents import check_vocabulary, read_documents, resolve_bos
from hf_posext.evaluation.forwards import causal_lm
from hf_posext.evaluation.protocols import HONEST, Settings
from hf_posext.evaluation.scoring import check_causal
from hf_posext.evaluation.statistics import RESAMPLES
from hf_posext.evaluation.windows import digest
from hf_posext.records import record_of


def compare(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[Any],
    *,
    methods: Iterable[Any],
    context_lengths: Sequence[int],
    per_length: bool = True,
    original_max_position_embeddings: int | None = None,
    protocol: str = "tail",
    targets: int = 128,
    endpoints_per_document: int = 2,
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
    progress: bool | None = None,
) -> ComparisonReport:
    """Perplexity of a model patched by each method in turn, and of the bars, on the same targets; what is significant.

    The model is patched and unpatched in place, and is afterwards what it was to the last bit; nothing is scored twice.
    What a method costs on short text is measured as well: patched for the longest context and given N tokens.

    Args:
        model: a causal LM without a patch, also wrapped by PEFT.
        tokenizer: its tokenizer; None where documents are token ids.
        documents: as for `perplexity`.
        methods: each a name; a dict {"method": "yarn", "beta_fast": 8, "dynamic": True}, which may also have `name` (of
            the arm), `layers` and a `per_length` of its own; or a pair of a name and such a dict. A method that the
            model cannot have is left out, and a note says why.
        context_lengths: lengths in tokens, in any order, one of them beyond the trained length N.
        per_length: whether a method is patched anew for each context length T beyond N, by the factor T / N (up to N
            the arm is the unpatched model), or once for the longest. Where the factor follows the length, always once.
        original_max_position_embeddings: N in tokens, where the config does not say it or says it wrong.
        protocol: as for `perplexity`; only with `tail` do all lengths have the same targets.
        targets: protocol `tail`: tokens scored at each endpoint.
        endpoints_per_document: protocol `tail`: places in each document where targets end.
        stride: protocol `sliding`: tokens by which the window moves.
        bos: as for `perplexity`.
        bars: the unpatched model: `none` (given all), `truncate` (protocol `tail`: given the last N tokens only) and
            `window` (given all, each token sees the last N only). By default all that the protocol has.
        text_column: column of a dataset or key of a dict that holds the text.
        max_documents: read as many documents at most.
        batch_size: windows per forward pass.
        chunk: rows of hidden states that the head sees at a time, fewer where the vocabulary is large.
        prefill_chunk_size: tokens fed at a time, with a cache of those before; contexts that begin alike are then read
            once. Equal to whole passes to rounding. On long text it takes less memory, and in layers with a sliding
            window less time. None feeds each context at once.
        seed: of the bootstrap.
        resamples: of the bootstrap.
        progress: a bar on stderr; None shows it in a terminal.

    Raises:
        TypeError: an argument, an option of a method or a document of the wrong type.
        ValueError: an argument out of range, an unknown method, no context length beyond N, or no method that the model
            can have.
        PatchError: the model has a patch already.

    Source: Holm 1979 for many comparisons; the bars: hf_posext, since "better than unpatched" is true of anything.
    """
    check_flag("per_length", per_length)
    make = partial(
        Settings,
        protocol=protocol, targets=targets, endpoints_per_document=endpoints_per_document, stride=stride, bos=bos,
        bars=_default_bars(protocol) if bars is None else bars, text_column=text_column, max_documents=max_documents,
        batch_size=batch_size, chunk=chunk, prefill_chunk_size=prefill_chunk_size, seed=seed, resamples=resamples,
    )  # fmt: skip
    settings = make(context_lengths=context_lengths)
    contenders = read_contenders(methods, per_length=per_length)
    check_causal(model)
    trained = _trained_length(model, original_max_position_embeddings, settings)
    ids = read_documents(documents, tokenizer, text_column=text_column, max_documents=settings.max_documents)
    check_vocabulary(ids, vocabulary(model))
    lengths = settings.context_lengths
    plan, skipped = cut_all(make, lengths, ids, resolve_bos(bos, protocol, tokenizer), trained)
    meter = Meter(model, make, lengths, plan, trained, original_max_position_embeddings, progress)
    scored = (window for windows in meter.passes(lengths).values() for window in windows)
    report = ComparisonReport(
        protocol={**asdict(settings), "digest": digest(scored)},
        measurements=[],
        records={},
        trained_length=trained,
        skipped=skipped,
        notes=left_out(skipped, len(ids), "too short") + no_interval(len(ids) - len(skipped)),
    )
    _add_methods(report, meter, contenders)
    add_bars(report, model, settings, meter.passes([*plan]), meter.scores, progress)
    report.measurements.sort(key=lambda measurement: measurement.arm not in settings.bars)
    return report


def _default_bars(protocol: str) -> list[str]:
    """All bars that have a meaning for a protocol, the unpatched model first."""
    return ["none", *(bar for bar in HONEST if bar != "truncate" or protocol == "tail")]


def _trained_length(model: nn.Module, given: int | None, settings: Settings) -> int:
    """N in tokens of a model that can be compared.

    Raises:
        ValueError: N is not known, no context length is beyond it, or it holds fewer tokens than there are targets.
        PatchError: the model has a patch.
    """
    record = record_of(model)
    if record is not None:
        raise PatchError(
            f"The model is already patched: {record.describe()}. Call `unpatch_model` first; `compare` patches it by "
            "each method itself."
        )
    trained = identify(model, None).trained_length if given is None else given
    if trained is None:
        raise ValueError(
            f"The config of {type(causal_lm(model)).__name__} does not say the trained length. "
            "Give `original_max_position_embeddings`, the tokens that the model was trained at."
        )
    trained = check_length("original_max_position_embeddings", trained)
    if settings.longest <= trained:
        raise ValueError(
            f"`context_lengths` must go beyond the trained length {trained}, got {settings.context_lengths}. "
            f"Give for example {2 * trained} as well, or use `perplexity`."
        )
    truncated_lengths(settings, trained)
    return trained


def _add_methods(report: ComparisonReport, meter: Meter, contenders: Sequence[Contender]) -> None:
    """Measures every arm that the model can have, and says in notes why it cannot have the others.

    Raises:
        ValueError: it can have none of them.
    """
    able, reasons = _settle(meter, contenders)
    if able:
        meter.read_unpatched()
        report.short.append(meter.unpatched[meter.trained])
    measured = []
    for index, contender in enumerate(able, 1):
        try:
            reading = meter.read(contender, f"{contender.name} ({index} of {len(able)})")
        except (PatchError, ValueError) as error:
            reasons.append(_reason(contender, error))
            continue
        report.measurements += reading.at.values()
        report.short.append(reading.short)
        report.records[contender.name] = reading.record
        report.curve += reading.curve
        measured.append(contender)
    if not measured:
        raise ValueError(f"None of the methods can be measured. {' '.join(reasons)} See `list_methods(model)`.")
    report.notes += _ways(measured, meter) + reasons


def _settle(meter: Meter, contenders: Sequence[Contender]) -> tuple[list[Contender], list[str]]:
    """The arms that the model can be patched with, and why not the others; a bad option is found before any scoring."""
    able, reasons = [], []
    for contender in contenders:
        try:
            able.append(meter.settle(contender))
        except (PatchError, ValueError) as error:
            reasons.append(_reason(contender, error))
    return able, reasons


def _reason(contender: Contender, error: Exception) -> str:
    """The note on an arm that a model cannot have: what is wrong, without the next step."""
    return f"`{contender.name}` is left out: {cause_of(error)}."


def _ways(measured: Sequence[Contender], meter: Meter) -> list[str]:
    """For which lengths the arms were patched."""
    anew = [contender.name for contender in measured if contender.per_length]
    once = [contender.name for contender in measured if not contender.per_length]
    trained, longest = meter.trained, meter.lengths[-1]
    notes = [
        f"Patched for each context length T beyond {trained} by the factor T / {trained}, and up to {trained} not "
        f"patched: {quoted(anew)}.",
        f"Patched once, for {longest} tokens: {quoted(once)}.",
    ]
    return [note for note, names in zip(notes, (anew, once), strict=True) if names]
