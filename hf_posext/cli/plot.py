"""`posext plot`: pictures of reports, and of how a model encodes position before and after a method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_posext.cli._terminal import (
    DynamicOption,
    FactorOption,
    JsonOption,
    LayersOption,
    OptionOption,
    TargetLengthOption,
    check_method,
    load_model,
    patch_arguments,
    quiet,
    show,
    show_json,
)
from hf_posext.errors import unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_posext.evaluation.perplexity_report import PerplexityReport

OF_REPORTS = ("perplexity", "loss", "training")
OF_MODELS = ("spectrum", "sinusoids", "bias")
SEVERAL = ("spectrum", "bias")  # pictures that can show several methods
MASKED = "mask_share"  # a setting of pseudo-perplexity alone


def run(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="perplexity, loss, training, spectrum, sinusoids or bias.")
    ],
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="For the first three report.json files (several are joined, of a training run one), else one MODEL: "
            "a folder, a hub id, or demo:llama, demo:gpt_neox, demo:bert.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write, .png, .svg or .pdf.")],
    dark: Annotated[bool, typer.Option("--dark", help="Light lines on a dark background.")] = False,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Show a model with this method too; repeatable for spectrum and bias."),
    ] = None,
    factor: FactorOption = None,
    target_length: TargetLengthOption = None,
    dynamic: DynamicOption = False,
    layers: LayersOption = "full",
    option: OptionOption = None,
    reach: Annotated[
        int | None, typer.Option(help="bias, sinusoids: tokens up to which to look; the target length if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw perplexity, loss by position or a training curve of reports, or the position encoding of a model."""
    arguments = patch_arguments(factor, target_length, dynamic, option)
    check_words(kind, sources, method or [], arguments, reach)
    with quiet():
        from hf_posext.evaluation.plots import check_suffix, save_figure

        check_suffix(out)
        if kind in OF_REPORTS:
            figure = draw_reports(kind, [read_report(source) for source in sources])
        else:
            arguments |= {"layers": layers} if method else {}
            figure = draw_model(kind, load_model(sources[0]), method or [None], arguments, reach)
        save_figure(figure, out, dark=dark)
    if as_json:
        show_json({"kind": kind, "sources": sources, "out": str(out)})
    else:
        show(f"saved {out}")


def check_words(
    kind: str, sources: list[str], methods: list[str], arguments: dict[str, Any], reach: int | None
) -> None:
    """Refuses words that do not go together, before anything is loaded.

    Raises:
        ValueError: with the word.
    """
    if kind not in (*OF_REPORTS, *OF_MODELS):
        raise ValueError(unknown("kind of picture", kind, (*OF_REPORTS, *OF_MODELS)))
    if kind in OF_REPORTS and (methods or arguments or reach is not None):
        raise ValueError(f"`{kind}` is drawn from reports, which methods do not change. Leave out what is about one.")
    if kind not in ("perplexity", "loss") and len(sources) > 1:
        raise ValueError(f"`{kind}` is drawn of one source, got {len(sources)}: {sources}. Draw each by itself.")
    check_method(methods, arguments)
    if kind == "spectrum" and reach is not None:
        raise ValueError(f"`--reach` is for bias and sinusoids, got {reach} with spectrum. Leave it out.")
    if len(methods) > 1 and kind not in SEVERAL:
        raise ValueError(f"`{kind}` shows one method, got {methods}. Draw each by itself.")


def draw_model(kind: str, model: Any, methods: list[Any], arguments: dict[str, Any], reach: int | None) -> Figure:
    """The picture of a model, with each of some methods (None: as it is)."""
    from hf_posext.evaluation import pictures
    from hf_posext.evaluation.profiles import profiles_of

    if kind == "spectrum":
        return pictures.plot_spectrum([pictures.spectrum_of(model, method, **arguments) for method in methods])
    if kind == "sinusoids":
        return pictures.plot_sinusoids(model, methods[0], positions=reach, **arguments)
    return pictures.plot_bias_profile([profiles_of(model, method, reach=reach, **arguments) for method in methods])


def draw_reports(kind: str, found: list[dict[str, Any]]) -> Figure:
    """The picture of reports as plain data.

    Raises:
        ValueError: reports of another kind, or that cannot be joined.
    """
    from hf_posext.evaluation.pictures import plot_position_loss

    if kind == "training":
        return draw_training(found[0])
    report = joined(found)
    return plot_position_loss(report) if kind == "loss" else report.plot()


def draw_training(data: dict[str, Any]) -> Figure:
    """The curve of a training run, and perplexity before and after where it was measured.

    Raises:
        ValueError: the report is not of a training run.
    """
    from torch import nn

    from hf_posext.training.plots import plot_finetuning
    from hf_posext.training.result import FinetuneResult

    if "history" not in data:
        raise ValueError("The report has no `history`, so it is not of `posext finetune`. Draw its `perplexity`.")
    evaluation = joined([data]) if "protocol" in data else None
    result = FinetuneResult(
        nn.Module(), data["metrics"], Path(data["output_dir"]), data["history"], evaluation, data["config"]
    )  # the curve needs no weights
    return plot_finetuning(result)


def joined(found: list[dict[str, Any]]) -> PerplexityReport:
    """One report of perplexity, or of pseudo-perplexity.

    Raises:
        ValueError: another kind of report, or reports that were measured differently.
    """
    from hf_posext.evaluation.perplexity_report import PerplexityReport
    from hf_posext.evaluation.protocols import PROTOCOLS
    from hf_posext.evaluation.pseudo_report import PseudoPerplexityReport

    settings = [data.get("protocol") or {} for data in found]
    kinds = [PseudoPerplexityReport if MASKED in each else PerplexityReport for each in settings]
    for kind, each in zip(kinds, settings, strict=True):
        if kind is PerplexityReport and each.get("protocol") not in PROTOCOLS:
            raise ValueError(
                "The report is not one of perplexity. Give a report.json of `posext eval`, `demo` or `finetune`."
            )
    reports: list[Any] = [kind.from_dict(data) for kind, data in zip(kinds, found, strict=True)]
    return kinds[0].join(reports)


def read_report(name: str) -> dict[str, Any]:
    """A report as plain data; of a folder its report.json.

    Raises:
        OSError: there is no such file.
        ValueError: it is no JSON object.
    """
    path = Path(name) / "report.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise FileNotFoundError(f"There is no report {str(path)!r}. Give a report.json, or the folder with it.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error}). Give a report.json that posext wrote.") from error
    if not isinstance(data, dict):
        raise ValueError(f"{str(path)!r} is a {type(data).__name__} and no report. Give a report.json of posext.")
    return data
