"""diagnose: is position in effect, and as the config, the record and the tokenizer say."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import nn

from hf_posext.diagnosing import ablating, frequencies, order, rotation, serving, statements, tables
from hf_posext.diagnosing.finding import NOT_APPLICABLE, OK, WRONG, Finding, NotApplicableError
from hf_posext.diagnosing.subject import Subject, make_subject, undisturbed
from hf_posext.reports import Report, plain

logger = logging.getLogger(__name__)
Check = Callable[[Subject], Finding]
CHECKS: tuple[Check, ...] = (
    statements.patch,
    statements.config,
    statements.tokenizer,
    tables.rows,
    tables.magnitudes,
    tables.collisions,
    frequencies.angles,
    frequencies.turns,
    frequencies.channels,
    rotation.rotation,
    order.order,
    ablating.ablation,
    order.position_ids,
    serving.cache,
    serving.padding,
)
"""Every check, in the order of the report; the name of the function is that of its finding."""
STYLES = {OK: "green", WRONG: "bold red", "note": "yellow", NOT_APPLICABLE: "dim"}


@dataclass(frozen=True, repr=False)
class DiagnosisReport(Report):
    """What was found about the positions of a model.

    Attributes:
        model: class name.
        trained_length: N in tokens, None where nothing says it.
        usable_length: tokens that it is to read now: N, or the target length of the patch in force.
        record: the patch as plain data, None without one.
        findings: one for each check.
    """

    model: str
    trained_length: int | None
    usable_length: int | None
    record: dict[str, Any] | None
    findings: list[Finding]

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong; notes, and checks that do not apply, are no faults."""
        return not self.wrong

    @property
    def wrong(self) -> list[Finding]:
        """The findings that are faults."""
        return [finding for finding in self.findings if finding.status == WRONG]

    def __getitem__(self, name: str) -> Finding:
        """The finding of a check.

        Raises:
            KeyError: no check has this name.
        """
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return plain({**asdict(self), "is_healthy": self.is_healthy})

    def table(self) -> Group:
        """Every check with what it means and what to do; the numbers of those that are not ok below."""
        count = len(self.wrong)
        verdict = f"{count} wrong" if count else "nothing wrong"
        table = Table(title=f"{self.model}, {self.usable_length} tokens: {verdict}", title_justify="left")
        for heading in ("check", "status", "what was seen", "what to do"):
            table.add_column(heading, overflow="fold")
        for each in self.findings:
            table.add_row(each.name, Text(each.status, STYLES[each.status]), Text(each.meaning), Text(each.action))
        numbers = [f"{each.name}: {json.dumps(plain(each.measured))}" for each in self.findings if shows_numbers(each)]
        return Group(table, *(Text(line) for line in numbers))


def shows_numbers(finding: Finding) -> bool:
    """Whether the numbers behind a finding are printed."""
    return finding.status not in (OK, NOT_APPLICABLE)


def diagnose(model: nn.Module, tokenizer: Any = None) -> DiagnosisReport:
    """Whether position is in effect in a model, and as its config, its patch and its tokenizer say.

    Small texts are read with it, so it must have weights. Nothing of it is changed: weights, buffers, flags of
    training and the random state are as before in the end.

    Args:
        model: a transformers model, patched or not, also inside PEFT or another wrapper.
        tokenizer: its own, for the loss on a sentence and its length limit.

    Returns:
        One finding for each check, with what it means and what to do; `is_healthy` says whether nothing is wrong.

    Raises:
        TypeError: not a transformers model.
    """
    subject = make_subject(model, tokenizer)
    with undisturbed(model):
        findings = [outcome(check, subject) for check in CHECKS]
    return DiagnosisReport(
        model=type(subject.root).__name__,
        trained_length=subject.trained_length,
        usable_length=subject.usable_length,
        record=subject.record.to_dict() if subject.record else None,
        findings=findings,
    )


def outcome(check: Check, subject: Subject) -> Finding:
    """What a check finds; where it cannot run, the finding says why."""
    name = check.__name__
    try:
        return check(subject)
    except NotApplicableError as reason:
        return Finding(name, NOT_APPLICABLE, meaning=str(reason))
    except Exception as error:  # a check must not keep the others from running on a model that nobody foresaw
        logger.debug("The check %s failed", name, exc_info=error)
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        meaning = f"The check could not run on this model ({why})."
        return Finding(name, NOT_APPLICABLE, meaning=meaning, action="Report the model.")
