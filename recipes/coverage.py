# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_posext"]
# ///
"""Tries to patch every rotary architecture of the installed transformers and writes docs/coverage.md.

Every architecture is built as a tiny random model and asked for two invariants: `pi` with factor 2 is a division of
positions by two, and `unpatch_model` gives every bit back.

    python -m recipes.coverage                 # from the root of the repository: the models come from `tests`
    python -m recipes.coverage --out here.md

One to three minutes on one core, under 1 GB of memory. Prints the count and each architecture that fails.
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from tests import sweep
from tests.coverage_checks import USED_TWICE, Finding, examine

DOCUMENT = Path("docs/coverage.md")
TWICE = "; ".join(f"`{name}`: {reason}" for name, reason in sorted(USED_TWICE.items()))
INTRODUCTION = f"""\
Written by `python -m recipes.coverage`; do not edit. Every architecture of `CONFIG_MAPPING` whose text part rotates is
built as a tiny random model in float32 (`tests/shrink.py`), and asked:

- after `patch_model(model, "pi", factor=2, layers="all")`, what the model says to tokens at positions 2p is what the
  unpatched one says to them at p, within 1e-5 of the largest value. Positions are given as `position_ids`, or by a
  masked token behind each token (a spread text) where a model makes its own. Where logits depend on positions by more
  than rotation, cos and sin are compared ({TWICE}).
- after `unpatch_model(model)`, logits, config JSON, module classes, parameters, buffers and state-dict keys are as
  before, bit for bit.

A composite stands for itself, vision or audio tower included, where its whole runs on text alone; else for its text
part, whose class is then the one named."""


@dataclass(frozen=True)
class Coverage:
    """The outcome of the whole sweep."""

    findings: tuple[Finding, ...]
    """One for each rotary architecture that could be built, by name."""
    not_built: tuple[tuple[str, str], ...]
    """Architectures with rotary code that read text and could not be built, and why."""

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
        return f"{holding} of {len(self.findings)} rotary architectures ({self.share:.1%})"


def run() -> Coverage:
    """Examines every architecture that has rotary code."""
    findings, not_built = [], []
    for architecture in sweep.rotary_candidates():
        try:
            finding = examine(architecture)
        except sweep.CannotBuildError as error:
            if sweep.reads_text(architecture):
                not_built.append((architecture, str(error)))
            continue
        if finding is not None:
            findings.append(finding)
    return Coverage(tuple(findings), tuple(not_built))


def render(coverage: Coverage) -> str:
    """The document, the same for the same outcome."""
    rows = [
        (each.architecture, f"`{each.model_class}`", each.compared or "-", "yes" if each.holds else "**no**")
        for each in coverage.findings
    ]
    failures = [(each.architecture, f"`{each.model_class}`", "; ".join(each.problems)) for each in coverage.failing]
    lines = [
        "# Coverage",
        "",
        f"With transformers {transformers.__version__} both invariants hold for **{coverage.headline}**.",
        "",
        INTRODUCTION,
        "",
        "## Failures",
        "",
        *(table(("architecture", "class", "reason"), failures) if failures else ["None."]),
        "",
        "## Every architecture",
        "",
        *table(("architecture", "class", "compared", "holds"), rows),
        "",
        "## Not in the sweep",
        "",
        "Their code rotates and they take token ids, but no tiny model of them could be built that runs on text alone.",
        "",
        *table(("architecture", "reason"), coverage.not_built),
        "",
    ]
    return "\n".join(lines)


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
    print(coverage.headline)
    for finding in coverage.failing:
        print(f"  {finding.architecture}: {'; '.join(finding.problems)}")


if __name__ == "__main__":
    main()
