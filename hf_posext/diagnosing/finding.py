"""What one check found: a status, the numbers behind it, what they mean and what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OK, WRONG, NOTE, NOT_APPLICABLE = "ok", "wrong", "note", "not applicable"
NOTHING = "Nothing to do."


class NotApplicableError(Exception):
    """A check that has no meaning for a model, or cannot run on it; the message says why."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: of the check.
        status: "ok", "wrong", "note" (worth knowing, nothing is broken) or "not applicable".
        measured: numbers and names behind it, plain data.
        meaning: a sentence on what was seen.
        action: a sentence on what to do.
    """

    name: str
    status: str
    measured: dict[str, Any] = field(default_factory=dict)
    meaning: str = ""
    action: str = NOTHING
