"""Copying at a distance: the share of random strings that each method continues far behind their first appearance."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from matplotlib.figure import Figure
from torch import nn

from hf_posext import PasskeyReport, passkey, patched
from hf_posext.evaluation.plots import line_style, mark_length, tidy

ARMS: dict[str, tuple[str, float | None]] = {
    "none": ("none", None),
    "pi": ("pi", None),
    "ntk": ("ntk", None),
    "yarn": ("yarn", None),
    "self_extend": ("self_extend", None),
    "rerope": ("rerope", None),
    "self_extend, wide": ("self_extend", 1 / 2),
    "rerope, wide": ("rerope", 3 / 4),
}
"""Arm -> method, and its window as a share of N if it is not the default (1/4 and 1/2). The wide ones were chosen after
the defaults had been seen, on 16 of the trials at 4 and 8 times N and as many with the string in the middle."""
BARS = ("truncate", "window")
TIMES = (2, 4, 8)
SETTINGS: dict[str, Any] = {"probe": "copy", "depths": [0.0], "answer_length": 1, "batch_size": 8}
"""Depth 0, the farthest there is: 32 random tokens, filler, 31 of them again, and the last one is asked for."""
STRING = 32  # tokens; the distance of a copy is a context without it
DODGE = 0.035  # octaves between neighbouring arms


def measure(model: nn.Module, tokenizer: Any, documents: Any, trained: int, trials: int) -> list[PasskeyReport]:
    """One report for each multiple of N: all arms, patched for it, given as many tokens and given N."""
    return [
        PasskeyReport.join([_read(model, tokenizer, documents, trained, times, arm, trials) for arm in ARMS])
        for times in TIMES
    ]


def _read(
    model: nn.Module, tokenizer: Any, documents: Any, trained: int, times: int, arm: str, trials: int
) -> PasskeyReport:
    """One arm; the bars are asked beside the unpatched model."""
    method, share = ARMS[arm]
    options = {} if share is None else {"window": round(share * trained)}
    with nullcontext() if arm == "none" else patched(model, method, times, **options):
        return passkey(
            model,
            tokenizer,
            context_lengths=[trained, times * trained],
            documents=documents,
            trials=trials,
            bars=BARS if arm == "none" else (),
            arm=arm,
            **SETTINGS,
        )


def rows(reports: list[PasskeyReport]) -> list[dict[str, Any]]:
    """Per arm and length the share with its Wilson interval; at N the arm as it was patched for the longest context."""
    lengths = [(report, report.protocol["context_lengths"][-1]) for report in reports]
    trained = reports[-1].protocol["context_lengths"][0]
    return [
        {"arm": arm, "context_length": length, "distance": length - STRING, **(report.over_depths(arm, length) or {})}
        for report, length in [(reports[-1], trained), *lengths]
        for arm in report.arms
    ]


def table(reports: list[PasskeyReport]) -> str:
    """Arms x context lengths in Markdown."""
    found = rows(reports)
    lengths = sorted({row["context_length"] for row in found})
    heads = [f"{lengths[0]}, patched for {lengths[-1]}", *(str(length) for length in lengths[1:])]
    cells = {
        (row["arm"], row["context_length"]): f"{row['accuracy']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
        for row in found
    }
    lines = [f"| arm | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    lines += [f"| `{arm}` | {' | '.join(cells[arm, length] for length in lengths)} |" for arm in reports[-1].arms]
    return "\n".join(lines)


def plot(reports: list[PasskeyReport]) -> Figure:
    """Share of copies against context length, a line for each arm with its Wilson intervals, N and the gate marked."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    arms = reports[-1].arms
    methods = [arm for arm in arms if arm not in (*BARS, "none")]
    gate = reports[-1].gates["none"]
    trained, lengths = gate["context_length"], [report.protocol["context_lengths"][-1] for report in reports]
    for place, arm in enumerate(arms):
        own = [gate] + [report.over_depths(arm, length) or {} for report, length in zip(reports, lengths, strict=True)]
        shift = 2 ** ((place - (len(arms) - 1) / 2) * DODGE)
        places = [trained, *(length * shift for length in lengths)]
        style = line_style(arm, methods)
        axes.plot(places, [row["accuracy"] for row in own], label=arm, linewidth=1.8, markersize=5, **style)
        ends = [row["low"] for row in own[1:]], [row["high"] for row in own[1:]]
        axes.vlines(places[1:], *ends, colors=style["color"], linewidth=1, alpha=0.6)
    axes.axhline(reports[-1].protocol["gate"], color="#bbbbbb", linewidth=1, zorder=1)
    axes.annotate("gate", (1.0, reports[-1].protocol["gate"]), xycoords=("axes fraction", "data"), xytext=(2, 0),
                  textcoords="offset points", va="center", fontsize=8, color="#666666")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks([trained, *lengths], [f"{length}\n({length - STRING})" for length in (trained, *lengths)])
    axes.set_xlabel("context length, in brackets distance of the copy (tokens)")
    axes.set_ylabel("copies continued rightly (share)")
    axes.set_ylim(-0.02, 1.02)
    mark_length(axes, trained, f"trained length {trained}")
    tidy(axes)
    figure.legend(loc="outside right upper", frameon=False, title="arm")
    return figure
