"""`posext inspect`: how a model encodes position, and the patch that is in force."""

from __future__ import annotations

from hf_posext.cli._terminal import JsonOption, ModelArgument, load_model, quiet, show_report


def run(model: ModelArgument, as_json: JsonOption = False) -> None:
    """Show how a model encodes position, how long it was trained for, and what patch it has."""
    with quiet():
        from hf_posext.inspection import inspect_model

        report = inspect_model(load_model(model))
    show_report(report, as_json=as_json)
