"""`posext compare`: many methods and the bars at several context lengths, on the same targets, with one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posext.cli._terminal import (
    BatchSizeOption,
    ContextLengthsOption,
    DocumentsOption,
    JsonOption,
    ModelArgument,
    PrefillChunkOption,
    StrideOption,
    TextColumnOption,
    TextOption,
    given,
    parse_lengths,
    parse_names,
    parse_options,
    quiet,
    show_report,
    write_report,
)
from hf_posext.cli.evaluate import load_for_scoring, read_texts

if TYPE_CHECKING:
    from hf_posext.evaluation.comparison_report import ComparisonReport

DYNAMIC = "dynamic"


def run(
    model: ModelArgument,
    context_lengths: ContextLengthsOption,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD,...",
            help="Methods, with options behind colons: pi,yarn,yarn:beta_fast=8,yarn:dynamic. All that need no option "
            "and apply to the model if not given.",
        ),
    ] = None,
    text: TextOption = None,
    text_column: TextColumnOption = "text",
    per_length: Annotated[
        bool,
        typer.Option(
            "--per-length/--once", help="Patch for each context length by the factor that it needs, or for the longest."
        ),
    ] = True,
    protocol: Annotated[str, typer.Option(help="tail, full, sliding or disjoint.")] = "tail",
    stride: StrideOption = None,
    targets: Annotated[int | None, typer.Option(help="Protocol tail: tokens scored at each endpoint.")] = None,
    endpoints: Annotated[
        int | None, typer.Option(help="Protocol tail: places in each document where targets end.")
    ] = None,
    bars: Annotated[
        str | None, typer.Option(help="Bars to beat, with commas: none, truncate, window; all if not given.")
    ] = None,
    documents: DocumentsOption = None,
    batch_size: BatchSizeOption = 1,
    prefill_chunk_size: PrefillChunkOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.html, .json, .csv and .md, plot.png and tradeoff.png."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare methods and the bars on the same tokens: perplexity, what is significant, and the price on short text."""
    lengths, texts = parse_lengths(context_lengths), read_texts(model, text)
    chosen = None if methods is None else parse_methods(methods)
    with quiet():
        from hf_posext.evaluation.comparison import compare

        network, tokenizer = load_for_scoring(model)
        more = {"targets": targets, "endpoints_per_document": endpoints, "stride": stride}
        report = compare(
            network,
            tokenizer,
            texts,
            methods=methods_for(network) if chosen is None else chosen,
            context_lengths=lengths,
            per_length=per_length,
            protocol=protocol,
            bars=parse_names(bars),
            text_column=text_column,
            max_documents=documents,
            batch_size=batch_size,
            prefill_chunk_size=prefill_chunk_size,
            **given(more),
        )
        files = [] if out is None else write(report, out)
    show_report(report, files, as_json=as_json)


def parse_methods(text: str) -> list[dict[str, Any]]:
    """Methods between commas, each a name with options as KEY=VALUE and the word `dynamic` behind colons.

    Raises:
        ValueError: a word that is no option.
    """
    return [parse_method(word) for word in parse_names(text) or ()]


def parse_method(text: str) -> dict[str, Any]:
    """One method as `compare` takes it.

    Raises:
        ValueError: a word that is no option.
    """
    name, *words = text.split(":")
    wrong = [word for word in words if word != DYNAMIC and "=" not in word]
    if wrong:
        raise ValueError(
            f"`--methods` takes KEY=VALUE or `{DYNAMIC}` behind a method, got {wrong[0]!r} in {text!r}. "
            "For example yarn:beta_fast=8:dynamic."
        )
    options = parse_options([word for word in words if word != DYNAMIC])
    return {"method": name, **options, **({DYNAMIC: True} if DYNAMIC in words else {})}


def methods_for(network: Any) -> list[str]:
    """Every method that applies to a model by itself, but for the one that is a bar."""
    from hf_posext.evaluation.protocols import BARS
    from hf_posext.inspection import list_methods

    return [
        info.name
        for info in list_methods(network)
        if info.name not in BARS and not any(isinstance(default, type) for default in info.options.values())
    ]


def write(report: ComparisonReport, out: Path) -> list[Path]:
    """Writes every form of a report into a folder; the page to look at comes first."""
    files = write_report(report, report.to_dict(), out)
    more = [out / name for name in ("report.html", "report.csv", "report.md", "tradeoff.png")]
    for path, save in zip(more, (report.to_html, report.to_csv, report.to_markdown, report.plot_tradeoff), strict=True):
        save(path)
    return [more[0], *files, *more[1:]]
