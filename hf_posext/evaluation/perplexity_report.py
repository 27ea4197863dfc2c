"""What `perplexity()` gives back: arms x context lengths on the same targets, with intervals and all that was set."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from rich.console import RenderableType

from hf_posext.errors import unknown
from hf_posext.evaluation.arms_report import ArmsReport, saved
from hf_posext.evaluation.protocols import BARS
from hf_posext.evaluation.statistics import mean_nll, nll_difference, perplexity_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL = "all"


@dataclass(frozen=True)
class Measurement:
    """What one arm scored at one context length.

    Attributes:
        arm: name of the arm.
        context_length: tokens fed to the model at most.
        documents: indices of the documents that were scored.
        nll: summed NLL of each in nats, float64.
        tokens: scored tokens of each.
        positions: which of the tokens were summed, by their place in the window; `all` of them, or a part.
    """

    arm: str
    context_length: int
    documents: tuple[int, ...]
    nll: tuple[float, ...]
    tokens: tuple[int, ...]
    positions: str = ALL


@dataclass(repr=False, eq=False)
class PerplexityReport(ArmsReport):
    """Perplexity of one or more arms at several context lengths.

    Attributes:
        protocol: every setting, and `digest`, a fingerprint of the targets.
        measurements: per arm and length, sums per document; rows and intervals are computed from them.
        records: arm -> patch record as plain data, None for an unpatched model.
        trained_length: N in tokens, None where it is not known.
        skipped: indices of documents too short to be scored.
        notes: what a reader must know beside the numbers.
        curve: protocol `full` only: NLL in buckets of positions, `first` <= tokens of context <= `last`.
    """

    units = "scored tokens"
    incidental = ("batch_size", "chunk", "prefill_chunk_size", "bars")

    protocol: dict[str, Any]
    measurements: list[Measurement]
    records: dict[str, dict[str, Any] | None]
    trained_length: int | None = None
    skipped: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)

    @property
    def shown_positions(self) -> list[str]:
        """Groups of positions that tables and figures tell apart."""
        return [ALL]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One row per arm and length; `low` and `high` bound the perplexity at 95 %, None below two documents."""
        return [self._row(measurement) for measurement in self.measurements]

    def difference(self, arm: str, versus: str, context_length: int, positions: str = ALL) -> dict[str, Any]:
        """Mean NLL of `arm` minus that of `versus`, in nats per token, with its paired 95 % interval over documents.

        Args:
            arm: one arm.
            versus: the other.
            context_length: in tokens.
            positions: tokens at which positions, in the words of the rows, where these tell positions apart.

        Returns:
            `arm`, `versus`, `context_length`, `difference` (negative: `arm` is better), `low`, `high`, `documents`.

        Raises:
            ValueError: an arm, a length or positions that were not measured.
        """
        one, other = (self._find(name, context_length, positions) for name in (arm, versus))
        found = nll_difference(one.nll, one.tokens, other.nll, other.tokens, **self._bootstrap)
        return {
            "arm": arm,
            "versus": versus,
            "context_length": context_length,
            "difference": found.value,
            "low": _end(found.low),
            "high": _end(found.high),
            "documents": len(one.documents),
        }

    def to_dict(self) -> dict[str, Any]:
        """`protocol`, `rows`, `record`, `records`, `trained_length`, `skipped`, `notes`, `curve`, `measurements`."""
        return self.named(
            "protocol", "rows", "record", "records", "trained_length", "skipped", "notes", "curve", "measurements"
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The report that `to_dict` came from; a NLL that is not finite is None there and NaN here."""
        measurements = [
            Measurement(
                item["arm"],
                item["context_length"],
                tuple(item["documents"]),
                tuple(math.nan if nll is None else nll for nll in item["nll"]),
                tuple(item["tokens"]),
                item.get("positions", ALL),
            )
            for item in data["measurements"]
        ]
        rest = (data[name] for name in ("records", "trained_length", "skipped", "notes", "curve"))
        return cls(data["protocol"], measurements, *rest)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Perplexity against context length as a matplotlib figure, written as .png, .svg or .pdf to a path."""
        from hf_posext.evaluation.plots import plot_perplexity

        return saved(plot_perplexity(self), path)

    def table(self) -> RenderableType:
        """Arms x context lengths, each cell the perplexity over its interval; below it what was measured, and notes."""
        from hf_posext.evaluation.perplexity_table import perplexity_table

        return perplexity_table(self)

    @property
    def targets_text(self) -> str:
        """Which tokens are scored, in words."""
        return {
            "tail": f"last {self.protocol['targets']} tokens",
            "full": "one pass per document",
            "sliding": f"sliding windows, stride {self.protocol['stride']}",
            "disjoint": "disjoint windows",
        }[self.protocol["protocol"]]

    @property
    def _bootstrap(self) -> dict[str, int]:
        return {"resamples": self.protocol["resamples"], "seed": self.protocol["seed"]}

    def _row(self, measurement: Measurement) -> dict[str, Any]:
        """The numbers of one arm at one length."""
        found = mean_nll(measurement.nll, measurement.tokens, **self._bootstrap)
        return {
            "arm": measurement.arm,
            "context_length": measurement.context_length,
            "nll": found.value,
            "perplexity": perplexity_of(found.value),
            "low": _end(perplexity_of(found.low)),
            "high": _end(perplexity_of(found.high)),
            "tokens": sum(measurement.tokens),
            "documents": len(measurement.documents),
            "skipped": len(self.skipped),
        }

    def _find(self, arm: str, context_length: int, positions: str) -> Measurement:
        """The measurement of one arm at one length."""
        if arm not in self.arms:
            raise ValueError(unknown("arm", arm, self.arms))
        found = {
            measurement.positions: measurement
            for measurement in self.measurements
            if (measurement.arm, measurement.context_length) == (arm, context_length)
        }
        if not found:
            lengths = self.protocol["context_lengths"]
            raise ValueError(f"`context_length` must be one of {lengths}, got {context_length!r}.")
        if positions not in found:
            raise ValueError(unknown(f"positions at {context_length} tokens:", positions, found))
        return found[positions]

    @property
    def _measured(self) -> list[Measurement]:
        return self.measurements

    @classmethod
    def _begun(cls, first: Self) -> Self:
        return cls(first.protocol, [], {}, first.trained_length, first.skipped)

    def _take(self, report: Self, arm: str) -> str | None:
        """Adds one arm of another report, and its curve."""
        name = super()._take(report, arm)
        if name is not None:
            self.curve += [{**bucket, "arm": name} for bucket in report.curve if bucket["arm"] == arm]
        return name

    def _other_name(self, report: Self, arm: str) -> str:
        """A free name for the bar of a model that was tuned."""
        name = f"{arm} ({report.arms[0]})"
        return name if arm in BARS and name not in self.arms else super()._other_name(report, arm)


def _end(value: float) -> float | None:
    """An end of an interval, None where there is none."""
    return None if math.isnan(value) else value
