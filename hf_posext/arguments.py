"""Resolves and validates the numbers of a patch: factor, target length, trained length, layers. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real

from hf_posext.errors import unknown

LAYERS = ("full", "all")
SCALES = ("live", "frozen")
LONGEST = 2**40  # tokens


def as_float(value: Real) -> float:
    """The number as float, infinite where it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_factor(factor: object) -> float:
    """A finite number >= 1 as float.

    Raises:
        TypeError: not a number (bool and str included).
        ValueError: nan, infinite or below 1.
    """
    if isinstance(factor, bool) or not isinstance(factor, Real):
        raise TypeError(f"`factor` must be a finite number >= 1, got {factor!r} of type {type(factor).__name__}.")
    number = as_float(factor)
    if not math.isfinite(number) or number < 1:
        hint = " To shorten a context lower `max_position_embeddings` instead." if number < 1 else ""
        raise ValueError(f"`factor` must be a finite number >= 1, got {factor!r}.{hint}")
    return number


def check_length(name: str, value: object) -> int:
    """A positive whole number of tokens as int.

    Raises:
        TypeError: not a whole number (bool included).
        ValueError: below 1, or more than any model could read.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be a whole number of tokens, got {value!r} of type {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1 token, got {value!r}.")
    if int(value) > LONGEST:
        raise ValueError(f"`{name}` must be at most {LONGEST} tokens (2^40), got {value!r}.")
    return int(value)


def resolve_factor(factor: object, target_length: object, trained_length: int) -> tuple[float, int]:
    """Factor s = T / N and target length T in tokens, from exactly one of the two.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: both or neither given, factor < 1, or a target below the trained length.
    """
    if (factor is None) == (target_length is None):
        given = "neither" if factor is None else f"`factor`={factor!r} and `target_length`={target_length!r}"
        raise ValueError(
            f"Give exactly one of `factor` and `target_length`, got {given}. "
            f"For twice the trained {trained_length} tokens: factor=2 or target_length={2 * trained_length}."
        )
    if target_length is None:
        factor = check_factor(factor)
        return factor, math.floor(trained_length * factor + 1e-9)
    target = check_length("target_length", target_length)
    if target < trained_length:
        raise ValueError(
            f"`target_length` must be at least the trained length {trained_length}, got {target}. "
            "To shorten a context lower `max_position_embeddings` instead."
        )
    return target / trained_length, target


def check_choice(name: str, value: object, allowed: Iterable[str]) -> str:
    """One of a few words.

    Raises:
        ValueError: anything else.
    """
    allowed = list(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(unknown(f"value of `{name}`:", value, allowed))
    return value


def check_positive(name: str, value: object) -> float:
    """A finite number > 0 as float.

    Raises:
        TypeError: not a number.
        ValueError: nan, infinite, zero or negative.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a finite number > 0, got {value!r} of type {type(value).__name__}.")
    number = as_float(value)
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"`{name}` must be a finite number > 0, got {value!r}.")
    return number


def check_flag(name: str, value: object) -> bool:
    """True or False.

    Raises:
        TypeError: anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, got {value!r} of type {type(value).__name__}.")
    return value


def check_within(name: str, value: int, trained_length: int, factor: float) -> int:
    """A distance in tokens that a text of T = s N tokens has, unless s is 1.

    Raises:
        ValueError: it has none as long, so that nothing would change.
    """
    if factor > 1 and value >= trained_length * factor:
        raise ValueError(
            f"`{name}` must be less than the target length {math.floor(trained_length * factor)}, got {value}: no two "
            "tokens would be that far apart. Lower it, or give a larger factor."
        )
    return value
