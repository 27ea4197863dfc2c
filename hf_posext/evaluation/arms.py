"""What an evaluation says of an arm beside its numbers: name, patch, what it was made for, what was left out."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_posext.errors import quoted
from hf_posext.evaluation.forwards import LengthError, causal_lm
from hf_posext.evaluation.protocols import BARS
from hf_posext.mechanisms import count_positions, find_root, find_sites, has_rows
from hf_posext.records import PatchRecord, record_of
from hf_posext.spans import length_of

logger = logging.getLogger(__name__)

NAMED = 20  # indices of skipped documents that a note spells out; the report has all of them


@dataclass(frozen=True)
class Arm:
    """A model as it is measured.

    Attributes:
        name: in the report.
        record: of its patch, None for an unpatched model.
        trained_length: N in tokens, of the model without its patch; None where it is not known.
    """

    name: str
    record: PatchRecord | None
    trained_length: int | None

    @property
    def is_patched(self) -> bool:
        """Whether it has a patch."""
        return self.record is not None

    @property
    def records(self) -> dict[str, dict[str, Any] | None]:
        """What a report keeps of the patch."""
        return {self.name: None if self.record is None else self.record.to_dict()}

    def notes_beyond(self, context_lengths: Iterable[int]) -> list[str]:
        """Says, and logs once, that lengths are beyond what the arm was made for."""
        usable = self.trained_length if self.record is None else self.record.target_length
        if usable is None or self.trained_length is None:
            return []
        beyond = [length for length in context_lengths if length > usable]
        if not beyond:
            return []
        note = (
            f"`{self.name}` is made for {usable} tokens; {', '.join(map(str, beyond))} "
            f"{'is' if len(beyond) == 1 else 'are'} beyond its reach. "
            "Patch with a factor that covers the longest context."
        )
        logger.warning(note)
        return [note]


def identify(model: nn.Module, name: str | None) -> Arm:
    """A model with the name that was given, or else that of its method.

    Raises:
        ValueError: the name of a bar.
    """
    record = record_of(model)
    if name is not None and name in BARS and not (name == "none" and record is None):
        raise ValueError(f"`arm` must not be the name of a bar ({quoted(BARS)}), got {name!r}. Give another name.")
    if record is not None:
        own = f"patched {record.method}" if record.method in BARS else record.method
        return Arm(name or own, record, record.steps()[0].trained_length)
    return Arm(name or "none", None, length_of(model) if find_root(model) is not None else None)


def vocabulary(model: nn.Module) -> int | None:
    """Number of token ids that the model can read, None where it does not say."""
    network: Any = causal_lm(model)
    embedding = network.get_input_embeddings() if hasattr(network, "get_input_embeddings") else None
    return getattr(embedding, "num_embeddings", None)


def table_length(model: nn.Module) -> int | None:
    """Tokens that the shortest embedding of positions has rows for, None without one."""
    tables = [site for site in find_sites(model) if has_rows(site) and isinstance(site.module, nn.Embedding)]
    return min(map(count_positions, tables), default=None)


def check_reach(model: nn.Module, context_lengths: Iterable[int]) -> None:
    """Refuses lengths that an encoder has no positions for, before it fails in words of its own.

    Raises:
        LengthError: names the length and the limit.
    """
    rows, record = table_length(model), record_of(model)
    limit = max(rows or 0, 0 if record is None else record.target_length)
    longest = max(context_lengths, default=0)
    if rows is not None and longest > limit:
        raise LengthError(
            f"{type(causal_lm(model)).__name__} cannot read {longest} tokens: its table of positions ends at {limit}. "
            "Patch the model, or leave this context length out."
        )


def left_out(skipped: Sequence[int], documents: int, why: str) -> list[str]:
    """A note that counts and names the documents that were left out, if there are any."""
    if not skipped:
        return []
    names = ", ".join(map(str, skipped[:NAMED])) + (", ..." if len(skipped) > NAMED else "")
    return [f"{len(skipped)} of {documents} documents are {why} and were left out: {names}."]


def no_interval(documents: int) -> list[str]:
    """A note where one document is all there is."""
    return ["One document only: there is no interval over documents."] if documents < 2 else []
