"""`posext finetune`: a run from a YAML file, in this process or under `accelerate launch`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from hf_posext.cli._terminal import JsonOption, ThreadsOption, load_model, load_tokenizer, quiet, show, show_json

STOPPED = 128 + signal.SIGTERM


def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run, as in recipes/configs.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a key of the file, as training.max_steps=50; repeatable."
        ),
    ] = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tune a patched model for a few hundred steps, save what was trained, and measure what it gained."""
    from hf_posext.training.config import FinetuneConfig

    settings = FinetuneConfig.from_yaml(config, overrides or ())
    if settings.model is None:
        raise ValueError(f"{str(config)!r} names no `model`. Add it, or give --set model=PATH.")
    with quiet():
        import torch
        from accelerate import PartialState

        from hf_posext.training.finetune import finetune

        torch.set_num_threads(threads or torch.get_num_threads())
        model = load_model(settings.model, dtype=torch.bfloat16 if settings.training.get("bf16") else torch.float32)
        result = finetune(model, load_tokenizer(settings.model), None, settings)
    if PartialState().is_main_process:
        if as_json:
            show_json(result.to_dict())
        else:
            show(result, "", f"saved {result.output_dir}")
    if result.metrics["is_interrupted"]:
        raise typer.Exit(STOPPED)
