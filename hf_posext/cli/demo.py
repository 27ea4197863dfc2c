"""`posext demo`: the whole story on an embedded model, offline: inspect, patch, measure, tune, read the numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from hf_posext.cli import demo_encoder, demo_tuning
from hf_posext.cli._terminal import DEMO, JsonOption, ThreadsOption, quiet, show, show_json, write_report
from hf_posext.cli.words import verdict

if TYPE_CHECKING:
    from hf_posext.evaluation.comparison_report import ComparisonReport
    from hf_posext.evaluation.perplexity_report import PerplexityReport

METHODS = ("pi", "ntk", "ntk_by_parts", "yarn", "self_extend", "rerope")
DYNAMIC = "yarn (dynamic)"
PATCHED = (*METHODS, DYNAMIC)
ABLATIONS = ("alibi", "nope")
Told = dict[str, Any]
NOTE = (
    "`none` is not patched; `truncate` is not patched and given the last {trained} tokens only; `window` is the model "
    "of which each token sees only the last {trained}, otherwise not patched; "
    f"the factor of `{DYNAMIC}` follows the length of the text; "
    "no factor bears on `alibi` and `nope`: they are ablations here, because a model trained with another encoding has "
    "to be tuned before it can use them."
)


@dataclass(frozen=True)
class Scope:
    """How much is measured.

    Attributes:
        factors: context lengths as multiples of the trained length; the first is 1.
        documents: documents read at most; None reads all.
        endpoints: places in each document where targets end.
        targets: tokens scored at each.
    """

    factors: tuple[int, ...] = (1, 2, 4, 8, 16)
    documents: int | None = None
    endpoints: int = 1
    targets: int = 128


QUICK = Scope(factors=(1, 2, 4), documents=8)


def run(
    quick: Annotated[
        bool, typer.Option("--quick", help="Up to 4 times the trained length, fewer books, and no tuning.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for report.json, plot.png and what was tuned.")] = Path(
        "posext_demo"
    ),
    model: Annotated[str, typer.Option(help="Name of an embedded model: llama, gpt_neox or bert.")] = "llama",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show on a tiny embedded model what context extension gains, and what it costs. No network, no GPU."""
    started = time.perf_counter()
    with quiet():
        import torch

        from hf_posext.demo import load_demo
        from hf_posext.evaluation.pseudo_perplexity import is_masked_lm
        from hf_posext.inspection import inspect_model

        torch.set_num_threads(threads or torch.get_num_threads())
        network, tokenizer, documents = load_demo(model.removeprefix(DEMO))
        positions = inspect_model(network)
        if not as_json:
            show(positions, "")
        is_encoder = is_masked_lm(network)
        tell = tell_encoder if is_encoder else tell_decoder
        report, told = tell(network, tokenizer, documents, quick)
        data = report.to_dict() | {"inspect": positions.to_dict()} | told
        tuned = None if quick or is_encoder else demo_tuning.tune(network, tokenizer, documents, out / "tuned")
        if tuned is not None:
            data |= {"tuned": tuned.to_dict(), "reading": [*data["reading"], *demo_tuning.read(tuned)]}
        files = write_report(report, data, out)
    if as_json:
        show_json(data | {"files": [str(path) for path in files]})
    else:
        show(
            report,
            "",
            *((tuned, "") if tuned is not None else ()),
            *(Text(f"- {sentence}") for sentence in data["reading"]),
            "",
        )
        show(*(f"saved {path}" for path in files))
    typer.echo(f"took {time.perf_counter() - started:.1f} s", err=True)


def tell_decoder(model: Any, tokenizer: Any, documents: Sequence[str], quick: bool) -> tuple[PerplexityReport, Told]:
    """Measures a causal model; gives its perplexities, and what else belongs into the file."""
    from hf_posext.evaluation.perplexity_report import PerplexityReport

    report = measure(model, tokenizer, documents, QUICK if quick else Scope())
    return PerplexityReport.join([report]), {"short_text": report.price.rows, "reading": read(report)}


