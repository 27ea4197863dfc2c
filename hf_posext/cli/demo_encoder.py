"""The story of `posext demo` on an embedded encoder: longer tables for a masked LM that stops dead at its last row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from hf_posext.cli.words import verdict

if TYPE_CHECKING:
    from torch import nn

    from hf_posext.evaluation.pseudo_report import PseudoPerplexityReport

DYNAMIC, RANDOM = "pi (dynamic)", "random rows"
KEEPING = ("tile", "hierarchical")  # methods that leave text of N tokens as it is
TABLES = ("pi", *KEEPING)
NOTE = (
    "`truncate` is not patched and reads the same text in pieces of at most {trained} tokens; each other arm is "
    "patched for each context length T by the factor T / {trained}, so at {trained} it changes nothing; `{random}` has "
    "the old rows and then rows drawn at random with their spread, which is what a larger table is without a method; "
    "`{dynamic}` is patched once, for {longest} tokens. No arm is tuned."
)


@dataclass(frozen=True)
class EncoderScope:
    """How much is measured.

    Attributes:
        factors: context lengths as multiples of the trained length; the first is 1.
        documents: documents read at most; None reads all.
        spans: stretches of text, each as long as the longest context, whose masked tokens are scored in each document.
        draws: passes over the same text with other tokens masked.
    """

    factors: tuple[int, ...] = (1, 2, 4)
    documents: int | None = None
    spans: int = 2
    draws: int = 4


QUICK = EncoderScope(factors=(1, 2), documents=8, spans=1, draws=2)


@dataclass(frozen=True)
class EncoderMeter:
    """Scores one masked LM, patched in one way after the other, on the same masked tokens.

    Attributes:
        model: the model, not patched.
        tokenizer: its tokenizer.
        documents: texts.
        lengths: context lengths in tokens; the first is N.
        scope: how much is measured.
    """

    model: nn.Module
    tokenizer: Any
    documents: Sequence[Any]
    lengths: tuple[int, ...]
    scope: EncoderScope

    @property
    def trained(self) -> int:
        """N in tokens."""
        return self.lengths[0]

    @property
    def targets(self) -> int:
        """Tokens at the end of each document among which the masked ones are scored, in windows of every length."""
        room = self.trained - self.tokenizer.num_special_tokens_to_add()
        return self.scope.spans * self.lengths[-1] // self.trained * room

    def score(self, context_lengths: Sequence[int], **arguments: Any) -> PseudoPerplexityReport:
        """Pseudo-perplexity at some lengths, the model as it is now."""
        from hf_posext.evaluation.pseudo_perplexity import pseudo_perplexity

        return pseudo_perplexity(
            self.model,
            self.tokenizer,
            self.documents,
            context_lengths=context_lengths,
            targets=self.targets,
            draws=self.scope.draws,
            max_documents=self.scope.documents,
            batch_size=4,
            **arguments,
        )

    def measure(self) -> PseudoPerplexityReport:
        """All arms at all lengths."""
        from hf_posext.patching import patched

        with patched(self.model, "pi", target_length=self.lengths[-1], dynamic=True):
            report = self.score(self.lengths, arm=DYNAMIC, bars=["truncate"])
        parts = {"none": [self.score([self.trained], bars=[])]}
        for method in TABLES:
            parts[method] = [self.score_patched(method, length) for length in self.lengths]
        parts[RANDOM] = [self.score_random(length) for length in self.lengths]
        return replace(
            report,
            measurements=report.measurements + [each for part in chain(*parts.values()) for each in part.measurements],
            records=report.records | {arm: by_length(arm, found) for arm, found in parts.items() if arm != "none"},
            notes=[NOTE.format(trained=self.trained, longest=self.lengths[-1], random=RANDOM, dynamic=DYNAMIC)],
        )

    def score_patched(self, method: str, length: int) -> PseudoPerplexityReport:
        """At one length, patched for it."""
        from hf_posext.patching import patched

        with patched(self.model, method, target_length=length):
            return self.score([length], arm=method, bars=[])

    def score_random(self, length: int) -> PseudoPerplexityReport:
        """At one length, with as many rows, the new ones drawn at random."""
        from hf_posext.patching import patched

        with patched(self.model, "tile", target_length=length), random_rows(self.model, self.trained):
            return self.score([length], arm=RANDOM, bars=[])


@contextmanager
def random_rows(model: nn.Module, trained: int) -> Iterator[None]:
    """Rows beyond N drawn at random with the mean and the spread of the old ones, for the length of a with-block."""
    import torch

    from hf_posext.mechanisms import find_sites, has_rows

    (site,) = (site for site in find_sites(model) if has_rows(site))
    rows = getattr(site.module, site.field)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        drawn = torch.randn(rows[trained:].shape, generator=generator) * rows[:trained].std(0) + rows[:trained].mean(0)
        kept = rows.clone()
        rows[trained:] = drawn
        try:
            yield
        finally:
            rows.copy_(kept)


def by_length(arm: str, parts: Sequence[PseudoPerplexityReport]) -> dict[str, Any]:
    """The record of an arm that was patched for each context length anew."""
    steps = {part.measurements[0].context_length: part.record for part in parts}
    return {"method": arm, "factor": "T / N", "by_context_length": steps}


def read(report: PseudoPerplexityReport, lengths: Sequence[int]) -> list[str]:
    """What the numbers say, in sentences made from them; "clearly" means that the paired 95 % interval leaves out 0."""
    rows = {(row["arm"], row["context_length"], row["positions"]): row["perplexity"] for row in report.rows}
    trained, beyond = lengths[0], f"> {lengths[0]}"
    sentences = [f"Unpatched: {rows['none', trained, 'all']:.1f} at {trained} tokens; one more is an error."]
    for length in lengths[1:]:
        best = min(TABLES, key=lambda arm: rows[arm, length, "all"])
        sentences.append(
            f"With {length} tokens `{best}` is the best with {rows[best, length, 'all']:.1f}, against "
            f"{rows['truncate', length, 'all']:.1f} for pieces of {trained} tokens: "
            f"{verdict(report.difference(best, 'truncate', length))}."
        )
        against = "; ".join(f"`{arm}` {verdict(report.difference(arm, RANDOM, length, beyond))}" for arm in TABLES)
        sentences.append(
            f"At positions beyond {trained} of {length}, against rows drawn at random "
            f"({rows[RANDOM, length, beyond]:.1f}): {against}."
        )
    short = [each for each in report.measurements if (each.context_length, each.positions) == (trained, "all")]
    nll = {each.arm: each.nll for each in short}
    same = nll[DYNAMIC] == nll["none"]
    sentences.append(
        f"Patched once for {lengths[-1]} tokens and given {trained}, `{DYNAMIC}` "
        + ("reads to the last bit as the unpatched model." if same else "does not read as the unpatched model.")
    )
    return sentences
