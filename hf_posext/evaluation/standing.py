"""A model read twice, as it was given and with a patch in force, and left as it was found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

from hf_posext.arguments import check_length
from hf_posext.patching import patched, suspended
from hf_posext.records import PatchRecord, record_of
from hf_posext.spans import length_of

Value = TypeVar("Value")
AS_GIVEN = "as given"


@dataclass(frozen=True)
class Reading(Generic[Value]):
    """What was read of a model.

    Attributes:
        name: of the patch, method and factor.
        trained_length: N in tokens, None where it is not known.
        reach: tokens up to which the model was looked at: T of the patch if nothing else was asked for.
        before: what was read of the model as it was given.
        after: the same with the patch in force; None without a patch.
    """

    name: str
    trained_length: int | None
    reach: int
    before: Value
    after: Value | None


def read_twice(
    model: nn.Module,
    read: Callable[[nn.Module, int], Value],
    method: str | None = None,
    factor: float | None = None,
    *,
    reach: int | None = None,
    **arguments: Any,
) -> Reading[Value]:
    """Reads a model without its patch and with it: the one that is named, else the one that is in force.

    Args:
        model: a transformers model. It is patched for a moment, or unpatched, and left as it was.
        read: takes the model as it is then, and the reach.
        method: a method to look at, for a model that is not patched.
        factor: s, as for `patch_model`.
        reach: tokens; if None T of the patch, and N without one.
        arguments: others of `patch_model`.

    Raises:
        ValueError: a method for a model that is patched, arguments without one, or a model whose length is not known.
        TypeError, NoSiteError, PatchError: as by `patch_model`.
    """
    check_arguments(model, method, factor, arguments)
    with patched(model, method, factor, **arguments) if method is not None else nullcontext():
        record = record_of(model)
        reach = reach_of(model, record, reach)
        present = read(model, reach)
    if record is None:
        return Reading(AS_GIVEN, length_of(model), reach, present, None)
    with nullcontext() if method is not None else suspended(model):
        before = read(model, reach)
    return Reading(name_of(record), record.trained_length, reach, before, present)


def check_arguments(model: nn.Module, method: str | None, factor: float | None, arguments: dict[str, Any]) -> None:
    """Refuses what would not be read, or would take a patch off that is there.

    Raises:
        ValueError: a method for a model that is patched, or arguments without a method.
    """
    record = record_of(model)
    if method is not None and record is not None:
        raise ValueError(
            f"The model is already patched: {record.describe()}. Leave `method` out to look at this patch, or call "
            "`unpatch_model` first."
        )
    given = [*(["factor"] if factor is not None else []), *arguments]
    if method is None and given:
        raise ValueError(f"`{given[0]}` belongs to a method, and none was given. Give `method` as well.")


def reach_of(model: nn.Module, record: PatchRecord | None, reach: object) -> int:
    """Tokens up to which to look.

    Raises:
        TypeError, ValueError: no whole number of tokens, or none given for a model that does not say N.
    """
    if reach is not None:
        return check_length("reach", reach)
    known = record.target_length if record is not None else length_of(model)
    if known is None:
        raise ValueError(f"{type(model).__name__} does not say what length it was trained at. Give `reach`, in tokens.")
    return known


def name_of(record: PatchRecord) -> str:
    """Method and factor."""
    return f"{record.method}{' (dynamic)' if record.dynamic else ''} x{record.factor:.4g}"
