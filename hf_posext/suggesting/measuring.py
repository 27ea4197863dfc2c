"""Measures what the rules name on the user's own documents, as much of it as there is time for, and chooses."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hf_posext.errors import cause_of, quoted
from hf_posext.evaluation.comparison import compare
from hf_posext.evaluation.comparison_report import ComparisonReport
from hf_posext.evaluation.documents import read_documents
from hf_posext.evaluation.protocols import HONEST
from hf_posext.evaluation.scoring import check_causal
from hf_posext.evaluation.statistics import Estimate, nll_difference
from hf_posext.suggesting.facts import Facts, Wanted
from hf_posext.suggesting.trying import Tried

MOST_DOCUMENTS = 32
FEWEST_DOCUMENTS = 6  # with five that agree, a sign test still leaves 6 % to chance
ENDPOINTS = 2
TARGETS = 128


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        bars: of the unpatched model.
        documents: read at most.
        endpoints: in each document.
    """

    bars: tuple[str, ...]
    documents: int
    endpoints: int


@dataclass
class Trial:
    """What was measured.

    Attributes:
        report: of all arms on the same tokens, None where nothing was measured.
        notes: what was left out, and why.
    """

    report: ComparisonReport | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """A model and the documents that it is measured on.

    Attributes:
        model: not patched.
        tokenizer: says which BOS is put in front.
        documents: token ids, each longer than T.
        facts: of the model.
        wanted: what is asked for.
        deadline: of `time.monotonic`, in seconds.
        progress: a bar on stderr; None shows it in a terminal.
    """

    model: nn.Module
    tokenizer: Any
    documents: Sequence[Tensor]
    facts: Facts
    wanted: Wanted
    deadline: float
    progress: bool | None

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def compare(self, tried: Tried, documents: int, endpoints: int, bars: Sequence[str]) -> ComparisonReport:
        """One arm at N and T.

        Raises:
            ValueError: the model cannot be measured with it.
        """
        candidate, trained = tried.candidate, self.facts.trained_length
        return compare(
            self.model,
            self.tokenizer,
            self.documents[:documents],
            methods=[{"method": candidate.method, "name": tried.name, **candidate.options}],
            context_lengths=[trained, self.wanted.target_length],
            original_max_position_embeddings=self.wanted.given_length,
            targets=min(TARGETS, max(1, trained // 2)),
            endpoints_per_document=endpoints,
            bars=bars,
            progress=self.progress,
        )


def deep_documents(documents: Iterable[Any], tokenizer: Any, text_column: str, target_length: int) -> list[Tensor]:
    """Token ids of those documents that hold T tokens and one to be predicted, `MOST_DOCUMENTS` at most.

    Raises:
        TypeError, ValueError: as of `perplexity`; also where none is as long.
    """
    ids = read_documents(documents, tokenizer, text_column=text_column, max_documents=MOST_DOCUMENTS)
    deep = [each for each in ids if len(each) > target_length]
    if not deep:
        raise ValueError(
            f"`documents` must hold at least one of {target_length + 1} tokens, the longest of {len(ids)} has "
            f"{max(map(len, ids))}. Give longer ones, or leave `documents` out for a suggestion by rules."
        )
    return deep


def why_unmeasured(model: nn.Module) -> str | None:
    """Why documents are of no use to a model; None where they are."""
    try:
        check_causal(model)
    except ValueError as error:
        return (
            f"The documents were not used ({cause_of(error)}): by rules alone. `pseudo_perplexity` measures masked LMs."
        )
    return None


def measure(bench: Bench, tried: Sequence[Tried]) -> Trial:
    """Measures the arms in their order for as long as there is time: a first pass says how much fits."""
    arms, started = list(tried), time.monotonic()
    trial = Trial()
    while arms:
        try:
            trial.report = bench.compare(arms[0], 1, 1, ["truncate"])
            break
        except ValueError as error:
            trial.notes.append(left_out(arms.pop(0), error))
    if trial.report is None:
        return trial
    seconds = time.monotonic() - started
    extent = extent_for(bench.left / seconds, len(arms), len(bench.documents))
    if extent is None:
        trial.notes.append(
            f"One document took {seconds:.3g} s and the time budget is spent: only `{arms[0].name}` was measured, on "
            "that document. Raise `time_budget`."
        )
        return trial
    trial.notes += shortened(extent, len(bench.documents))
    return measure_all(bench, arms, extent, trial.notes)


def measure_all(bench: Bench, arms: Sequence[Tried], extent: Extent, notes: list[str]) -> Trial:
    """Arm after arm on the same tokens until the time is over, the bars with the first one."""
    reports: list[ComparisonReport] = []
    slowest = 0.0
    for index, each in enumerate(arms):
        if reports and bench.left < slowest:
            names = quoted(one.name for one in arms[index:])
            notes.append(f"The time budget ended before {names}. Raise `time_budget`.")
            break
        started, bars = time.monotonic(), () if reports else extent.bars
        try:
            reports.append(bench.compare(each, extent.documents, extent.endpoints, bars))
        except ValueError as error:
            notes.append(left_out(each, error))
        slowest = max(slowest, (time.monotonic() - started) / (1 + len(bars)))
    return Trial(ComparisonReport.join(reports) if reports else None, notes)


def extent_for(passes: float, arms: int, documents: int) -> Extent | None:
    """The most that fits: all, else one endpoint, else fewer documents, else the honest bar alone and the first arms.

    Args:
        passes: how often one arm can read one document.
        arms: that there are.
        documents: that there are.

    Returns:
        None where not one arm can read one document.
    """
    bars = ("none", *HONEST)
    fitting = int(passes / (arms + len(bars)))
    if fitting >= documents * ENDPOINTS:
        return Extent(bars, documents, ENDPOINTS)
    fewest = min(documents, FEWEST_DOCUMENTS)
    if fitting >= fewest:
        return Extent(bars, min(documents, fitting), 1)
    few = min(fewest, int(passes / 2))
    return Extent(("truncate",), few, 1) if few > 0 else None


def shortened(extent: Extent, documents: int) -> list[str]:
    """What the time budget leaves out."""
    parts = [
        f"{extent.documents} of {documents} documents" if extent.documents < documents else "",
        "one place in each document instead of two" if extent.endpoints < ENDPOINTS else "",
        "no bars but `truncate`" if len(extent.bars) == 1 else "",
    ]
    told = ", ".join(part for part in parts if part)
    return [f"To fit into the time budget: {told}. Raise `time_budget` for all of it."] if told else []


def left_out(tried: Tried, error: Exception) -> str:
    """The note on an arm that could not be measured."""
    return f"`{tried.name}` could not be measured: {' '.join(str(error).split())}"


def loss_of(report: ComparisonReport, arm: str, target_length: int, short_text: bool) -> tuple[list[float], list[int]]:
    """Per document the summed NLL of an arm at T, and its tokens; with `short_text` that of N tokens is added.

    An arm that gains at T what it costs at N is then no better than one that does neither.
    """
    long = next(one for one in report.measurements if (one.arm, one.context_length) == (arm, target_length))
    short = next(one for one in report.short if one.arm == ("none" if arm in HONEST else arm))
    sums = [a + b for a, b in zip(long.nll, short.nll, strict=True)] if short_text else [*long.nll]
    return sums, [*long.tokens]


def difference(report: ComparisonReport, one: str, other: str, target_length: int, short_text: bool) -> Estimate:
    """Loss of one arm minus that of another in nats per token, with its paired 95 % interval."""
    first, second = (loss_of(report, arm, target_length, short_text) for arm in (one, other))
    return nll_difference(*first, *second)


def choose(report: ComparisonReport, tried: Sequence[Tried], wanted: Wanted) -> Tried | None:
    """The simplest of the arms that are not clearly worse than the best one; None where no arm has a finite loss.

    Simpler is, in this order: short text stays as it was (where that is wanted), less effort to serve, a lower loss.
    """
    length, short = wanted.target_length, wanted.short_text
    losses = {each.name: loss_of(report, each.name, length, short) for each in tried if each.name in report.arms}
    means = {name: sum(nll) / sum(tokens) for name, (nll, tokens) in losses.items() if all(map(math.isfinite, nll))}
    if not means:
        return None
    best = min(means, key=means.__getitem__)
    close = [
        each
        for each in tried
        if each.name == best or (each.name in means and difference(report, each.name, best, length, short).low <= 0)
    ]
    return min(close, key=lambda each: (short and not each.candidate.keeps_short, each.effort, means[each.name]))
