"""`posext suggest`: which method to use for a longer context, with which arguments, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_posext.cli._terminal import (
    JsonOption,
    ModelArgument,
    TextColumnOption,
    TextOption,
    load_model,
    quiet,
    show,
    show_json,
)
from hf_posext.cli.evaluate import load_for_scoring, read_file


def run(
    model: ModelArgument,
    target_length: Annotated[int, typer.Option(help="Tokens that the model shall read.")],
    text: TextOption = None,
    text_column: TextColumnOption = "text",
    time_budget: Annotated[float, typer.Option(help="With --text: seconds for measuring on it.")] = 300.0,
    tuned: Annotated[bool, typer.Option("--tuned", help="The model will be tuned after the patch.")] = False,
    portable: Annotated[
        bool, typer.Option("--portable", help="Plain transformers, and what reads its configs, must load the result.")
    ] = False,
    original_max_position_embeddings: Annotated[
        int | None, typer.Option(help="The trained length in tokens, where the config does not say it.")
    ] = None,
    short_text: Annotated[
        bool,
        typer.Option("--short-text/--no-short-text", help="Text up to the trained length has to be read as before."),
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Say which method to use and why: by rules from the model, with --text by measuring on it within a time budget."""
    documents = None if not text else [document for path in text for document in read_file(path)]
    with quiet():
        from hf_posext.suggestion import suggest

        network, tokenizer = (load_model(model), None) if documents is None else load_for_scoring(model)
        suggestion = suggest(
            network,
            target_length,
            documents,
            tokenizer=tokenizer,
            tuned=tuned,
            portable=portable,
            short_text=short_text,
            time_budget=time_budget,
            original_max_position_embeddings=original_max_position_embeddings,
            text_column=text_column,
        )
    command = suggestion.command(model)
    if as_json:
        show_json({**suggestion.to_dict(), "command": command})
    else:
        show(suggestion, *([command] if command else []))
