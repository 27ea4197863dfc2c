"""What `passkey()` gives back: arms x context lengths x depths, with intervals, the gate and all that was set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from rich.console import RenderableType

from hf_posext.evaluation.statistics import wilson
from hf_posext.reports import Report, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INCIDENTAL = ("batch_size", "bars", "decoding")  # settings that do not change what an arm's number means


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
class PasskeyReport(Report):
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

    protocol: dict[str, Any]
    cells: list[Cell]
    gates: dict[str, dict[str, Any]]
    records: dict[str, dict[str, Any] | None]
    trained_length: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def arms(self) -> list[str]:
        """Names of the arms, in the order in which they were measured."""
        return list(dict.fromkeys(cell.arm for cell in self.cells))

    @property
    def record(self) -> dict[str, Any] | None:
        """The patch record of the first patched arm."""
        return next((record for record in self.records.values() if record is not None), None)

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
    def join(cls, reports: Sequence[Self]) -> Self:
        """One report of the arms of several, which must have answered the same trials; a bar with equal cells is once.

        Raises:
            ValueError: no reports, other settings or trials, or an arm of one name with other numbers.
        """
        if not reports:
            raise ValueError("`reports` is empty. Give at least one report to join.")
        first = reports[0]
        whole = cls(first.protocol, [], {}, {}, first.trained_length)
        for report in reports:
            _check_same(first.protocol, report.protocol)
            for arm in report.arms:
                whole._take(report, arm)
            whole.gates |= {arm: gate for arm, gate in report.gates.items() if arm not in whole.gates}
            whole.notes += [note for note in report.notes if note not in whole.notes]
        return whole

    def to_dict(self) -> dict[str, Any]:
        """`protocol`, `rows`, `gates`, `vacuous`, `record`, `records`, `trained_length`, `notes`, `cells`."""
        return plain(
            {
                "protocol": self.protocol,
                "rows": self.rows,
                "gates": self.gates,
                "vacuous": self.vacuous,
                "record": self.record,
                "records": self.records,
                "trained_length": self.trained_length,
                "notes": self.notes,
                "cells": [asdict(cell) for cell in self.cells],
            }
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The report that `to_dict` came from."""
        rest = (data[name] for name in ("gates", "records", "trained_length", "notes"))
        return cls(data["protocol"], [Cell(**cell) for cell in data["cells"]], *rest)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """A heat map of depth against context length for each arm, written as .png, .svg or .pdf to a path."""
        from hf_posext.evaluation.passkey_plot import plot_passkey
        from hf_posext.evaluation.plots import save_figure

        figure = plot_passkey(self)
        if path is not None:
            save_figure(figure, path)
        return figure

    def table(self) -> RenderableType:
        """Arms and depths x context lengths, each cell the accuracy and its interval, all depths together below."""
        from hf_posext.evaluation.passkey_table import passkey_table

        return passkey_table(self)

    def _take(self, report: PasskeyReport, arm: str) -> None:
        """Adds one arm of another report."""
        found = [cell for cell in report.cells if cell.arm == arm]
        if arm not in self.arms:
            self.cells += found
            self.records[arm] = report.records.get(arm)
        elif found != [cell for cell in self.cells if cell.arm == arm]:
            raise ValueError(f"Two reports have an arm `{arm}` with other numbers. Name one of them with `arm=`.")


def _check_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuses to compare numbers that were measured differently."""
    for name in [*one, *other]:
        if name not in INCIDENTAL and one.get(name) != other.get(name):
            what = "the trials" if name == "digest" else f"`{name}`"
            raise ValueError(
                f"Reports can be joined only on the same trials with the same settings; they differ in {what}: "
                f"{one.get(name)!r} and {other.get(name)!r}. Measure both with one set of settings."
            )
