# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_posext"]
# ///
"""Tries to patch every architecture of the installed transformers that encodes positions, and writes docs/coverage.md.

Every architecture is built as a tiny random model and asked for two invariants: `pi` with factor 2 is a division of
positions by two, and `unpatch_model` gives every bit back. Those with a table, a linear or a relative bias also have to
read twice as many tokens.

    python -m recipes.coverage                 # from the root of the repository: the models come from `tests`
    python -m recipes.coverage --out here.md

Two to four minutes on one core, under 1 GB of memory. Prints both counts and each architecture that fails.
"""

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from tests import sweep
from tests.coverage_checks import NOT_IN_LOGITS, USED_TWICE, Finding, examine
from tests.position_encodings import BIASES

DOCUMENT = Path("docs/coverage.md")
TWICE, ROWS = (
    "; ".join(f"`{name}`: {reason}" for name, reason in sorted(reasons.items()))
    for reasons in (USED_TWICE, NOT_IN_LOGITS)
)
REASONS: Mapping[str, str] = {
    "BltForCausalLM": "its global layers count patches of bytes, not tokens",
    **dict.fromkeys(
        ("FastSpeech2ConformerModel", "FunnelForMaskedLM"),
        "relative attention as in Transformer-XL, computed within a longer forward: no function of distances to change",
    ),
    "IBertForMaskedLM": "its table is quantised",
    **dict.fromkeys(
        ("MistralLarge4ForConditionalGeneration", "MistralLarge4TextModel"),
        "queries are scaled by the logarithm of their position besides",
    ),
    "PegasusXForConditionalGeneration": "it computes sinusoids for any length and keeps no table",
    "ProphetNetForConditionalGeneration": "one of its streams reads the row of the next position, so that its tables "
    "end one token earlier; logits by relative buckets besides",
    "ReformerForMaskedLM": "a position has the rows of two small tables together (axial), none of its own",
}
"""Classes that fail, and what is peculiar to them."""
INTRODUCTION = """\
Written by `python -m recipes.coverage`; do not edit. Every architecture of `CONFIG_MAPPING` that is told positions by
a mechanism of the field is built as a tiny random model in float32 (`tests/shrink.py`) and asked two things. A
composite stands for itself, vision or audio tower included, where its whole runs on text alone; else for its text
part, whose class is then the one named. What encodes positions is seen in a forward (`tests/position_encodings.py`),
not asked of the package: what was seen and not found is a failure."""
ROTARY_PART = f"""\
- After `patch_model(model, "pi", factor=2, layers="all")`, what the model says to tokens at positions 2p is what the
  unpatched one says to them at p, within 1e-5 of the largest value. Positions are given as `position_ids`, or by a
  masked token behind each token (a spread text) where a model makes its own. Where logits depend on positions by more
  than rotation, cos and sin are compared ({TWICE}).
- After `unpatch_model(model)`, logits, config JSON, module classes, parameters, buffers and state-dict keys are as
  before, bit for bit."""
OTHER_PART = f"""\
Both invariants are asked as above, and besides:

- all tables that a text takes rows of by position are found, and no other ones;
- the model reads 2N tokens, where N is 32 for a model that states no length, and one more token is a `ValueError` that
  says how many it reads, where there is a table.

Where a linear bias leaves masked tokens out, logits are compared with a bias of twice the slope. Where a model mixes
neighbours or takes no mask, so that a spread text is another one, what its modules give that compute biases is compared
({", ".join(f"`{name}`" for name in sorted(BIASES))}), and the rows of its table where logits say nothing ({ROWS}).

Names with a comma are variants: an encoding that the default configuration does not have."""


@dataclass(frozen=True)
class Part:
    """The outcome for one kind of architectures."""

    title: str
    """What they are."""
    findings: tuple[Finding, ...]
    """One for each architecture that could be built, by name."""

    @property
    def failing(self) -> tuple[Finding, ...]:
        """Those for which an invariant does not hold."""
        return tuple(finding for finding in self.findings if not finding.holds)

    @property
    def share(self) -> float:
        """The part of the built architectures for which both invariants hold."""
        return 1 - len(self.failing) / len(self.findings)

    @property
    def headline(self) -> str:
        """The count in one line."""
        holding = len(self.findings) - len(self.failing)
        return f"{holding} of {len(self.findings)} {self.title} ({self.share:.1%})"

    def count(self, mechanism: str) -> int:
        """How many architectures have a mechanism and hold."""
        return sum(mechanism in finding.mechanisms for finding in self.findings if finding.holds)


@dataclass(frozen=True)
class Coverage:
    """The outcome of the whole sweep."""

    rotary: Part
    """Rotation."""
    others: Part
    """Learned tables, sinusoids, linear and relative biases."""
    not_built: tuple[tuple[str, str], ...]
    """Architectures that read text, have code for positions and could not be built, and why."""

    @property
    def parts(self) -> tuple[Part, Part]:
        """Both."""
        return self.rotary, self.others


def run() -> Coverage:
    """Examines every architecture that has code for positions."""
    findings, not_built = [], []
    for architecture in sweep.candidates():
        try:
            findings += examine(architecture)
        except sweep.CannotBuildError as error:
            if sweep.reads_text(architecture):
                not_built.append((architecture, str(error)))
    return Coverage(
        Part("rotary architectures", tuple(each for each in findings if each.is_rotary)),
        Part("architectures with another encoding", tuple(each for each in findings if not each.is_rotary)),
        tuple(not_built),
    )


def render(coverage: Coverage) -> str:
    """The document, the same for the same outcome."""
    counts = " and for ".join(f"**{part.headline}**" for part in coverage.parts)
    lines = [
        "# Coverage",
        "",
        f"With transformers {transformers.__version__} both invariants hold for {counts}.",
        "",
        INTRODUCTION,
        "",
        *section("Rotation", ROTARY_PART, coverage.rotary),
        *section("Tables and biases", OTHER_PART, coverage.others),
        "## Not in the sweep",
        "",
        "They have code for positions and take token ids, but no tiny model of them could be built that runs on text",
        "alone, or what they do with positions is none of the above.",
        "",
        *table(("architecture", "reason"), coverage.not_built),
        "",
    ]
    return "\n".join(lines)


def section(title: str, introduction: str, part: Part) -> list[str]:
    """Lines on one kind of architectures."""
    rows = [
        (
            each.architecture,
            f"`{each.model_class}`",
            ", ".join(each.mechanisms),
            each.compared or "-",
            "yes" if each.holds else "**no**",
        )
        for each in part.findings
    ]
    failures = [(each.architecture, f"`{each.model_class}`", reason(each), said(each)) for each in part.failing]
    return [
        f"## {title}",
        "",
        introduction,
        "",
        f"### {title}: failures",
        "",
        *(table(("architecture", "class", "reason", "what was seen"), failures) if failures else ["None."]),
        "",
        f"### {title}: every architecture",
        "",
        *table(("architecture", "class", "encoding", "compared", "holds"), rows),
        "",
    ]


def reason(finding: Finding) -> str:
    """What is peculiar to an architecture that fails."""
    return REASONS.get(finding.model_class, "-")


def said(finding: Finding) -> str:
    """Everything that went wrong."""
    return "; ".join(finding.problems)


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def main() -> None:
    """Runs the sweep and writes the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DOCUMENT, help="where to write (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    coverage = run()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(render(coverage), encoding="utf-8")
    for part in coverage.parts:
        print(part.headline)
        for finding in part.failing:
            print(f"  {finding.architecture}: {said(finding)} ({reason(finding)})")


if __name__ == "__main__":
    main()
