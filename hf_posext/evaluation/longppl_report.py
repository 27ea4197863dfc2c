"""What `longppl()` gives back: perplexity of the key tokens, and beside it that of all tokens."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from rich.console import RenderableType
from rich.table import Table

from hf_posext.evaluation.arms_report import saved
from hf_posext.evaluation.perplexity_report import ALL, Measurement, PerplexityReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEY = "key tokens"


@dataclass(repr=False, eq=False)
class LongPplReport(PerplexityReport):
    """Perplexity of one or more arms on the tokens that need long context, and on all tokens.

    Attributes:
        protocol: every setting, and `digest`, a fingerprint of targets and key tokens.
        measurements: per arm, sums per document, of `all` tokens and of `key tokens`.
        records: arm -> patch record as plain data, None for an unpatched model.
        trained_length: N in tokens, None where it is not known.
        skipped: indices of documents too short to be scored.
        notes: what a reader must know beside the numbers.
        curve: always empty.
        key_tokens: of each document the indices of its key tokens; `longppl` takes them for the next model.
        selection: how they were chosen: `chosen_by`, `short_length`, `stride`, `alpha`, `beta`.
    """

    key_tokens: list[list[int]] = field(default_factory=list)
    selection: dict[str, Any] = field(default_factory=dict)

    @property
    def shown_positions(self) -> list[str]:
        """Groups of tokens that tables and figures tell apart."""
        return [ALL, KEY]

    @property
    def longppl(self) -> float | None:
        """Perplexity of the key tokens of the first arm; None without a key token."""
        return next((row["perplexity"] for row in self.rows if row["positions"] == KEY), None)

    @property
    def perplexity(self) -> float:
        """Perplexity of all tokens of the first arm."""
        return next(row["perplexity"] for row in self.rows if row["positions"] == ALL)

    @property
    def key_count(self) -> int:
        """Number of key tokens that were scored."""
        return sum(map(len, self.key_tokens))

    @property
    def targets_text(self) -> str:
        """Which tokens are scored, in words."""
        return "one pass per document"

    @classmethod
    def join(cls, reports: Iterable[Self]) -> Self:
        """As `PerplexityReport.join`; the key tokens must be the same."""
        reports = list(reports)
        whole = super().join(reports)
        whole.key_tokens, whole.selection = reports[0].key_tokens, reports[0].selection
        return whole

    def to_dict(self) -> dict[str, Any]:
        """As `PerplexityReport.to_dict`, with `longppl`, `perplexity`, `key_count`, `key_tokens` and `selection`."""
        return super().to_dict() | self.named("longppl", "perplexity", "key_count", "key_tokens", "selection")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The report that `to_dict` came from."""
        report = super().from_dict(data)
        report.key_tokens, report.selection = data["key_tokens"], data["selection"]
        return report

    def table(self) -> RenderableType:
        """One line per arm: perplexity of the key tokens and of all, each with its interval."""
        rows = {(row["arm"], row["positions"]): row for row in self.rows}
        table = Table("arm", "LongPPL", "tokens", "perplexity of all", "tokens")
        for arm in self.arms:
            table.add_row(arm, *_cells(rows.get((arm, KEY))), *_cells(rows[arm, ALL]))
        chosen = self.selection
        gain = f", gain over {chosen['short_length']} tokens above {chosen['alpha']:g}" if "alpha" in chosen else ""
        about = [
            f"context of {self.protocol['context_lengths'][-1]} tokens at most",
            f"key tokens: {chosen['chosen_by']}{gain}",
            f"{self.rows[0]['documents']} documents",
            "in brackets 95 % over documents",
        ]
        return self.titled("LongPPL", table, [", ".join(about), *self.described()])

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """LongPPL and the perplexity of all tokens with their intervals, a line for each arm; .png, .svg or .pdf."""
        from hf_posext.evaluation.longppl_plot import plot_longppl

        return saved(plot_longppl(self), path)

    def _row(self, measurement: Measurement) -> dict[str, Any]:
        """The numbers of one arm, and of which tokens."""
        return {**super()._row(measurement), "positions": measurement.positions}


def _cells(row: Mapping[str, Any] | None) -> tuple[str, str]:
    """Perplexity with its interval, and the number of tokens."""
    if row is None:
        return "-", "0"
    ends = "" if row["low"] is None else f" [{row['low']:.2f}, {row['high']:.2f}]"
    return f"{row['perplexity']:.2f}{ends}", f"{row['tokens']:,}"
