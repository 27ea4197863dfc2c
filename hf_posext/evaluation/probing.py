"""Asks a model the trials of a probe, with its patch and without, and says whether it can do the probe at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from hf_posext.errors import PatchError
from hf_posext.evaluation.answering import answers
from hf_posext.evaluation.arms import Arm
from hf_posext.evaluation.bars import LEFT_OUT, UNKNOWN_LENGTH, left_out
from hf_posext.evaluation.forwards import LengthError
from hf_posext.evaluation.passkey_report import Cell, PasskeyReport, share
from hf_posext.evaluation.passkey_settings import ProbeSettings
from hf_posext.evaluation.retrieval import Source, Trial, digest_of, make_trials
from hf_posext.patching import patched, suspended

VACUOUS = (
    "This probe is vacuous: at {length} tokens, within the trained length, the accuracy is {accuracy:.2f}, below the "
    "gate of {gate:g}. It says nothing of longer context; take another probe or a smaller `answer_length`."
)
COST = (
    "At {length} tokens, within the trained length, `{arm}` finds {own:.2f} of the answers, the model without its "
    "patch {without:.2f}: the patch costs short text."
)
NO_GATE = (
    "No context length is known to be within the trained length and long enough for this probe, so it is not known "
    "whether the model can do it at all."
)


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

    @cached_property
    def inside(self) -> int | None:
        """The context length at which the model must be able to do the probe: the longest up to N, else N itself.

        None where N is not known, or too short for the probe.
        """
        trained = self.measured.trained_length
        shorter = [length for length in self.settings.context_lengths if trained is not None and length <= trained]
        if trained is None or shorter:
            return max(shorter, default=None)
        try:
            self.trials(trained)
        except ValueError:
            return None
        return trained

    @property
    def digest(self) -> str:
        """A fingerprint of the trials of all context lengths that were asked for."""
        return digest_of(trial for length in self.settings.context_lengths for trial in self.trials(length))

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

    def own(self) -> dict[int, list[Cell]]:
        """The model as it is, at every context length and at the one inside N."""
        lengths = sorted({*self.settings.context_lengths, self.inside or self.settings.longest})
        found = {length: self.read(self.trials(length), self.measured.name) for length in lengths}
        if not self.measured.is_patched:
            self.known |= found
        return found

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

    def gate(self, name: str, cells: Mapping[int, list[Cell]]) -> dict[str, dict[str, Any]]:
        """The accuracy of one arm at the length inside N, by its name; empty where there is no such length."""
        return {} if self.inside is None else {name: {"context_length": self.inside, **share(cells[self.inside])}}


def add_bars(report: PasskeyReport, prober: Prober) -> None:
    """Adds the bars, and where the patched model cannot do the probe, whether it can without its patch.

    Args:
        report: gets cells, gates, records and notes.
        prober: the model with its patch, if it has one.
    """
    is_patched, trained = prober.measured.is_patched, prober.measured.trained_length
    bars = [bar for bar in prober.settings.bars if bar != "none" or is_patched]
    if trained is None:
        unknown = [bar for bar in bars if bar != "none"]
        report.notes += [LEFT_OUT.format(bar=bar, reason=UNKNOWN_LENGTH) for bar in unknown]
        bars = [bar for bar in bars if bar not in unknown]
    if bars or report.vacuous:
        with suspended(prober.model):
            if prober.inside is not None:
                prober.unpatched(prober.inside)
            for bar in bars:
                try:
                    report.cells += prober.bar(bar)
                except (PatchError, LengthError) as error:
                    report.notes.append(left_out(bar, error))
                    continue
                report.records[bar] = None
                report.gates |= prober.gate(bar, prober.known)
            report.gates |= prober.gate("none", prober.known) if is_patched else {}


def verdict(report: PasskeyReport, arm: str) -> list[str]:
    """Says that the probe is vacuous, or that the patch costs so much short text that only the original can do it."""
    if report.vacuous is None:
        return [NO_GATE]
    if report.vacuous:
        best = max(report.gates.values(), key=lambda gate: gate["accuracy"])
        where = {"length": best["context_length"], "accuracy": best["accuracy"]}
        return [VACUOUS.format(gate=report.protocol["gate"], **where)]
    own, without = report.gates.get(arm), report.gates.get("none")
    if own and without and own["accuracy"] < report.protocol["gate"] <= without["accuracy"]:
        accuracies = {"own": own["accuracy"], "without": without["accuracy"]}
        return [COST.format(length=own["context_length"], arm=arm, **accuracies)]
    return []
