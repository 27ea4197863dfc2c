"""Exceptions of the package and the builders of their messages: what came, what is allowed, what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PatchError(RuntimeError):
    """A model cannot be patched safely; it was left exactly as it was."""


class TrainingError(RuntimeError):
    """A run that cannot go on; the last good checkpoint was kept."""


class NoSiteError(PatchError, ValueError):
    """The model has no place where the method has a meaning."""


def quoted(names: Iterable[str]) -> str:
    """The names in backticks, joined by commas; "none" for an empty list."""
    return ", ".join(f"`{name}`" for name in names) or "none"


def unknown(what: str, name: object, allowed: Iterable[str]) -> str:
    """Message for a name that is not among the allowed ones, with the nearest one suggested."""
    allowed = list(allowed)
    near = difflib.get_close_matches(str(name), allowed, n=1)
    hint = f" Did you mean `{near[0]}`?" if near else ""
    return f"Unknown {what} {name!r}.{hint} Allowed: {quoted(allowed)}."


def cause_of(error: Exception) -> str:
    """What is wrong, without the next step and the full stop, as a part of another sentence."""
    return " ".join(str(error).partition(". ")[0].split()).rstrip(".")
