"""`posext patch`: a model with longer context in a folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posext.cli._terminal import (
    DynamicOption,
    FactorOption,
    JsonOption,
    LayersOption,
    ModelArgument,
    OptionOption,
    TargetLengthOption,
    load_model,
    load_tokenizer,
    locate,
    parse_options,
    quiet,
    show,
    show_json,
)

if TYPE_CHECKING:
    from torch import nn


def run(
    model: ModelArgument,
    out: Annotated[Path, typer.Option(help="Folder for the patched model and its tokenizer.")],
    method: Annotated[str, typer.Option(help="Name or alias of a method, see `posext methods`.")] = "yarn",
    factor: FactorOption = None,
    target_length: TargetLengthOption = None,
    dynamic: DynamicOption = False,
    layers: LayersOption = "full",
    option: OptionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change how a model encodes position, save it, and say what loads it."""
    options = parse_options(option)
    with quiet():
        from hf_posext.inspection import inspect_model
        from hf_posext.patching import patch_model

        check_folder(out, model)
        network, tokenizer = load_model(model), load_tokenizer(model)
        patch_model(
            network,
            method,
            factor,
            target_length=target_length,
            dynamic=dynamic,
            layers=layers,
            tokenizer=tokenizer,
            **options,
        )
        loader = save(network, tokenizer, out)
        report = inspect_model(network)
    if as_json:
        saved = {"model": model, "out": str(out), "loads_with": loader, "has_tokenizer": tokenizer is not None}
        show_json({**saved, "record": report.record, "inspect": report.to_dict()})
        return
    words = "with its tokenizer" if tokenizer is not None else "without a tokenizer, since none was found"
    show(report, f"saved to {out} {words}", f"load it with {loader}")


def check_folder(out: Path, model: str) -> None:
    """Refuses to write over a file or over the model that is read.

    Raises:
        ValueError: says which of both.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"`--out` must be a folder, got the file {str(out)!r}. Name another place.")
    if out.resolve() == Path(locate(model)).resolve():
        raise ValueError(f"`--out` is the folder of the model itself, {str(out)!r}. Name another place.")


def save(network: nn.Module, tokenizer: Any, out: Path) -> str:
    """Writes model and tokenizer; returns the call that loads them.

    An adapter is saved without its base, so its folder gets the record of the patch.
    """
    from hf_posext.loading import ADAPTER_CONFIG
    from hf_posext.records import record_of, write_record

    out.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(out)  # type: ignore[operator]
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    record = record_of(network)
    is_adapter = (out / ADAPTER_CONFIG).is_file()
    if is_adapter:
        write_record(network, out)
    if is_adapter or record is None or record.native is None:
        return f"hf_posext.load_pretrained({str(out)!r})"
    return f"plain transformers, {type(network).__name__}.from_pretrained({str(out)!r})"
