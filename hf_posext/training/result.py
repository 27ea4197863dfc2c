"""What `finetune()` gives back: the model, what the run cost, and perplexity before and after on the same tokens."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text
from torch import nn

from hf_posext.evaluation.arms_report import saved
from hf_posext.evaluation.perplexity_report import PerplexityReport
from hf_posext.reports import Report, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(repr=False, eq=False)
class FinetuneResult(Report):
    """A model that was trained.

    Attributes:
        model: with patch and adapter, in evaluation mode; the plain model where the adapter was merged.
        metrics: `steps`, `seconds`, `tokens` (padding included), `trainable`, `parameters`, `trainable_share`, `loss`,
            `is_interrupted`, and with an evaluation `retention` and `gain`.
        output_dir: folder with the adapter or the checkpoint, `report.json` and `plot.png`.
        history: what was logged: dicts with `step` and, as they apply, `loss`, `learning_rate`, `eval_perplexity_T`.
        evaluation: the bars, the patched model before it was trained and after; None without held-out text.
        config: of the run, as plain data.
    """

    model: nn.Module
    metrics: dict[str, Any]
    output_dir: Path
    history: list[dict[str, Any]]
    evaluation: PerplexityReport | None
    config: dict[str, Any]

    def table(self) -> RenderableType:
        """What was trained and what it cost; below it perplexity before and after."""
        lines = [Text(line) for line in (self.cost(), *self.reading())]
        return Group(*([self.evaluation.table()] if self.evaluation else []), *lines)

    def cost(self) -> str:
        """Steps, seconds and what was trained, in a sentence."""
        found = self.metrics
        stopped = " It was stopped before its end; start it again to go on." if found["is_interrupted"] else ""
        return (
            f"{found['steps']} steps on {found['tokens']:,} tokens in {found['seconds']:.0f} s; trained "
            f"{found['trainable']:,} of {found['parameters']:,} numbers ({found['trainable_share']:.1%}).{stopped}"
        )

    def reading(self) -> list[str]:
        """What the numbers say of long text and of short text."""
        if "gain" not in self.metrics:
            return []
        gain, kept = self.metrics["gain"], self.metrics.get("retention")
        lines = [
            f"At {gain['context_length']} tokens: {gain['after']:.1f} after, {gain['before']:.1f} before, "
            f"{gain['truncate']:.1f} for the model as it was given, truncated to what it was trained for."
        ]
        return lines if kept is None else [*lines, self.about_short(kept)]

    def about_short(self, kept: dict[str, Any]) -> str:
        """What the numbers say of text of the trained length."""
        return (
            f"Short text, {kept['context_length']} tokens: {kept['after']:.1f} after, {kept['unpatched']:.1f} for the "
            f"model as it was given: {kept['ratio']:.3f} times as much."
        )

    def to_dict(self) -> dict[str, Any]:
        """`metrics`, `config`, `history`, `output_dir`, and the evaluation with its `rows`."""
        measured = {} if self.evaluation is None else self.evaluation.to_dict()
        own = {
            "metrics": self.metrics,
            "config": self.config,
            "history": self.history,
            "output_dir": str(self.output_dir),
        }
        return plain(measured | own)

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """The training loss and, beside it, perplexity against context length, written to a path."""
        from hf_posext.training.plots import plot_finetuning

        return saved(plot_finetuning(self), path)
