"""What `pseudo_perplexity()` gives back: arms x context lengths x positions on the same masked tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from hf_posext.evaluation.arms_report import saved
from hf_posext.evaluation.perplexity_report import ALL, Measurement, PerplexityReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WITHIN, BEYOND = "<= ", "> "  # and N: what rows call the positions of a window up to the trained length and beyond it


def names_of_positions(trained_length: int) -> tuple[str, str]:
    """What rows call the positions up to N and those beyond N."""
    return f"{WITHIN}{trained_length}", f"{BEYOND}{trained_length}"


@dataclass(repr=False, eq=False)
class PseudoPerplexityReport(PerplexityReport):
    """Pseudo-perplexity of one or more arms at several context lengths, positions up to N and beyond N apart.

    Attributes:
        protocol: every setting, and `digest`, a fingerprint of the masked tokens.
        measurements: per arm, length and positions, sums per document; rows and intervals are computed from them.
        records: arm -> patch record as plain data, None for an unpatched model.
        trained_length: N in tokens, None where it is not known; then positions are not told apart.
        skipped: indices of documents that were left out.
        notes: what a reader must know beside the numbers.
        curve: always empty.
    """

    @property
    def shown_positions(self) -> list[str]:
        """Groups of positions that tables and figures tell apart: `all` alone where no position is beyond N."""
        found = list(dict.fromkeys(measurement.positions for measurement in self.measurements))
        return found if any(name.startswith(BEYOND) for name in found) else [ALL]

    @property
    def targets_text(self) -> str:
        """Which tokens are scored, in words."""
        share, targets = self.protocol["mask_share"], self.protocol["targets"]
        return f"masked tokens, {100 * share:g} % at a time, of {targets} tokens"

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Pseudo-perplexity against context length, a panel for each group of positions; .png, .svg or .pdf."""
        from hf_posext.evaluation.plots import plot_pseudo_perplexity

        return saved(plot_pseudo_perplexity(self), path)

    def table(self) -> RenderableType:
        """Positions and arms x context lengths, each cell the pseudo-perplexity over its interval, and the notes."""
        from hf_posext.evaluation.perplexity_table import pseudo_perplexity_table

        return pseudo_perplexity_table(self)

    def _row(self, measurement: Measurement) -> dict[str, Any]:
        """The numbers of one arm at one length, and at which positions."""
        return {**super()._row(measurement), "positions": measurement.positions}
