"""Retrieval over a grid of depths and context lengths: can a model still find what stands far back?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from hf_posext.evaluation.answering import FORCED, decoding_of
from hf_posext.evaluation.arms import identify
from hf_posext.evaluation.forwards import causal_lm
from hf_posext.evaluation.passkey_report import PasskeyReport
from hf_posext.evaluation.passkey_settings import DEPTHS, GATE, ProbeSettings
from hf_posext.evaluation.probing import Prober, add_bars, verdict
from hf_posext.evaluation.protocols import HONEST
from hf_posext.evaluation.retrieval_sources import check_text, resolve_wording, source_of
from hf_posext.evaluation.scoring import check_causal

TEACHER = (
    "{model} cannot generate: it was given each answer, and had to predict every next token of it, which is the same "
    "for an exact match."
)


def passkey(
    model: nn.Module,
    tokenizer: Any,
    *,
    context_lengths: Sequence[int],
    probe: str = "passkey",
    depths: Sequence[float] = DEPTHS,
    trials: int = 10,
    answer_length: int = 5,
    documents: Iterable[Any] | None = None,
    text_column: str = "text",
    wording: str = "auto",
    bos: str = "auto",
    bars: Sequence[str] | None = None,
    gate: float = GATE,
    batch_size: int = 8,
    seed: int = 0,
    arm: str | None = None,
    progress: bool | None = None,
) -> PasskeyReport:
    """Share of answers that a causal model retrieves exactly, at each depth of each context length.

    The model continues each prompt greedily; a trial is correct if every token of the answer is. A context length is
    the number of tokens of prompt and answer at most, BOS included. Whether the model can do the probe at all is
    measured within its trained length N, with its patch and if need be without: where it cannot, the report says that
    the probe is vacuous.

    Args:
        model: a causal LM, patched or not, also wrapped by PEFT.
        tokenizer: its tokenizer; None for the probes `copy` and `repeat` on random tokens.
        context_lengths: lengths in tokens, in any order.
        probe: `passkey` (a number hidden in text), `copy` (a random string, far later most of it again), `repeat` (a
            passage of random tokens over and over), or `key_value` (one of many pairs of numbers).
        depths: where the answer stands, 0 for the start of the context and 1 for its end.
        trials: at each depth and length.
        answer_length: digits of a key or value, tokens of a copy.
        documents: text to hide the answer in, as for `perplexity`; if None the sentences of the Landmark paper for its
            wording, else books that are embedded here, else random tokens.
        text_column: column of a dataset or key of a dict that holds the text.
        wording: of a passkey: `landmark` with the instructions of the papers, `plain` with the key and the question
            alone; `auto` is `plain` for base models whose tokenizer keeps digits apart. No chat template is applied.
        bos: `auto` and `every` put a BOS in front of the prompt, `auto` only if the tokenizer does; `none` does not.
        bars: what the patched model has to beat, see `perplexity`. By default `truncate` and `window`.
        gate: accuracy that is needed, at the longest context length up to N (N itself if all are longer), for the probe
            to mean something.
        batch_size: prompts per pass.
        seed: of keys, random strings and filler; equal for every arm.
        arm: name of this arm in the report; the method's name if None, `none` for an unpatched model.
        progress: a bar on stderr; None shows it in a terminal.

    Raises:
        TypeError: an argument of the wrong type.
        LengthError: a `ValueError`: a length that the model cannot read.
        ValueError: an argument out of range, a length that the probe does not fit, or a model without a causal LM head.

    Source: Mohtashami and Jaggi 2023 (arXiv 2305.16300); Chen et al. 2023 (arXiv 2306.15595), sec. 3.3. The gate:
    a model that was never taught to copy scores nothing at any length.
    """
    settings = ProbeSettings(
        probe=probe, context_lengths=context_lengths, depths=depths, trials=trials, answer_length=answer_length,
        wording=wording, bos=bos, bars=HONEST if bars is None else bars, gate=gate, batch_size=batch_size, seed=seed,
    )  # fmt: skip
    check_causal(model)
    check_text(probe, tokenizer)
    measured = identify(model, arm)
    if settings.wording is not None:
        settings = replace(settings, wording=resolve_wording(settings.wording, tokenizer))
    source, filler = source_of(
        model, tokenizer, documents,
        wording=settings.wording, bos=bos, text_column=text_column, seed=seed,
    )  # fmt: skip
    prober = Prober(model, settings, source, measured, progress)
    own = prober.own()
    report = PasskeyReport(
        protocol={**asdict(settings), "filler": filler, "decoding": decoding_of(model), "digest": prober.digest},
        cells=[cell for length in settings.context_lengths for cell in own[length]],
        gates=prober.gate(measured.name, own),
        records=measured.records,
        trained_length=measured.trained_length,
        notes=measured.notes_beyond(settings.context_lengths),
    )
    if report.protocol["decoding"] == FORCED:
        report.notes.append(TEACHER.format(model=type(causal_lm(model)).__name__))
    add_bars(report, prober)
    report.notes += verdict(report, measured.name)
    return report
