"""How a report of a retrieval probe prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Column, Table

if TYPE_CHECKING:
    from hf_posext.evaluation.passkey_report import PasskeyReport


def passkey_table(report: PasskeyReport) -> RenderableType:
    """Arms and depths x context lengths, each cell the accuracy and its interval; below it what was asked."""
    lengths = report.protocol["context_lengths"]
    cells = {(row["arm"], row["depth"], row["context_length"]): row for row in report.rows}
    table = Table("arm", "depth", *(Column(str(length), justify="right") for length in lengths))
    for arm in report.arms:
        for depth in report.protocol["depths"]:
            table.add_row(arm, f"{depth:g}", *(_cell(cells.get((arm, depth, length))) for length in lengths))
        pooled = (_cell(report.over_depths(arm, length)) for length in lengths)
        table.add_row(arm, "all", *pooled, style="bold", end_section=True)
    title = f"Answers retrieved, probe {report.protocol['probe']}, by context length in tokens"
    return report.titled(title, table, _caption(report))


def _caption(report: PasskeyReport) -> list[str]:
    """What was asked, what each arm is, and what it can do within the trained length."""
    protocol = report.protocol
    wording = [] if protocol["wording"] is None else [f"wording {protocol['wording']}"]
    known = [] if report.trained_length is None else [f"trained length {report.trained_length} tokens"]
    about = [
        f"{protocol['trials']} trials at each depth and length",
        f"answers of {protocol['answer_length']}",
        *wording,
        f"filler: {protocol['filler']}",
        protocol["decoding"],
        *known,
        "in brackets 95 %",
    ]
    gates = ", ".join(f"{arm} {_cell(gate)}" for arm, gate in report.gates.items())
    place = next((gate["context_length"] for gate in report.gates.values()), None)
    within = f"within the trained length, at {place} tokens (gate {protocol['gate']:g}): {gates}"
    return [", ".join(about), *report.described(), *([within] if gates else [])]


def _cell(found: Mapping[str, Any] | None) -> str:
    """Accuracy and interval, a dash where nothing was measured."""
    return "-" if found is None else f"{found['accuracy']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
