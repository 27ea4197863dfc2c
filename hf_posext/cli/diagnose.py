"""`posext diagnose`: whether position is in effect in a model, and as its config, patch and tokenizer say."""

from __future__ import annotations

import typer

from hf_posext.cli._terminal import JsonOption, ModelArgument, load_model, load_tokenizer, quiet, show_report

FAULTY = 1  # exit code where something is wrong


def run(model: ModelArgument, as_json: JsonOption = False) -> None:
    """Check that position is in effect in a model, and as its config, patch and tokenizer say; exit code 1 if not."""
    with quiet():
        from hf_posext.diagnosis import diagnose

        report = diagnose(load_model(model), load_tokenizer(model))
    show_report(report, as_json=as_json)
    if not report.is_healthy:
        raise typer.Exit(FAULTY)