def tell_encoder(model: Any, tokenizer: Any, documents: Sequence[str], quick: bool) -> tuple[PerplexityReport, Told]:
    """Measures a masked LM; gives the report, and what else belongs into the file."""
    scope = demo_encoder.QUICK if quick else demo_encoder.EncoderScope()
    trained = int(model.config.max_position_embeddings)
    lengths = tuple(trained * factor for factor in scope.factors)
    report = demo_encoder.EncoderMeter(model, tokenizer, documents, lengths, scope).measure()
    return report, {"reading": demo_encoder.read(report, lengths)}


def measure(model: Any, tokenizer: Any, documents: Sequence[str], scope: Scope) -> ComparisonReport:
    """Scores the same targets unpatched, with the bars, and patched by each method in turn.

    Args:
        model: the model, not patched.
        tokenizer: its tokenizer.
        documents: texts.
        scope: how much is measured.
    """
    from hf_posext.evaluation.comparison import compare

    trained = int(model.config.max_position_embeddings)
    report = compare(
        model,
        tokenizer,
        documents,
        methods=[
            *METHODS,
            {"method": "yarn", "dynamic": True},
            *({"method": name, "per_length": False} for name in ABLATIONS),
        ],
        context_lengths=[trained * factor for factor in scope.factors],
        targets=scope.targets,
        endpoints_per_document=scope.endpoints,
        max_documents=scope.documents,
    )
    report.notes.insert(0, NOTE.format(trained=trained))
    return report


def read(report: ComparisonReport) -> list[str]:
    """What the numbers say, in sentences made from them; "clearly" means that the paired 95 % interval leaves out 0."""
    from hf_posext.evaluation.protocols import HONEST

    trained, *lengths = report.protocol["context_lengths"]
    longest = lengths[-1]
    rows = perplexities(report)
    unpatched = report.difference("none", "truncate", longest)
    sentences = [
        f"Unpatched: {rows['none', longest]:.1f} with {longest} tokens of context, {rows['truncate', longest]:.1f} "
        f"with only the last {trained} of them, {rows['window', longest]:.1f} with a window of {trained}. Reading past "
        f"the trained length is {verdict(unpatched)} against truncating."
    ]
    for length in lengths:
        best = min(PATCHED, key=lambda arm: rows[arm, length])
        against = {bar: verdict(report.difference(best, bar, length)) for bar in HONEST}
        sentences.append(
            f"With {length} tokens of context `{best}` is the best with {rows[best, length]:.1f}, against "
            f"{rows['none', length]:.1f} unpatched and {rows['truncate', length]:.1f} truncated. "
            f"Against truncating it is {against['truncate']}, against a window {against['window']}."
        )
    price = {row["arm"]: row["perplexity"] for row in report.price.rows}
    costs = ", ".join(f"{price[arm]:.1f} with `{arm}`" for arm in PATCHED)
    sentences.append(
        f"The price on short text, patched for {longest} tokens and given {trained}: {costs}, "
        f"{price['none']:.1f} unpatched. {price_of_dynamic(report)}"
    )
    sentences.append(about_ablations(report))
    return sentences


def about_ablations(report: ComparisonReport) -> str:
    """What is left of the model without the encoding that it was trained with, at the longest context."""
    rows, length = perplexities(report), report.protocol["context_lengths"][-1]
    numbers = " and ".join(f"{rows[arm, length]:.1f} with `{arm}`" for arm in ABLATIONS)
    return (
        f"Without the encoding that the model was trained with: {numbers} at {length} tokens of context. These are "
        "untuned ablations: on a model trained with another encoding both need tuning before they are of any use."
    )


def price_of_dynamic(report: ComparisonReport) -> str:
    """Whether text of the trained length is read by the dynamic arm as by the unpatched model, to the last bit."""
    nll = {measurement.arm: measurement.nll for measurement in report.short}
    if nll[DYNAMIC] == nll["none"]:
        return f"`{DYNAMIC}` pays nothing: its sum over every document is that of the unpatched model to the last bit."
    found = report.price.difference(DYNAMIC, "none", report.protocol["context_lengths"][0])
    return f"`{DYNAMIC}` against unpatched is {verdict(found)}."


def perplexities(report: PerplexityReport) -> dict[tuple[str, int], float]:
    """Perplexity of each arm at each context length."""
    return {(row["arm"], row["context_length"]): row["perplexity"] for row in report.rows}
