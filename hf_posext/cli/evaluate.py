"""`posext eval`: perplexity, of a masked LM pseudo-perplexity, at several context lengths, beside the bars to beat."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posext.cli._terminal import (
    DEMO,
    BatchSizeOption,
    ContextLengthsOption,
    DocumentsOption,
    DynamicOption,
    FactorOption,
    JsonOption,
    LayersOption,
    MethodOption,
    ModelArgument,
    OptionOption,
    PrefillChunkOption,
    ReportOption,
    StrideOption,
    TargetLengthOption,
    TextColumnOption,
    TextOption,
    check_method,
    given,
    load_model,
    load_tokenizer,
    parse_lengths,
    parse_names,
    patch_arguments,
    quiet,
    show_report,
    write_report,
)

if TYPE_CHECKING:
    from hf_posext.evaluation.perplexity_report import PerplexityReport


def run(
    model: ModelArgument,
    context_lengths: ContextLengthsOption,
    text: TextOption = None,
    text_column: TextColumnOption = "text",
    method: MethodOption = None,
    factor: FactorOption = None,
    target_length: TargetLengthOption = None,
    dynamic: DynamicOption = False,
    layers: LayersOption = "full",
    option: OptionOption = None,
    protocol: Annotated[
        str | None, typer.Option(help="Causal models: tail (if not given), full, sliding or disjoint.")
    ] = None,
    stride: StrideOption = None,
    mask_share: Annotated[float | None, typer.Option(help="Masked LMs: share of the tokens masked at a time.")] = None,
    draws: Annotated[int | None, typer.Option(help="Masked LMs: passes, each with other tokens masked.")] = None,
    bars: Annotated[
        str | None, typer.Option(help="Bars to beat, with commas: truncate, none, for causal models also window.")
    ] = None,
    documents: DocumentsOption = None,
    endpoints: Annotated[
        int | None, typer.Option(help="Protocol tail and masked LMs: places in each document where targets end.")
    ] = None,
    batch_size: BatchSizeOption = 1,
    prefill_chunk_size: PrefillChunkOption = None,
    out: ReportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity at several context lengths, on the same tokens, with intervals over documents.

    Of a masked LM it is the pseudo-perplexity, positions up to the trained length and beyond it apart.
    """
    lengths, texts = parse_lengths(context_lengths), read_texts(model, text)
    patch = patch_arguments(factor, target_length, dynamic, option)
    check_method(method, patch)
    with quiet():
        from hf_posext.patching import patch_model

        network, tokenizer = load_for_scoring(model)
        causal = {"protocol": protocol, "stride": stride, "prefill_chunk_size": prefill_chunk_size}
        measure = choose(network, causal, {"mask_share": mask_share, "draws": draws})
        if method is not None:
            patch_model(network, method, layers=layers, **patch)
        report = measure(
            network,
            tokenizer,
            texts,
            context_lengths=lengths,
            bars=parse_names(bars),
            text_column=text_column,
            max_documents=documents,
            batch_size=batch_size,
            **given({"endpoints_per_document": endpoints}),
        )
        files = [] if out is None else write_report(report, report.to_dict(), out)
    show_report(report, files, as_json=as_json)


def choose(network: Any, causal: dict[str, Any], masked: dict[str, Any]) -> Callable[..., PerplexityReport]:
    """The evaluation that a model needs, with the options that are its own.

    Args:
        network: the model.
        causal: options for causal models, None where they were not given.
        masked: the same for masked LMs.

    Raises:
        ValueError: an option for the other kind of model.
    """
    from hf_posext.evaluation.perplexity import perplexity
    from hf_posext.evaluation.pseudo_perplexity import is_masked_lm, pseudo_perplexity

    is_masked = is_masked_lm(network)
    own, others, kind = (masked, causal, "causal models") if is_masked else (causal, masked, "masked LMs")
    for name, value in given(others).items():
        word = f"--{name.replace('_', '-')}"
        raise ValueError(f"`{word}` is for {kind}, got {value!r} with {type(network).__name__}. Leave it out.")
    return partial(pseudo_perplexity if is_masked else perplexity, **given(own))


def read_texts(model: str, files: list[Path] | None) -> list[Any]:
    """The documents of the given files, in their order; those of the demo for an embedded model without any.

    Raises:
        ValueError: no file given, or a line that is no JSON.
        OSError: a file that cannot be read.
    """
    if files:
        return [document for path in files for document in read_file(path)]
    if model.startswith(DEMO):
        from hf_posext.demo import held_out_documents

        return list(held_out_documents())
    raise ValueError(
        "There is nothing to read. Give --text FILE, a .txt, .jsonl or .jsonl.gz file, once or several times."
    )


def read_file(path: Path) -> list[Any]:
    """One string of a .txt file, or one object per line of a .jsonl or .jsonl.gz file.

    Raises:
        ValueError: another suffix, or a line that is no JSON object.
        OSError: the file cannot be read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. `--text` takes .txt, .jsonl and .jsonl.gz files.")
    if path.suffix == ".txt":
        return [path.read_text(encoding="utf-8")]
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ValueError(
            f"`--text` takes .txt, .jsonl and .jsonl.gz files, got {str(path)!r}. Convert it to one of them."
        )
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [parse_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def parse_line(line: str, place: str) -> dict[str, Any]:
    """A row of a .jsonl file.

    Raises:
        ValueError: says where the row is that is no JSON object.
    """
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON ({error}). Each line must be one object with a text.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place} is a {type(row).__name__}. Each line must be one object with a text.")
    return row


def load_for_scoring(name: str) -> tuple[Any, Any]:
    """Model and tokenizer; on a CPU in float32 (bfloat16 is slow there), on a GPU in the precision of the checkpoint.

    Raises:
        ValueError: there is no tokenizer.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    model = load_model(name, dtype="auto" if on_gpu else torch.float32).to("cuda" if on_gpu else "cpu")
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        raise ValueError(f"{name!r} has no tokenizer, and text is to be read. Save one into its folder.")
    return model, tokenizer
