"""What `passkey()` gives back: arms x context lengths x depths, with intervals, the gate and all that was set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from rich.console import RenderableType

from hf_posext.evaluation.arms_report import ArmsReport, saved
from hf_posext.evaluation.statistics import wilson

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Cell:
    """What one arm answered at one context length and depth.

    Attributes:
        arm: name of the arm.
        context_length: tokens of prompt and answer at most.
        depth: where the answers stand, 0 to 1.
        correct: trials in which every token of the answer was right.
        trials: in all.
    """

    arm: str
    context_length: int
    depth: float
    correct: int
    trials: int


def share(cells: Iterable[Cell]) -> dict[str, Any]:
    """`correct`, `trials`, `accuracy` and its 95 % interval `low`, `high` of some cells taken together."""
    cells = [*cells]
    correct, trials = sum(cell.correct for cell in cells), sum(cell.trials for cell in cells)
    low, high = wilson(correct, trials)
    return {"correct": correct, "trials": trials, "accuracy": correct / trials, "low": low, "high": high}


@dataclass(repr=False, eq=False)
class PasskeyReport(ArmsReport):
    """Share of answers that one or more arms retrieve, by depth and context length.

    Attributes:
        protocol: every setting, `filler`, `decoding`, and `digest`, a fingerprint of the trials.
        cells: per arm, length and depth.
        gates: arm -> its accuracy at the longest length within N (`context_length`, `correct`, `trials`, `accuracy`,
            `low`, `high`); of the model without its patch it is called `none`.
        records: arm -> patch record as plain data, None for an unpatched model.
        trained_length: N in tokens, None where it is not known.
        notes: what a reader must know beside the numbers.
    """

    units = "trials"
    incidental = ("batch_size", "bars", "decoding")

    protocol: dict[str, Any]
    cells: list[Cell]
    gates: dict[str, dict[str, Any]]
    records: dict[str, dict[str, Any] | None]
    trained_length: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def vacuous(self) -> bool | None:
        """Whether the model fails within its trained length, with its patch and without; None where N is not known."""
        if not self.gates:
            return None
        return all(gate["accuracy"] < self.protocol["gate"] for gate in self.gates.values())

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per arm, length and depth; `gate` is the accuracy of the arm within the trained length."""
        vacuous = self.vacuous
        return [
            {
                "arm": cell.arm,
                "context_length": cell.context_length,
                "depth": cell.depth,
                **share([cell]),
                "gate": self.gates[cell.arm]["accuracy"] if cell.arm in self.gates else None,
                "vacuous": vacuous,
            }
            for cell in self.cells
        ]

    def over_depths(self, arm: str, context_length: int) -> dict[str, Any] | None:
        """`correct`, `trials`, `accuracy`, `low` and `high` over all depths; None where the arm was not measured."""
        cells = [cell for cell in self.cells if (cell.arm, cell.context_length) == (arm, context_length)]
        return share(cells) if cells else None

    @classmethod
    def join(cls, reports: Iterable[Self]) -> Self:
        """As `ArmsReport.join`, with the gates of all; the first of a name is kept."""
        reports = list(reports)
        whole = super().join(reports)
        for report in reports:
            whole.gates |= {arm: gate for arm, gate in report.gates.items() if arm not in whole.gates}
        return whole

    def to_dict(self) -> dict[str, Any]:
        """`protocol`, `rows`, `gates`, `vacuous`, `record`, `records`, `trained_length`, `notes`, `cells`."""
        return self.named(
            "protocol", "rows", "gates", "vacuous", "record", "records", "trained_length", "notes", "cells"
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The report that `to_dict` came from."""
        rest = (data[name] for name in ("gates", "records", "trained_length", "notes"))
        return cls(data["protocol"], [Cell(**cell) for cell in data["cells"]], *rest)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """A heat map of depth against context length for each arm, written as .png, .svg or .pdf to a path."""
        from hf_posext.evaluation.passkey_plot import plot_passkey

        return saved(plot_passkey(self), path)

    def table(self) -> RenderableType:
        """Arms and depths x context lengths, each cell the accuracy and its interval, all depths together below."""
        from hf_posext.evaluation.passkey_table import passkey_table

        return passkey_table(self)

    @property
    def _measured(self) -> list[Cell]:
        return self.cells

    @classmethod
    def _begun(cls, first: Self) -> Self:
        return cls(first.protocol, [], {}, {}, first.trained_length)
