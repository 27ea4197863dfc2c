"""Retrieval over a grid of depths and context lengths: can a model still find what stands far back?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from hf_posext.errors import PatchError
from hf_posext.evaluation.answering import FORCED, answers, decoding_of
from hf_posext.evaluation.arms import Arm, identify
from hf_posext.evaluation.bars import LEFT_OUT, UNKNOWN_LENGTH, left_out
from hf_posext.evaluation.forwards import LengthError, causal_lm
from hf_posext.evaluation.passkey_report import Cell, PasskeyReport, share
from hf_posext.evaluation.passkey_settings import DEPTHS, GATE, ProbeSettings
from hf_posext.evaluation.protocols import HONEST
from hf_posext.evaluation.retrieval import Source, Trial, digest_of, make_trials
from hf_posext.evaluation.retrieval_sources import resolve_wording, source_of
from hf_posext.evaluation.scoring import check_causal
from hf_posext.patching import patched, suspended

VACUOUS = (
    "This probe is vacuous: within the trained length of {trained} tokens the accuracy is {accuracy:.2f}, below the gate "
    "of {gate:g}. It says nothing of longer context; use a probe that the model can do."
)
COST = (
    "Within the trained length `{arm}` finds {own:.2f} of the answers, the model without its patch {without:.2f}: the "
    "patch costs short text."
)
NO_GATE = "The config does not say a trained length, so it is not known whether the model can do this probe at all."
TEACHER = (
    "{model} cannot generate: it was given each answer, and had to predict every next token of it, which is the same for "
    "an exact match."
)


def passkey(
    model: nn.Module,
    tokenizer: Any,
    *,
    context_lengths: Sequence[int],
    probe: str = "passkey",
    depths: Sequence[float] = DEPTHS,
    trials: int = 10,
    answer_length: int = 5,
    documents: Iterable[Any] | None = None,
    text_column: str = "text",
    wording: str = "auto",
    bos: str = "auto",
    bars: Sequence[str] | None = None,
    gate: float = GATE,
    batch_size: int = 8,
    seed: int = 0,
    arm: str | None = None,
    progress: bool | None = None,
) -> PasskeyReport:
    """Share of answers that a causal model retrieves exactly, at each depth of each context length.

    The model continues each prompt greedily; a trial is correct if every token of the answer is. A context length is the
    number of tokens of prompt and answer at most, BOS included. Whether the model can do the probe at all is measured
    within its trained length N: where it cannot, the report says that the probe is vacuous.

    Args:
        model: a causal LM, patched or not, also wrapped by PEFT.
        tokenizer: its tokenizer; None for the probes `copy` and `repeat` on random tokens.
        context_lengths: lengths in tokens, in any order.
        probe: `passkey` (a number hidden in text), `copy` (a random string, far later its first four tokens), `repeat`
            (a passage over and over), or `key_value` (one of many pairs of numbers).
        depths: where the answer stands, 0 for the start of the context and 1 for its end.
        trials: at each depth and length.
        answer_length: digits of a key or value, tokens of a copy.
        documents: text to hide the answer in, as for `perplexity`; if None the sentences of the Landmark paper for its
            wording, else books that are embedded here, else random tokens.
        text_column: column of a dataset or key of a dict that holds the text.
        wording: of a passkey: `landmark` with the instructions of the papers, `plain` with the key and the question
            alone; `auto` is `plain` for base models whose tokenizer keeps digits apart. No chat template is applied.
        bos: `auto` and `every` put a BOS in front of the prompt, `auto` only if the tokenizer does; `none` does not.
        bars: what the patched model has to beat, see `perplexity`. By default `truncate` and `window`.
        gate: accuracy within the trained length that is needed for the probe to mean something.
        batch_size: prompts per pass.
        seed: of keys, random strings and filler; equal for every arm.
        arm: name of this arm in the report; the method's name if None, `none` for an unpatched model.
        progress: a bar on stderr; None shows it in a terminal.

    Raises:
        TypeError: an argument of the wrong type.
        LengthError: a `ValueError`: a length that the model cannot read.
        ValueError: an argument out of range, a length that the probe does not fit, or a model without a causal LM head.

    Source: Mohtashami and Jaggi 2023 (arXiv 2305.16300); Chen et al. 2023 (arXiv 2306.15595), sec. 3.3. The gate:
    a model that was never taught to copy scores nothing at any length.
    """
    settings = ProbeSettings(
        probe=probe, context_lengths=context_lengths, depths=depths, trials=trials, answer_length=answer_length,
        wording=wording, bos=bos, bars=HONEST if bars is None else bars, gate=gate, batch_size=batch_size, seed=seed,
    )  # fmt: skip
    check_causal(model)
    measured = identify(model, arm)
    if settings.wording is not None:
        settings = replace(settings, wording=resolve_wording(settings.wording, tokenizer))
    source, filler = source_of(
        model, tokenizer, documents,
        wording=settings.wording, bos=bos, text_column=text_column, longest=settings.longest, seed=seed,
    )  # fmt: skip
    prober = Prober(model, settings, source, measured, progress)
    own = {length: prober.read(prober.trials(length), measured.name) for length in prober.lengths}
    decoding = decoding_of(model)
    report = PasskeyReport(
        protocol={
            **asdict(settings),
            "filler": filler,
            "decoding": decoding,
            "digest": digest_of(trial for length in settings.context_lengths for trial in prober.trials(length)),
        },
        cells=[cell for length in settings.context_lengths for cell in own[length]],
        gates=prober.gate(measured.name, own),
        records=measured.records,
        trained_length=measured.trained_length,
        notes=measured.notes_beyond(settings.context_lengths),
    )
    if decoding == FORCED:
        report.notes.append(TEACHER.format(model=type(causal_lm(model)).__name__))
    if not measured.is_patched:
        prober.known |= own
    add_bars(report, prober)
    return report


@dataclass
class Prober:
    """Asks a model the trials of each length once.

    Attributes:
        model: with its patch, if it has one.
        settings: of the probe.
        source: what trials are made of.
        measured: the arm.
        progress: a bar on stderr; None shows it in a terminal.
        known: context length -> cells of the model without its patch, as far as they were measured.
    """

    model: nn.Module
    settings: ProbeSettings
    source: Source
    measured: Arm
    progress: bool | None
    known: dict[int, list[Cell]] = field(default_factory=dict)
    made: dict[int, list[Trial]] = field(default_factory=dict)

    @property
    def within(self) -> list[int]:
        """Context lengths that say whether the model can do the probe: those up to N, or N itself."""
        trained = self.measured.trained_length
        if trained is None:
            return []
        return [length for length in self.settings.context_lengths if length <= trained] or [trained]

    @property
    def lengths(self) -> list[int]:
        """All context lengths that are measured."""
        return sorted({*self.within, *self.settings.context_lengths})

    def trials(self, length: int) -> list[Trial]:
        """Those of one context length, made once."""
        if length not in self.made:
            settings = self.settings
            self.made[length] = make_trials(
                settings.wording or settings.probe,
                self.source,
                context_length=length,
                depths=settings.depths,
                trials=settings.trials,
                answer_length=settings.answer_length,
                seed=settings.seed,
            )
        return self.made[length]

    def read(self, trials: Sequence[Trial], name: str) -> list[Cell]:
        """How many trials of each depth the model answers, as it is now."""
        words = f"{name}, {trials[0].context_length} tokens"
        batch_size = self.settings.batch_size
        found = answers(self.model, trials, batch_size=batch_size, progress=self.progress, description=words)
        correct = [read == trial.answer for read, trial in zip(found, trials, strict=True)]
        return [
            Cell(
                name,
                trials[0].context_length,
                depth,
                sum(right for right, trial in zip(correct, trials, strict=True) if trial.depth == depth),
                self.settings.trials,
            )
            for depth in self.settings.depths
        ]

    def unpatched(self, length: int) -> list[Cell]:
        """The model without its patch, given all; to be called while the patch is off."""
        if length not in self.known:
            self.known[length] = self.read(self.trials(length), "none")
        return self.known[length]

    def bar(self, name: str) -> list[Cell]:
        """What a bar answers at each context length; up to N every one of them is the model without its patch.

        Raises:
            PatchError: a window that the model cannot have.
            LengthError: text that the model cannot read.
        """
        trained = self.measured.trained_length or self.settings.longest
        lengths = self.settings.context_lengths
        beyond = [] if name == "none" else [length for length in lengths if length > trained]
        cells = [cell for length in lengths if length not in beyond for cell in self.unpatched(length)]
        if name == "truncate":
            for length in beyond:
                shown = [trial.last(trained, self.source.bos) for trial in self.trials(length)]
                cells += self.read(shown, name)
        elif beyond:
            arguments = {"target_length": max(beyond), "original_max_position_embeddings": trained}
            with patched(self.model, "window", width=trained, **arguments):
                cells += [cell for length in beyond for cell in self.read(self.trials(length), name)]
        return [replace(cell, arm=name) for cell in cells]

    def gate(self, name: str, cells: dict[int, list[Cell]]) -> dict[str, dict[str, Any]]:
        """The accuracy of one arm within the trained length; empty where this is not known."""
        inside = [cell for length in self.within for cell in cells[length]]
        return {name: share(inside)} if inside else {}


def add_bars(report: PasskeyReport, prober: Prober) -> None:
    """Adds the bars, and the verdict on whether the model can do the probe, which may need the model without its patch.

    Args:
        report: gets cells, gates, records and notes.
        prober: the model with its patch, if it has one.
    """
    is_patched, trained = prober.measured.is_patched, prober.measured.trained_length
    bars = [bar for bar in prober.settings.bars if bar != "none" or is_patched]
    if trained is None:
        unknown = [bar for bar in bars if bar != "none"]
        report.notes += [LEFT_OUT.format(bar=bar, reason=UNKNOWN_LENGTH) for bar in unknown] + [NO_GATE]
        bars = [bar for bar in bars if bar not in unknown]
    if bars or report.vacuous:
        with suspended(prober.model):
            inside = {length: prober.unpatched(length) for length in prober.within}
            for bar in bars:
                try:
                    report.cells += prober.bar(bar)
                except (PatchError, LengthError) as error:
                    report.notes.append(left_out(bar, error))
                    continue
                report.records[bar] = None
                report.gates |= prober.gate(bar, inside)
            report.gates |= prober.gate("none", inside) if is_patched else {}
    report.notes += verdict(report, prober.measured.name)


def verdict(report: PasskeyReport, arm: str) -> list[str]:
    """Says that the probe is vacuous, or that the patch costs so much short text that only the original can do it."""
    if report.vacuous:
        best = max(gate["accuracy"] for gate in report.gates.values())
        return [VACUOUS.format(trained=report.trained_length, accuracy=best, gate=report.protocol["gate"])]
    own, without = report.gates.get(arm), report.gates.get("none")
    if own and without and own["accuracy"] < report.protocol["gate"] <= without["accuracy"]:
        return [COST.format(arm=arm, own=own["accuracy"], without=without["accuracy"])]
    return []
