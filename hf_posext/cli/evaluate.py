"""`posext eval`: perplexity at several context lengths, beside the bars that an extension has to beat."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posext.cli._terminal import (
    DEMO,
    DynamicOption,
    FactorOption,
    JsonOption,
    LayersOption,
    ModelArgument,
    OptionOption,
    TargetLengthOption,
    load_model,
    load_tokenizer,
    parse_options,
    quiet,
    show,
    show_json,
    write_report,
)


def run(
    model: ModelArgument,
    context_lengths: Annotated[str, typer.Option(metavar="N,N,...", help="Context lengths in tokens.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(help="A .txt file (one document), or .jsonl or .jsonl.gz (one per line); repeatable."),
    ] = None,
    text_column: Annotated[str, typer.Option(help="Key of the text in a .jsonl file.")] = "text",
    method: Annotated[
        str | None, typer.Option(help="Patch with this method first; without it, as the model is.")
    ] = None,
    factor: FactorOption = None,
    target_length: TargetLengthOption = None,
    dynamic: DynamicOption = False,
    layers: LayersOption = "full",
    option: OptionOption = None,
    protocol: Annotated[str, typer.Option(help="tail, full, sliding or disjoint.")] = "tail",
    stride: Annotated[int | None, typer.Option(help="Protocol sliding: tokens by which the window moves.")] = None,
    bars: Annotated[str | None, typer.Option(help="Bars to beat, with commas: truncate, window, none.")] = None,
    documents: Annotated[int | None, typer.Option(help="Read this many documents at most.")] = None,
    endpoints: Annotated[int, typer.Option(help="Protocol tail: places in each document where targets end.")] = 4,
    batch_size: Annotated[int, typer.Option(help="Windows per forward pass.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for report.json and plot.png.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity at several context lengths, on the same tokens, with intervals over documents."""
    lengths, options, texts = parse_lengths(context_lengths), parse_options(option), read_texts(model, text)
    if method is None and (options or dynamic or factor is not None or target_length is not None):
        raise ValueError(
            "`--factor`, `--target-length`, `--dynamic` and `--option` belong to a method. Give --method as well."
        )
    with quiet():
        from hf_posext.evaluation.perplexity import perplexity
        from hf_posext.patching import patch_model

        network, tokenizer = load_for_scoring(model)
        if method is not None:
            patch_model(network, method, factor, target_length=target_length, dynamic=dynamic, layers=layers, **options)
        report = perplexity(
            network,
            tokenizer,
            texts,
            context_lengths=lengths,
            protocol=protocol,
            stride=stride,
            bars=None if bars is None else [bar.strip() for bar in bars.split(",") if bar.strip()],
            text_column=text_column,
            max_documents=documents,
            endpoints_per_document=endpoints,
            batch_size=batch_size,
        )
        files = [] if out is None else write_report(report, report.to_dict(), out)
    if as_json:
        show_json(report.to_dict())
    else:
        show(report, *(f"saved {path}" for path in files))


def parse_lengths(text: str) -> list[int]:
    """Whole numbers between commas.

    Raises:
        ValueError: anything else.
    """
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(
            f"`--context-lengths` must be whole numbers between commas, got {text!r}. For example 256,1024."
        ) from None


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
