"""What a run gained and what it cost: perplexity on the same held-out tokens before, meanwhile and after."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_posext.evaluation.perplexity import perplexity
from hf_posext.evaluation.perplexity_report import ALL, PerplexityReport
from hf_posext.evaluation.pseudo_perplexity import pseudo_perplexity
from hf_posext.evaluation.pseudo_report import names_of_positions
from hf_posext.training.config import EvaluationConfig

BARS = ("none", "truncate")
TUNED = "{arm}, tuned"


@dataclass(frozen=True)
class Meter:
    """Measures a model on held-out text.

    Attributes:
        tokenizer: of the model.
        documents: held-out text; where there is none nothing is measured.
        settings: what is measured.
        trained_length: N in tokens.
        target_length: T in tokens.
        is_masked: whether the model is a masked LM.
        progress: a bar on stderr; None shows it in a terminal.
    """

    tokenizer: Any
    documents: list[Any]
    settings: EvaluationConfig
    trained_length: int
    target_length: int
    is_masked: bool
    progress: bool | None

    @property
    def lengths(self) -> list[int]:
        """Context lengths in tokens: as the config says, else N/2, N, 2N, ... and T."""
        if self.settings.context_lengths is not None:
            return sorted(self.settings.context_lengths)
        doublings = range(-1, max(0, math.ceil(math.log2(self.target_length / self.trained_length))))
        return sorted({*(int(self.trained_length * 2.0**step) for step in doublings), self.target_length})

    def measure(self, model: nn.Module, lengths: list[int], **arguments: Any) -> PerplexityReport:
        """Perplexity, or pseudo-perplexity, at some context lengths."""
        function = pseudo_perplexity if self.is_masked else perplexity
        if self.settings.targets is not None:
            arguments["targets"] = self.settings.targets
        return function(
            model,
            self.tokenizer,
            self.documents,
            context_lengths=lengths,
            endpoints_per_document=self.settings.endpoints_per_document,
            max_documents=self.settings.max_documents,
            text_column=self.settings.text_column,
            progress=self.progress,
            **arguments,
        )

    def before(self, model: nn.Module) -> PerplexityReport | None:
        """The model as it is before it is trained, beside the bars."""
        return None if not self.documents else self.measure(model, self.lengths, bars=BARS)

    def meanwhile(self, model: nn.Module) -> dict[str, float]:
        """What a run logs of a model that is being trained."""
        report = self.measure(model, [self.target_length], bars=[], arm="tuned")
        row = report.rows[0]
        return {"eval_loss": row["nll"], f"eval_perplexity_{self.target_length}": row["perplexity"]}

    def after(self, model: nn.Module, before: PerplexityReport | None) -> PerplexityReport | None:
        """The model after it was trained, joined with what was measured before."""
        if before is None:
            return None
        tuned = self.measure(model, self.lengths, bars=[], arm=TUNED.format(arm=before.arms[0]))
        return type(before).join([before, tuned])

    def outcome(self, report: PerplexityReport) -> dict[str, Any]:
        """Gain at the longest context and retention at N, with their paired 95 % intervals.

        Args:
            report: as `after` gives it.
        """
        before, tuned = report.arms[0], TUNED.format(arm=report.arms[0])
        longest = max(self.lengths)
        far = names_of_positions(self.trained_length)[1] if self.is_masked and longest > self.trained_length else ALL
        values = {
            (row["arm"], row["context_length"]): row["perplexity"]
            for row in report.rows
            if row.get("positions", ALL) == (far if row["context_length"] == longest > self.trained_length else ALL)
        }
        gain = {
            "context_length": longest,
            "before": values[before, longest],
            "after": values[tuned, longest],
            "truncate": values["truncate", longest],
            "against_before": report.difference(tuned, before, longest, far),
            "against_truncate": report.difference(tuned, "truncate", longest, far),
        }
        return {"gain": gain} | self.retention(report, tuned, values)

    def retention(self, report: PerplexityReport, tuned: str, values: dict[tuple[str, int], float]) -> dict[str, Any]:
        """Perplexity at N over that of the model as it was given; nothing where N was not measured.

        There the bar `truncate` is the model as it was given, also where that cannot read any longer text.
        """
        length = self.trained_length
        if length not in self.lengths:
            return {}
        found = report.difference(tuned, "truncate", length)
        ends = {name: None if found[name] is None else math.exp(found[name]) for name in ("low", "high")}
        kept = {
            "context_length": length,
            "after": values[tuned, length],
            "unpatched": values["truncate", length],
            "ratio": math.exp(found["difference"]),
        }
        return {"retention": kept | ends}
