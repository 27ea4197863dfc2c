"""Measures one arm after the other with one model: patched, scored on windows that are cut once, unpatched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from hf_posext.evaluation.comparison_arms import Contender
from hf_posext.evaluation.measuring import Scores, curve, measurements, score_plan
from hf_posext.evaluation.perplexity_report import Measurement
from hf_posext.evaluation.protocols import Plan, Settings, cut
from hf_posext.patching import patched
from hf_posext.records import record_of


@dataclass(frozen=True)
class Reading:
    """What an arm scored.

    Attributes:
        at: context length -> sums per document.
        short: of the arm patched for the longest context and given N tokens.
        record: of its patch as plain data.
        curve: protocol `full`: NLL in buckets of positions, patched for the longest context.
    """

    at: dict[int, Measurement]
    short: Measurement
    record: dict[str, Any] | None
    curve: list[dict[str, Any]]


@dataclass
class Meter:
    """A model, and what it is to read.

    Attributes:
        model: the model, not patched.
        make: settings for some context lengths.
        lengths: context lengths in tokens, ascending.
        plan: windows for each of them and for N.
        trained: N in tokens.
        given: N as the user gave it, None where the config is to say it.
        progress: a bar on stderr; None shows it in a terminal.
        scores: NLL of the unpatched model up to N.
        unpatched: what these come to for each context length up to N, N included.
    """

    model: nn.Module
    make: Callable[..., Settings]
    lengths: Sequence[int]
    plan: Plan
    trained: int
    given: int | None
    progress: bool | None
    scores: Scores = field(default_factory=dict)
    unpatched: dict[int, Measurement] = field(default_factory=dict)

    def passes(self, lengths: Sequence[int]) -> Plan:
        """The windows that have to be read for some context lengths: with the protocol `full` the longest alone."""
        settings = self.make(context_lengths=lengths)
        needed = [settings.longest] if settings.protocol == "full" else settings.context_lengths
        return {length: self.plan[length] for length in needed}

    def patch(self, contender: Contender, target: int) -> Any:
        """The model patched for `target` tokens, for the length of a with-block."""
        arguments = {"target_length": target, "original_max_position_embeddings": self.given, **contender.arguments}
        return patched(self.model, contender.method, **arguments)

    def settle(self, contender: Contender) -> Contender:
        """The contender, patched once if its factor follows the length.

        Raises:
            TypeError: an option of the wrong type, an unknown one, or one that is missing.
            ValueError, PatchError: the model cannot have it.
        """
        with self.patch(contender, self.lengths[-1]):
            record = record_of(self.model)
        return replace(contender, per_length=contender.per_length and record is not None and not record.dynamic)

    def read_unpatched(self) -> None:
        """Scores the unpatched model at each context length up to N, and at N."""
        lengths = [*(length for length in self.lengths if length <= self.trained), self.trained]
        self.unpatched, self.scores = self.score(lengths, "none", "unpatched")

    def read(self, contender: Contender, label: str) -> Reading:
        """An arm at every context length, and given N tokens.

        Args:
            contender: the arm, settled.
            label: what the progress bar calls it.

        Raises:
            ValueError, PatchError: the model cannot have it at one of the lengths.
        """
        longest, name = self.lengths[-1], contender.name
        own = [longest] if contender.per_length else [*self.lengths]
        found, scores, record = self._read_patched(contender, longest, [*own, self.trained], label)
        at = {length: found[length] for length in own}
        records = {longest: record}
        for length in self.lengths[:-1] if contender.per_length else ():
            if length <= self.trained:
                at[length] = replace(self.unpatched[length], arm=name)
            else:
                more, _, records[length] = self._read_patched(contender, length, [length], label)
                at |= more
        is_full = self.make(context_lengths=self.lengths).protocol == "full"
        return Reading(
            at=dict(sorted(at.items())),
            short=found[self.trained],
            record=_by_length(record, records) if contender.per_length else record,
            curve=curve(name, self.passes(self.lengths), scores) if is_full else [],
        )

    def score(self, lengths: Sequence[int], arm: str, label: str) -> tuple[dict[int, Measurement], Scores]:
        """The model as it is now: what each context length comes to, and the NLL behind it."""
        settings = self.make(context_lengths=lengths)
        scores = score_plan(self.model, self.passes(lengths), settings, label, self.progress)
        found = measurements(settings, arm, self.plan, scores)
        return {measurement.context_length: measurement for measurement in found}, scores

    def _read_patched(
        self, contender: Contender, target: int, lengths: Sequence[int], label: str
    ) -> tuple[dict[int, Measurement], Scores, dict[str, Any] | None]:
        """The model patched for `target` tokens: `score`, and the record of the patch."""
        with self.patch(contender, target):
            record = record_of(self.model)
            return *self.score(lengths, contender.name, label), None if record is None else record.to_dict()


def cut_all(
    make: Callable[..., Settings],
    context_lengths: Sequence[int],
    documents: Sequence[Tensor],
    bos: tuple[int | None, int | None],
    trained: int,
) -> tuple[Plan, list[int]]:
    """Windows for each context length and for N, and the indices of documents that are too short.

    With the protocol `tail` all of them have the same targets.

    Raises:
        ValueError: no document is as long as the longest context.
    """
    settings = make(context_lengths=context_lengths)
    if settings.protocol == "tail":
        return cut(settings, documents, bos, [trained])
    plan: Plan = {}
    skipped: list[int] = []
    for length in sorted({*context_lengths, trained}):
        windows, skipped = cut(make(context_lengths=[length]), documents, bos)
        plan |= windows
    return plan, skipped


def _by_length(longest: dict[str, Any] | None, records: dict[int, dict[str, Any] | None]) -> dict[str, Any]:
    """The record of an arm that was patched for each context length anew."""
    shared = {name: (longest or {}).get(name) for name in ("method", "options", "layers")}
    return {**shared, "factor": "T / N", "by_context_length": dict(sorted(records.items()))}
