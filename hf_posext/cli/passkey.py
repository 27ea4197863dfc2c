"""`posext passkey`: what a model retrieves from far back, over depths and context lengths, beside the bars to beat."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posext.cli._terminal import (
    ContextLengthsOption,
    DynamicOption,
    FactorOption,
    JsonOption,
    LayersOption,
    MethodOption,
    ModelArgument,
    OptionOption,
    ReportOption,
    TargetLengthOption,
    TextColumnOption,
    check_method,
    given,
    parse_lengths,
    parse_names,
    patch_arguments,
    quiet,
    show_report,
    write_report,
)
from hf_posext.cli.evaluate import load_for_scoring, read_file


def run(
    model: ModelArgument,
    context_lengths: ContextLengthsOption,
    probe: Annotated[
        str, typer.Option(help="passkey, copy, repeat or key_value; a tiny model can do copy best.")
    ] = "passkey",
    depths: Annotated[
        str | None, typer.Option(metavar="D,D,...", help="Where the answer stands, 0 start to 1 end of the context.")
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Trials at each depth and length; 10 if not given.")] = None,
    answer_length: Annotated[
        int | None, typer.Option(help="Digits of a key, tokens of a copy; 5 if not given.")
    ] = None,
    wording: Annotated[str | None, typer.Option(help="Of a passkey: auto (if not given), plain or landmark.")] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text to hide the answer in: a .txt, .jsonl or .jsonl.gz file; repeatable."),
    ] = None,
    text_column: TextColumnOption = "text",
    method: MethodOption = None,
    factor: FactorOption = None,
    target_length: TargetLengthOption = None,
    dynamic: DynamicOption = False,
    layers: LayersOption = "full",
    option: OptionOption = None,
    bars: Annotated[
        str | None, typer.Option(help="Bars to beat, with commas: truncate, window, none; empty for no bar.")
    ] = None,
    gate: Annotated[float | None, typer.Option(help="Accuracy within the trained length that is needed.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Prompts per pass.")] = None,
    seed: Annotated[int, typer.Option(help="Of keys, random strings and filler.")] = 0,
    out: ReportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what a model retrieves from far back: exact answers at each depth of each context length.

    A context length is that of prompt and answer together.

    Where the model cannot do the probe within its trained length, the result says that it is vacuous.
    """
    lengths, patch = parse_lengths(context_lengths), patch_arguments(factor, target_length, dynamic, option)
    check_method(method, patch)
    places = None if depths is None else parse_depths(depths)
    texts = None if not text else [document for path in text for document in read_file(path)]
    with quiet():
        from hf_posext.evaluation.passkey import passkey
        from hf_posext.patching import patch_model

        network, tokenizer = load_for_scoring(model)
        if method is not None:
            patch_model(network, method, layers=layers, **patch)
        more = {
            "depths": places, "trials": trials, "answer_length": answer_length, "wording": wording, "gate": gate,
            "batch_size": batch_size, "bars": parse_names(bars),
        }  # fmt: skip
        report: Any = passkey(
            network, tokenizer, context_lengths=lengths, probe=probe, documents=texts, text_column=text_column,
            seed=seed, **given(more),
        )  # fmt: skip
        files = [] if out is None else write_report(report, report.to_dict(), out)
    show_report(report, files, as_json=as_json)


def parse_depths(text: str) -> list[float]:
    """Numbers between commas.

    Raises:
        ValueError: anything else.
    """
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"`--depths` must be numbers between commas, got {text!r}. For example 0,0.5,1.") from None
