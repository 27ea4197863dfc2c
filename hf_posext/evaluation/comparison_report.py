"""What `compare()` gives back: arms x context lengths, what is significant against the bars, and the price."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from rich.console import RenderableType

from hf_posext.evaluation.arms_report import saved
from hf_posext.evaluation.perplexity_report import ALL, Measurement, PerplexityReport
from hf_posext.evaluation.protocols import HONEST
from hf_posext.evaluation.significance import holm, p_value, verdict
from hf_posext.reports import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(repr=False, eq=False)
class ComparisonReport(PerplexityReport):
    """Perplexity of many arms at several context lengths, on the same targets.

    Attributes:
        short: per arm, patched for the longest context but given N tokens; `none` is the unpatched model.
    """

    short: list[Measurement] = field(default_factory=list)

    @cached_property
    def significance(self) -> list[dict[str, Any]]:
        """Each arm against each honest bar at each length: `nll_difference` with its interval, p and a verdict.

        `difference` is in nats per token (negative: the arm is better), `low` and `high` its paired 95 % interval, `p`
        of the same bootstrap, `p_holm` corrected for all `comparisons` with that bar, and `verdict` better, worse or
        not clearly different by `p_holm` < 0.05. Arms with the very numbers of the bar (p = 1) are not counted. Below
        two documents, and where a difference is not a number, p and verdict are None.
        """
        return [row for bar in HONEST if bar in self.arms for row in self._against(bar)]

    @cached_property
    def price(self) -> PerplexityReport:
        """The arms patched for the longest context, given N tokens, beside the unpatched model `none`."""
        protocol = {**self.protocol, "context_lengths": sorted({one.context_length for one in self.short})}
        records = {one.arm: self.records.get(one.arm) for one in self.short}
        return PerplexityReport(protocol, self.short, records, self.trained_length, self.skipped)

    @cached_property
    def short_rows(self) -> list[dict[str, Any]]:
        """The rows of `price`, with `patched_for` in tokens and the paired `difference` to `none` in nats per token."""
        return [self._short_row(row) for row in self.price.rows]

    @cached_property
    def tradeoff(self) -> list[dict[str, Any]]:
        """Per arm what it costs at N and what it reaches at the longest context: `short` against `long`.

        `short` is the NLL at N, patched for the longest context, minus that of the unpatched model, with its paired
        95 % ends. `long` is the NLL at the longest context, and its ends are those of the paired difference to the bar
        `versus`. All in nats per token; ends are None where there is no interval, or no bar.
        """
        longest = self.protocol["context_lengths"][-1]
        reached = {row["arm"]: row["nll"] for row in self.rows if row["context_length"] == longest}
        bar = next((bar for bar in HONEST if bar in reached), None)
        paired = {
            row["arm"]: row for row in self.significance if (row["versus"], row["context_length"]) == (bar, longest)
        }
        return [
            {
                "arm": row["arm"],
                "short": row["difference"],
                "short_low": row["difference_low"],
                "short_high": row["difference_high"],
                "versus": bar,
                "long": reached[row["arm"]],
                **{
                    f"long_{end}": _moved(paired.get(row["arm"], {}).get(end), reached.get(bar))
                    for end in ("low", "high")
                },
            }
            for row in self.short_rows
            if row["arm"] in reached
        ]

    @property
    def reading(self) -> list[str]:
        """What the numbers say, in sentences made from them."""
        from hf_posext.evaluation.comparison_table import sentences

        return sentences(self)

    def patched_for(self, arm: str, context_length: int) -> int | None:
        """Tokens that an arm was patched for when it read a context; None where it was not patched."""
        record = self.records.get(arm)
        if record is None:
            return None
        if "by_context_length" not in record:
            return int(record["target_length"])
        return context_length if context_length > (self.trained_length or 0) else None

    def to_dict(self) -> dict[str, Any]:
        """As of a `PerplexityReport`; also `significance`, `short_rows`, `tradeoff`, `reading` and `short`."""
        more = self.named("significance", "short_rows", "tradeoff", "reading", "short")
        return super().to_dict() | more

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The report that `to_dict` came from; a NLL that is not finite is None there and NaN here."""
        report = super().from_dict(data)
        report.short = super().from_dict({**data, "measurements": data["short"]}).measurements
        return report

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """One line per arm and length, also those of `short_rows`, as text with a header; written to a path as well."""
        from hf_posext.evaluation.comparison_table import as_csv

        return _written(as_csv(self), path)

    def to_markdown(self, path: str | os.PathLike[str] | None = None) -> str:
        """Sentences, tables and notes as Markdown; written to a path as well."""
        from hf_posext.evaluation.comparison_table import as_markdown

        return _written(as_markdown(self), path)

    def to_html(self, path: str | os.PathLike[str] | None = None) -> str:
        """One page with sentences, figures, tables and settings that needs no other file; written to a path as well."""
        from hf_posext.evaluation.comparison_page import as_page

        return _written(as_page(self), path)

    def plot_tradeoff(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Loss at the longest context against the price at N as a figure, written as .png, .svg or .pdf to a path."""
        from hf_posext.evaluation.comparison_plot import plot_tradeoff

        return saved(plot_tradeoff(self), path)

    def table(self) -> RenderableType:
        """Perplexities, differences to a bar with verdicts, the price, sentences and notes."""
        from hf_posext.evaluation.comparison_table import comparison_table

        return comparison_table(self)

    def _against(self, bar: str) -> list[dict[str, Any]]:
        """Every other arm at every length against one bar, but for the bars that were compared with it already."""
        others = [arm for arm in self.arms if arm not in HONEST[: HONEST.index(bar) + 1]]
        pairs = [(one, self._find(bar, one.context_length, ALL)) for one in self.measurements if one.arm in others]
        rows = [self._compared(one, other) for one, other in pairs]
        tested = [
            row for row, (one, other) in zip(rows, pairs, strict=True) if row["p"] is not None and one.nll != other.nll
        ]
        for row, p in zip(tested, holm([row["p"] for row in tested]), strict=True):
            row["p_holm"] = p
        return [{**row, "comparisons": len(tested), "verdict": _worded(row)} for row in rows]

    def _compared(self, one: Measurement, other: Measurement) -> dict[str, Any]:
        """One arm against a bar, p not yet corrected."""
        difference = self.difference(one.arm, other.arm, one.context_length)
        same = one.nll == other.nll
        p = 1.0 if same else p_value(one.nll, one.tokens, other.nll, other.tokens)
        known = None if math.isnan(p) or len(one.documents) < 2 else p
        return {**difference, "p": known, "p_holm": known}

    def _short_row(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row of the price with its difference to the unpatched model."""
        found = self.price.difference(row["arm"], "none", row["context_length"])
        longest = self.protocol["context_lengths"][-1]
        return {
            **row,
            "patched_for": None if row["arm"] == "none" else longest,
            "difference": found["difference"],
            "difference_low": found["low"],
            "difference_high": found["high"],
        }

    def _take(self, report: Self, arm: str) -> str | None:
        """Adds one arm of another report, its price too."""
        if isinstance(report, ComparisonReport):
            self.short += [one for one in report.short if one.arm in (arm, "none") and one not in self.short]
        return super()._take(report, arm)


def _worded(row: Mapping[str, Any]) -> str | None:
    """The verdict on a row, None where there is no p."""
    return None if row["p_holm"] is None else verdict(row["difference"], row["p_holm"])


def _moved(end: float | None, by: float | None) -> float | None:
    """An end of an interval of differences as one of values."""
    return None if end is None or by is None else by + end


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    """The text, which is written to the path if there is one."""
    if path is not None:
        write_atomically(path, text)
    return text
