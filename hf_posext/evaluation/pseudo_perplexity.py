"""Pseudo-perplexity of masked LMs at several context lengths, on the same masked tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_posext.evaluation.arms import Arm, check_reach, identify, left_out, no_interval, vocabulary
from hf_posext.evaluation.bars import add_masked_bars
from hf_posext.evaluation.documents import check_vocabulary, read_documents
from hf_posext.evaluation.forwards import causal_lm, is_encoder_decoder, is_headless, sees_ahead
from hf_posext.evaluation.masking import Frame, MaskedPlan, default_targets, digest_of, frame_of, masked_windows
from hf_posext.evaluation.measuring import placed_measurements, score_plan
from hf_posext.evaluation.protocols import MaskedSettings
from hf_posext.evaluation.pseudo_report import PseudoPerplexityReport
from hf_posext.evaluation.statistics import RESAMPLES

NOT_MASKED = (
    "Pseudo-perplexity needs a masked LM, which predicts a token from those on both sides of it; {what}. {hint}"
)
HINT = "Load the model with AutoModelForMaskedLM."
CAUSAL = "Measure a causal LM with `perplexity`."


def pseudo_perplexity(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[Any],
    *,
    context_lengths: Sequence[int],
    mask_share: float = 0.15,
    draws: int = 4,
    targets: int | None = None,
    endpoints_per_document: int = 1,
    bars: Sequence[str] | None = None,
    text_column: str = "text",
    max_documents: int | None = None,
    batch_size: int = 1,
    chunk: int = 1024,
    seed: int = 0,
    resamples: int = RESAMPLES,
    arm: str | None = None,
    progress: bool | None = None,
) -> PseudoPerplexityReport:
    """Pseudo-perplexity of a masked LM at several context lengths, with a 95 % interval over documents.

    A share of the tokens is masked at a time, always by the mask token and never a special token, and scored from what
    is around them. Which ones depends on the seed, the document and their place in it, and on nothing else: every arm
    and every context length is asked for the same tokens, behind the same masks.

    A context length L is the number of tokens fed to the model at most, special tokens included: each window has those
    of the tokenizer around it. **At every L the same tokens are scored: the masked ones among the last `targets` tokens
    before each endpoint.** They are split evenly into as few windows of L tokens as hold them, cut from the same text
    (a window longer than `targets` reads further back), so a difference between two lengths is one of context. By
    default `targets` is such that windows of a length lie inside those of each multiple of it.

    Rows have a key `positions`: `all` tokens, those at a position `<= N` of their window and those at a position
    `> N`, the first token of a window being at position 1 and N the trained length. At L <= N all are `<= N`; beyond,
    the share of `> N` grows with L, so compare lengths by `all`, and arms at one length by any of the three.

    Args:
        model: a masked LM, patched or not, also wrapped by PEFT.
        tokenizer: its tokenizer, which says the mask token and the special tokens; also where documents are token ids.
        documents: strings, lists of token ids, dicts with `input_ids`, or a `datasets` dataset, also a streaming one. A
            document that does not hold the longest context is left out, counted and named.
        context_lengths: lengths in tokens, in any order.
        mask_share: share of the tokens that are masked at a time, below 1.
        draws: passes over the same text, each with other tokens masked; no token is masked twice.
        targets: tokens before each endpoint among which the masked ones are scored. None: as many as whole windows of
            the shortest length (N if that is shorter) have room for in the longest one. Reports over other lengths
            have the same targets if this is the same.
        endpoints_per_document: places in each document where targets end; the last one is the document's end.
        bars: what the patched model has to beat. Of the unpatched model, N its trained length: `truncate` (given the
            same text in windows of at most N tokens, its rows named by the positions that the tokens have in the longer
            windows) and `none` (given all). By default `truncate` where the model is patched. A bar that the model
            cannot have is left out, and a note says why.
        text_column: column of a dataset or key of a dict that holds the text.
        max_documents: read as many documents at most.
        batch_size: windows per forward pass.
        chunk: rows of hidden states that the head sees at a time.
        seed: of the masks and of the bootstrap.
        resamples: of the bootstrap.
        arm: name of this arm in the report; the method's name if None, `none` for an unpatched model.
        progress: a bar on stderr; None shows it in a terminal.

    Raises:
        TypeError: an argument or a document of the wrong type.
        LengthError: a `ValueError`: a length that the model cannot read.
        ValueError: an argument out of range, documents that are all too short, ids outside the vocabulary, a tokenizer
            without a mask token, or a model that is no masked LM.

    Source: Salazar et al. 2020 (arXiv 1910.14659), who mask one token at a time; here as many at once as in training
    (Devlin et al. 2019, arXiv 1810.04805), as the bits per character of Beltagy et al. 2020 (arXiv 2004.05150).
    """
    measured = identify(model, arm)
    default_bars = ["truncate"] if measured.is_patched else []
    settings = MaskedSettings(
        context_lengths=context_lengths, mask_share=mask_share, draws=draws, targets=targets,
        endpoints_per_document=endpoints_per_document, text_column=text_column, max_documents=max_documents,
        bars=default_bars if bars is None else bars,
        batch_size=batch_size, chunk=chunk, seed=seed, resamples=resamples,
    )  # fmt: skip
    check_masked(model)
    frame = frame_of(tokenizer)
    check_frame(frame, vocabulary(model))
    ids = read_documents(documents, tokenizer, text_column=text_column, max_documents=settings.max_documents)
    check_vocabulary(ids, vocabulary(model))
    settings, plan, skipped = cut(settings, ids, frame, measured)
    own = {length: plan[length] for length in settings.context_lengths}
    check_reach(model, own)
    scores = score_plan(model, own, settings, measured.name, progress)
    trained = measured.trained_length
    report = PseudoPerplexityReport(
        protocol={**asdict(settings), "digest": digest_of(own[settings.longest])},
        measurements=[
            measurement
            for length in own
            for measurement in placed_measurements(measured.name, length, own[length], scores[length], trained)
        ],
        records=measured.records,
        trained_length=trained,
        skipped=skipped,
        notes=[
            *measured.notes_beyond(settings.context_lengths),
            *left_out(skipped, len(ids), "too short, or without a masked token,"),
            *no_interval(len(ids) - len(skipped)),
        ],
    )
    add_masked_bars(report, model, settings, plan, {} if measured.is_patched else scores, progress)
    return report


def is_masked_lm(model: nn.Module) -> bool:
    """Whether a model is of a class that transformers loads as a masked LM, and no encoder-decoder."""
    network = causal_lm(model)
    return type(network).__name__ in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() and not is_encoder_decoder(network)


def check_masked(model: nn.Module) -> None:
    """Refuses a model that is no masked LM; whether it looks at the following tokens is measured.

    Raises:
        ValueError: says what is missing and what to do.
    """
    network = causal_lm(model)
    kind = type(network).__name__
    if is_encoder_decoder(network):
        raise ValueError(NOT_MASKED.format(what=f"{kind} is an encoder-decoder", hint="Encoders have one."))
    if is_headless(network):
        raise ValueError(NOT_MASKED.format(what=f"{kind} has no LM head", hint=HINT))
    if not sees_ahead(network):
        raise ValueError(NOT_MASKED.format(what=f"{kind} looks at the preceding tokens only", hint=CAUSAL))


def check_frame(frame: Frame, ids: int | None) -> None:
    """Refuses special tokens that the model has no embedding for.

    Raises:
        ValueError: names the id and the size of the vocabulary.
    """
    highest = max(*frame.prefix, *frame.suffix, frame.mask, 0)
    if ids is not None and highest >= ids:
        raise ValueError(
            f"The tokenizer has a special token with the id {highest}, but the model's ids are 0 to {ids - 1}. Give "
            "the tokenizer of this model."
        )


def cut(
    settings: MaskedSettings, documents: Sequence[Tensor], frame: Frame, measured: Arm
) -> tuple[MaskedSettings, MaskedPlan, list[int]]:
    """The settings with their number of targets, windows for each context length and for N, and documents left out.

    Raises:
        ValueError: no document is as long as the longest context, or none has a masked token.
    """
    trained = min(measured.trained_length or settings.longest, settings.longest)
    targets = settings.targets or default_targets(settings.context_lengths, trained, frame)
    plan, skipped = masked_windows(
        documents,
        {*settings.context_lengths, trained},
        frame=frame,
        targets=targets,
        endpoints_per_document=settings.endpoints_per_document,
        mask_share=settings.mask_share,
        draws=settings.draws,
        seed=settings.seed,
    )
    if len(skipped) == len(documents):
        needed = max(targets, settings.longest - frame.size)
        deepest = max(len(frame.strip(document)) for document in documents)
        if deepest < needed:
            raise ValueError(
                f"The longest context length is {settings.longest}, for which a document needs {needed} tokens besides "
                f"{frame.size} special ones; the longest document has {deepest}. Lower `context_lengths` or `targets`, "
                "or give longer documents."
            )
        raise ValueError(
            f"No token is masked: every document has {targets} targets, special tokens among them, and `mask_share` is "
            f"{settings.mask_share:g}. Raise `mask_share`, `draws` or `targets`."
        )
    return replace(settings, targets=targets), plan, skipped
