"""`posext methods`: the methods, all of them or those that have a meaning for a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hf_posext.cli._terminal import JsonOption, load_model, quiet, show, show_json

if TYPE_CHECKING:
    from hf_posext.contract import MethodInfo

FOLLOWING = (
    "note: with --dynamic (in Python dynamic=True) what a method does follows the length of the text; dynamic_ntk, and "
    "longrope with a short_factor, do so by themselves."
)


def run(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="List only what applies to it: a folder, a hub id, demo:llama."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the methods with their options and papers, all of them or those that apply to a model."""
    with quiet():
        from hf_posext.inspection import list_methods

        found = list_methods(None if model is None else load_model(model))
    if as_json:
        show_json({"model": model, "methods": [as_data(info) for info in found]})
    else:
        show(as_table(found), FOLLOWING)


def as_data(info: MethodInfo) -> dict[str, Any]:
    """One method as plain data; options without a default are listed as `required`."""
    required = [name for name, default in info.options.items() if isinstance(default, type)]
    return {
        "name": info.name,
        "aliases": info.aliases,
        "mechanisms": info.mechanisms,
        "summary": info.summary,
        "paper": info.paper,
        "options": {name: default for name, default in info.options.items() if name not in required},
        "required": required,
    }


def as_table(found: list[MethodInfo]) -> Table:
    """One row per method."""
    table = Table("method", "for", "what it does", "options")
    for info in found:
        row = as_data(info)
        options = [f"{name}=..." for name in row["required"]]
        options += [f"{name}={json.dumps(default)}" for name, default in row["options"].items()]
        table.add_row(
            "\n".join([info.name, *(f"({alias})" for alias in info.aliases)]),
            "\n".join(info.mechanisms),
            f"{info.summary}\n{info.paper}",
            "\n".join(options),
        )
    return table
