"""`posext demo`: the whole story on an embedded model, offline: inspect, patch, measure, tune, read the numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from hf_posext.cli import demo_encoder, demo_tuning
from hf_posext.cli._terminal import DEMO, JsonOption, quiet, show, show_json, write_report
from hf_posext.cli.words import verdict

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hf_posext.evaluation.perplexity import PerplexityReport

METHODS = ("pi", "ntk", "ntk_by_parts", "yarn", "self_extend", "rerope")
DYNAMIC = "yarn (dynamic)"
PATCHED = (*METHODS, DYNAMIC)
ABLATIONS = ("alibi", "nope")
Told = dict[str, Any]
NOTE = (
    "`none` is not patched; `truncate` is not patched and given the last {trained} tokens only; `window` is the model "
    "of which each token sees only the last {trained}, otherwise not patched; each method is patched for each context "
    "length T by the factor T / {trained}, so at {trained} it changes nothing; "
    f"`{DYNAMIC}` is patched once, for {{longest}} tokens, and its factor follows the length of the text; "
    "`alibi` and `nope` are patched once as well, since no factor bears on them: they are ablations here, because a "
    "model trained with another encoding has to be tuned before it can use them."
)


@dataclass(frozen=True)
class Scope:
    """How much is measured.

    Attributes:
        factors: context lengths as multiples of the trained length; the first is 1.
        ablated: those of them at which `alibi` and `nope` are measured.
        documents: documents read at most; None reads all.
        endpoints: places in each document where targets end.
        targets: tokens scored at each.
    """

    factors: tuple[int, ...] = (1, 2, 4, 8, 16)
    ablated: tuple[int, ...] = (1, 4)
    documents: int | None = None
    endpoints: int = 1
    targets: int = 128


QUICK = Scope(factors=(1, 2, 4), documents=8)


@dataclass(frozen=True)
class Story:
    """What was measured.

    Attributes:
        gain: the bars, each method patched with the factor that fits each context length, yarn patched once for the
            longest context with a factor that follows the length of the text, and at a few lengths the ablations.
        price: contexts of the trained length only, unpatched and patched for the longest context.
    """

    gain: PerplexityReport
    price: PerplexityReport

    @property
    def reach(self) -> tuple[int, int]:
        """Trained length and longest context, in tokens."""
        lengths = self.gain.protocol["context_lengths"]
        return lengths[0], lengths[-1]


def run(
    quick: Annotated[
        bool, typer.Option("--quick", help="Up to 4 times the trained length, fewer books, and no tuning.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for report.json, plot.png and what was tuned.")] = Path(
        "posext_demo"
    ),
    model: Annotated[str, typer.Option(help="Name of an embedded model: llama, gpt_neox or bert.")] = "llama",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; as torch chooses if not given.")] = None,
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
    """Measures a causal model; gives the report, and what else belongs into the file."""
    story = measure(model, tokenizer, documents, int(model.config.max_position_embeddings), QUICK if quick else Scope())
    return story.gain, {"short_text": story.price.rows, "reading": read(story)}


def tell_encoder(model: Any, tokenizer: Any, documents: Sequence[str], quick: bool) -> tuple[PerplexityReport, Told]:
    """Measures a masked LM; gives the report, and what else belongs into the file."""
    scope = demo_encoder.QUICK if quick else demo_encoder.EncoderScope()
    trained = int(model.config.max_position_embeddings)
    lengths = tuple(trained * factor for factor in scope.factors)
    report = demo_encoder.EncoderMeter(model, tokenizer, documents, lengths, scope).measure()
    return report, {"reading": demo_encoder.read(report, lengths)}


@dataclass(frozen=True)
class Meter:
    """Scores one model at one context length after the other, always on the targets that the longest context has.

    Attributes:
        model: the model, not patched.
        tokenizer: its tokenizer.
        documents: token ids, each int64 [tokens].
        longest: the longest context length in tokens.
        scope: how much is measured.
    """

    model: nn.Module
    tokenizer: Any
    documents: list[Tensor]
    longest: int
    scope: Scope

    def score(self, context_lengths: list[int], **arguments: Any) -> PerplexityReport:
        """Perplexity at some context lengths, the model as it is now.

        `perplexity` spreads the endpoints from the first that is deep enough for its longest context. Tokens that no
        shorter context can reach are cut off in front, so that the endpoints stay those of the longest.
        """
        from hf_posext.evaluation.perplexity import perplexity

        return perplexity(
            self.model,
            self.tokenizer,
            [document[self.longest - max(context_lengths) :] for document in self.documents],
            context_lengths=context_lengths,
            targets=self.scope.targets,
            endpoints_per_document=self.scope.endpoints,
            **arguments,
        )

    def score_patched(self, method: str, trained: int, target: int, context_length: int) -> PerplexityReport:
        """Perplexity at one context length, patched for that time to read `target` tokens."""
        from hf_posext.patching import patched

        with patched(self.model, method, target_length=target):
            return self.score([context_length], bars=[])

    def score_once(self, arm: str, context_lengths: list[int], method: str, **arguments: Any) -> list[PerplexityReport]:
        """Perplexity at each context length, patched once for the longest."""
        from hf_posext.patching import patched

        with patched(self.model, method, target_length=self.longest, **arguments):
            return [self.score([length], bars=[], arm=arm) for length in context_lengths]


def measure(model: nn.Module, tokenizer: Any, documents: Sequence[str], trained: int, scope: Scope) -> Story:
    """Scores the same targets unpatched, with the bars, and patched by each method in turn.

    Args:
        model: the model, not patched.
        tokenizer: its tokenizer.
        documents: texts.
        trained: N in tokens.
        scope: how much is measured.
    """
    from hf_posext.evaluation.documents import read_documents
    from hf_posext.evaluation.perplexity import PerplexityReport

    lengths = [trained * factor for factor in scope.factors]
    ids = read_documents(documents, tokenizer, max_documents=scope.documents)
    meter = Meter(model, tokenizer, ids, lengths[-1], scope)
    bars = meter.score(lengths)
    arms = {method: [meter.score_patched(method, trained, length, length) for length in lengths] for method in METHODS}
    once = {DYNAMIC: meter.score_once(DYNAMIC, lengths, "yarn", dynamic=True)}
    once |= {name: meter.score_once(name, [trained * step for step in scope.ablated], name) for name in ABLATIONS}
    gain = replace(
        bars,
        measurements=bars.measurements + [part.measurements[0] for part in chain(*arms.values(), *once.values())],
        records=bars.records
        | {arm: by_length(arm, parts) for arm, parts in arms.items()}
        | {arm: parts[0].record for arm, parts in once.items()},
        notes=[NOTE.format(trained=trained, longest=lengths[-1])],
    )
    price = [meter.score_patched(method, trained, lengths[-1], trained) for method in METHODS]
    price += [parts[0] for parts in once.values()]
    return Story(gain, PerplexityReport.join([meter.score([trained], bars=[]), *price]))


def by_length(method: str, parts: Sequence[PerplexityReport]) -> dict[str, Any]:
    """The record of an arm that was patched for each context length anew."""
    steps = {part.measurements[0].context_length: part.record for part in parts}
    return {"method": method, "factor": "T / N", "by_context_length": steps}


def read(story: Story) -> list[str]:
    """What the numbers say, in sentences made from them; "clearly" means that the paired 95 % interval leaves out 0."""
    from hf_posext.evaluation.protocols import HONEST

    trained, longest = story.reach
    rows = {(row["arm"], row["context_length"]): row["perplexity"] for row in story.gain.rows}
    unpatched = story.gain.difference("none", "truncate", longest)
    sentences = [
        f"Unpatched: {rows['none', longest]:.1f} with {longest} tokens of context, {rows['truncate', longest]:.1f} "
        f"with only the last {trained} of them, {rows['window', longest]:.1f} with a window of {trained}. Reading past "
        f"the trained length is {verdict(unpatched)} against truncating."
    ]
    for length in story.gain.protocol["context_lengths"][1:]:
        best = min(PATCHED, key=lambda arm: rows[arm, length])
        against = {bar: verdict(story.gain.difference(best, bar, length)) for bar in HONEST}
        sentences.append(
            f"With {length} tokens of context `{best}` is the best with {rows[best, length]:.1f}, against "
            f"{rows['none', length]:.1f} unpatched and {rows['truncate', length]:.1f} truncated. "
            f"Against truncating it is {against['truncate']}, against a window {against['window']}."
        )
    price = {row["arm"]: row["perplexity"] for row in story.price.rows}
    costs = ", ".join(f"{price[arm]:.1f} with `{arm}`" for arm in PATCHED)
    sentences.append(
        f"The price on short text, patched for {longest} tokens and given {trained}: {costs}, "
        f"{price['none']:.1f} unpatched. {price_of_dynamic(story.price)}"
    )
    sentences.append(about_ablations(story))
    return sentences


def about_ablations(story: Story) -> str:
    """What is left of the model without the encoding that it was trained with, at the longest context measured so."""
    rows = {(row["arm"], row["context_length"]): row["perplexity"] for row in story.gain.rows}
    length = max(length for arm, length in rows if arm in ABLATIONS)
    numbers = " and ".join(f"{rows[arm, length]:.1f} with `{arm}`" for arm in ABLATIONS)
    return (
        f"Without the encoding that the model was trained with: {numbers} at {length} tokens of context. These are "
        "untuned ablations: on a model trained with another encoding both need tuning before they are of any use."
    )


def price_of_dynamic(price: PerplexityReport) -> str:
    """Whether text of the trained length is read by the dynamic arm as by the unpatched model, to the last bit."""
    nll = {measurement.arm: measurement.nll for measurement in price.measurements}
    if nll[DYNAMIC] == nll["none"]:
        return f"`{DYNAMIC}` pays nothing: its sum over every document is that of the unpatched model to the last bit."
    (length,) = price.protocol["context_lengths"]
    return f"`{DYNAMIC}` against unpatched is {verdict(price.difference(DYNAMIC, 'none', length))}."
