"""Whether a model can have what the rules name: each choice is put on and taken off again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_posext.attention.reading import adapters
from hf_posext.errors import cause_of
from hf_posext.mechanisms import root_model
from hf_posext.patching import patched
from hf_posext.records import record_of
from hf_posext.suggesting.facts import Wanted
from hf_posext.suggesting.rules import AS_GIVEN, Candidate

NO_WORDS = "plain transformers cannot load it, since no config has words for it"
PLAIN, OWN_CODE, IN_ATTENTION = range(3)


@dataclass(frozen=True)
class Tried:
    """A candidate, and what became of it.

    Attributes:
        candidate: what was tried.
        problem: why the model cannot have it, empty where it can.
        effort: what it takes to serve: `PLAIN` transformers, this package, or this package and slower attention.
    """

    candidate: Candidate
    problem: str = ""
    effort: int = PLAIN

    @property
    def is_patch(self) -> bool:
        """Whether it is a patch that the model can have."""
        return not self.problem and self.candidate.method is not AS_GIVEN

    @property
    def name(self) -> str:
        """Method and options in a few words; that of the bar for the model as given."""
        if self.candidate.method is AS_GIVEN:
            return "none"
        options = {key: value for key, value in self.candidate.options.items() if key != "dynamic"}
        words = [self.candidate.method, *(f"{key}={value}" for key, value in options.items())]
        return " ".join([*words, *(["(dynamic)"] if "dynamic" in self.candidate.options else [])])


def arguments_of(candidate: Candidate, wanted: Wanted) -> dict[str, Any]:
    """What `patch_model` is called with."""
    given = {} if wanted.given_length is None else {"original_max_position_embeddings": wanted.given_length}
    return {"method": candidate.method, "target_length": wanted.target_length, **given, **candidate.options}


def attempt(model: nn.Module, candidate: Candidate, wanted: Wanted) -> Tried:
    """Patches a model for a moment; it is left as it was to the last bit."""
    if candidate.method is AS_GIVEN:
        return Tried(candidate)
    try:
        with patched(model, **arguments_of(candidate, wanted)):
            record, is_in_attention = record_of(model), bool(adapters(root_model(model)))
    except (RuntimeError, ValueError) as error:  # among them `PatchError`, and a probe that runs out of memory
        return Tried(candidate, cause_of(error))
    if record is None or record.native is not None:
        return Tried(candidate)
    if wanted.portable:
        return Tried(candidate, NO_WORDS)
    return Tried(candidate, effort=OWN_CODE if record.dynamic or not is_in_attention else IN_ATTENTION)
