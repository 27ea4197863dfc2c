"""The arms that an extension has to beat: the unpatched model, given less text or seeing less of it at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from hf_posext.errors import PatchError, cause_of
from hf_posext.evaluation.arms import check_reach
from hf_posext.evaluation.forwards import LengthError
from hf_posext.evaluation.masking import MaskedPlan
from hf_posext.evaluation.measuring import Scores, curve, measurements, placed_measurements, score_plan
from hf_posext.evaluation.perplexity_report import PerplexityReport
from hf_posext.evaluation.protocols import MaskedSettings, Plan, Settings
from hf_posext.evaluation.pseudo_report import PseudoPerplexityReport
from hf_posext.patching import patched, suspended

LEFT_OUT = "The bar `{bar}` is left out: {reason}."
UNKNOWN_LENGTH = "the config does not say a trained length"


@dataclass
class Unpatched:
    """A model without its patch, which reads each context length once, whatever bars ask for it.

    Attributes:
        model: the model; its patch is off for as long as bars are measured.
        settings: of the evaluation.
        plan: windows for each context length, those for `truncate` among them.
        trained: N in tokens; None where it is not known.
        scores: what was measured so far of the model without its patch and without a window.
        progress: a bar on stderr; None shows it in a terminal.
    """

    model: nn.Module
    settings: Settings
    plan: Plan
    trained: int | None
    scores: Scores
    progress: bool | None

    def bar(self, name: str) -> Scores:
        """What a bar scores at each context length of the plan that the evaluation asks for.

        Raises:
            PatchError: a window that the model cannot have.
            LengthError: text that the model cannot read.
        """
        lengths = [length for length in self.plan if length in self.settings.context_lengths]
        if name == "none":
            return self.read(lengths)
        if name == "truncate":
            given = truncated_lengths(self.settings, self.trained)
            scores = self.read(given.values())
            return {length: scores[given[length]] for length in lengths}
        return self.read_in_window(lengths, self.trained or max(lengths))

    def read(self, lengths: Iterable[int]) -> Scores:
        """The model given all."""
        missing = {length: self.plan[length] for length in sorted(set(lengths) - set(self.scores))}
        self.scores |= score_plan(self.model, missing, self.settings, "unpatched", self.progress)
        return self.scores

    def read_in_window(self, lengths: list[int], width: int) -> Scores:
        """The model given all, in which each token sees only the last `width`: up to that length it is the model."""
        beyond = {length: self.plan[length] for length in sorted(lengths) if length > width}
        scores = {**self.read(length for length in lengths if length <= width)}
        if beyond:
            arguments = {"target_length": max(beyond), "original_max_position_embeddings": width}
            with patched(self.model, "window", width=width, **arguments):
                scores |= score_plan(self.model, beyond, self.settings, "window", self.progress)
        return scores


def add_bars(
    report: PerplexityReport, model: nn.Module, settings: Settings, plan: Plan, scores: Scores, progress: bool | None
) -> None:
    """Adds the bars to a report, or a note that says why one of them is left out.

    Args:
        report: gets measurements, curves, records and notes; it says N and whether the model is patched.
        model: the model with its patch, if it has one.
        settings: of the evaluation.
        plan: windows for each context length.
        scores: what was already measured of the model without its patch.
        progress: a bar on stderr; None shows it in a terminal.
    """
    bars = [bar for bar in settings.bars if bar != "none" or report.record is not None]
    if report.trained_length is None:
        unknown = [bar for bar in bars if bar != "none"]
        report.notes += [LEFT_OUT.format(bar=bar, reason=UNKNOWN_LENGTH) for bar in unknown]
        bars = [bar for bar in bars if bar not in unknown]
    if not bars:
        return
    with suspended(model):
        unpatched = Unpatched(model, settings, plan, report.trained_length, dict(scores), progress)
        for bar in bars:
            try:
                found = unpatched.bar(bar)
            except (PatchError, LengthError) as error:
                report.notes.append(left_out(bar, error))
                continue
            report.records[bar] = None
            report.measurements += measurements(settings, bar, plan, found)
            report.curve += curve(bar, plan, found) if settings.protocol == "full" else []


def add_masked_bars(
    report: PseudoPerplexityReport,
    model: nn.Module,
    settings: MaskedSettings,
    plan: MaskedPlan,
    scores: Scores,
    progress: bool | None,
) -> None:
    """Adds the bars of a masked LM to a report, or a note that says why one of them is left out.

    Args:
        report: gets measurements, records and notes; it says N and whether the model is patched.
        model: the model with its patch, if it has one.
        settings: of the evaluation.
        plan: windows for each context length, and those of N for `truncate`.
        scores: what was already measured of the model without its patch.
        progress: a bar on stderr; None shows it in a terminal.
    """
    trained = report.trained_length
    bars = [bar for bar in settings.bars if bar != "none" or report.record is not None]
    if trained is None and "truncate" in bars:
        bars.remove("truncate")
        report.notes.append(LEFT_OUT.format(bar="truncate", reason=UNKNOWN_LENGTH))
    if not bars:
        return
    with suspended(model):
        for bar in bars:
            most = trained if bar == "truncate" and trained is not None else settings.longest
            given = {length: min(length, most) for length in settings.context_lengths}
            missing = {length: plan[length] for length in sorted({*given.values()} - {*scores})}
            try:
                check_reach(model, missing)
                scores = scores | score_plan(model, missing, settings, "unpatched", progress)
            except LengthError as error:
                report.notes.append(left_out(bar, error))
                continue
            report.records[bar] = None
            for length, read in given.items():
                report.measurements += placed_measurements(bar, length, plan[length], scores[read], trained)


def left_out(bar: str, error: Exception) -> str:
    """The note on a bar that a model cannot have: what is wrong, without the next step."""
    return LEFT_OUT.format(bar=bar, reason=cause_of(error))


def truncated_lengths(settings: Settings, trained: int | None) -> dict[int, int]:
    """Context length -> tokens that the bar `truncate` is given; empty without that bar or without a trained length.

    Raises:
        ValueError: more targets than the trained length holds.
    """
    if "truncate" not in settings.bars or trained is None:
        return {}
    if (settings.targets or 0) > trained:
        raise ValueError(
            f"`targets` must be at most the trained length {trained} for the bar `truncate`, got {settings.targets}. "
            "Lower `targets`, or leave the bar out with bars=[]."
        )
    return {length: min(length, trained) for length in settings.context_lengths}
