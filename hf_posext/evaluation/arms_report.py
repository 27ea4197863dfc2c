"""What reports of several arms share: reading the arms, joining reports, and the words and figures they give out."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hf_posext.records import PatchRecord
from hf_posext.reports import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ArmsReport(Report):
    """What one or more arms did, each measured on the same units with the same settings.

    Attributes:
        protocol: every setting, and `digest`, a fingerprint of the units.
        records: arm -> patch record as plain data, None for an unpatched model.
        notes: what a reader must know beside the numbers.
    """

    units: ClassVar[str]  # what every arm is measured on, in words
    incidental: ClassVar[tuple[str, ...]]  # settings that do not change what an arm's number means

    protocol: dict[str, Any]
    records: dict[str, dict[str, Any] | None]
    notes: list[str]

    @property
    @abstractmethod
    def _measured(self) -> list[Any]:
        """All that was measured, each with its `arm`."""

    @classmethod
    @abstractmethod
    def _begun(cls, first: Self) -> Self:
        """A report without arms, of the settings of another."""

    @property
    def arms(self) -> list[str]:
        """Names of the arms, in the order in which they were measured."""
        return list(dict.fromkeys(each.arm for each in self._measured))

    @property
    def record(self) -> dict[str, Any] | None:
        """The patch record of the first patched arm."""
        return next((record for record in self.records.values() if record is not None), None)

    @classmethod
    def join(cls, reports: Iterable[Self]) -> Self:
        """One report of the arms of several, which must have been measured on the same units with the same settings.

        An arm that stands in several reports with equal numbers is kept once. A bar of perplexity with other numbers
        (of a tuned model) is kept as `truncate (arm)`.

        Raises:
            ValueError: no reports, other settings or units, or two arms of one name with other numbers.
        """
        reports = list(reports)
        if not reports:
            raise ValueError("`reports` is empty. Give at least one report to join.")
        whole = cls._begun(reports[0])
        for report in reports:
            whole._check_same(report.protocol)
            for arm in report.arms:
                whole._take(report, arm)
            whole.notes += [note for note in report.notes if note not in whole.notes]
        return whole

    def described(self) -> list[str]:
        """What each patched arm was patched with, a line for each."""
        return [f"{arm}: {PatchRecord.from_dict(each).describe()}" for arm, each in self.records.items() if each]

    def titled(self, title: str, table: Table, caption: Iterable[str]) -> RenderableType:
        """A table under its title and over its caption and the notes."""
        notes = (Text(f"note: {note}") for note in self.notes)
        return Group(Text(title, style="bold"), table, *(Text(line, style="dim") for line in caption), *notes)

    def _take(self, report: Self, arm: str) -> str | None:
        """Adds one arm of another report; its name here, None where it is here already."""
        found = report._of(arm)
        if found == self._of(arm):
            return None
        name = arm if arm not in self.arms else self._other_name(report, arm)
        self._measured.extend(replace(each, arm=name) for each in found)
        self.records[name] = report.records.get(arm)
        return name

    def _of(self, arm: str) -> list[Any]:
        """All that was measured of one arm."""
        return [each for each in self._measured if each.arm == arm]

    def _other_name(self, report: Self, arm: str) -> str:
        """A free name for an arm whose own is taken by one with other numbers."""
        raise ValueError(f"Two reports have an arm `{arm}` with other numbers. Name one of them with `arm=`.")

    def _check_same(self, other: Mapping[str, Any]) -> None:
        """Refuses to compare numbers that were measured differently."""
        one = self.protocol
        for name in [*one, *other]:
            if name not in self.incidental and one.get(name) != other.get(name):
                what = f"the {self.units}" if name == "digest" else f"`{name}`"
                raise ValueError(
                    f"Reports can be joined only on the same {self.units} with the same settings; they differ in "
                    f"{what}: {one.get(name)!r} and {other.get(name)!r}. Measure both with one set of documents and "
                    "settings."
                )


def saved(figure: Figure, path: str | os.PathLike[str] | None) -> Figure:
    """The figure, which is written as .png, .svg or .pdf to the path if there is one."""
    from hf_posext.evaluation.plots import save_figure

    if path is not None:
        save_figure(figure, path)
    return figure
