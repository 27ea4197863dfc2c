"""Reads what `compare` is asked to measure: methods with options, each an arm with a name of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_posext.errors import quoted
from hf_posext.evaluation.protocols import BARS
from hf_posext.methods import get_method

OURS = ("factor", "target_length", "original_max_position_embeddings", "compose", "tokenizer")
KINDS = 'a name such as "yarn", a dict such as {"method": "yarn", "beta_fast": 8, "dynamic": True}, or a pair of both'
LONGEST_VALUE = 24  # characters of an option's value that a name can hold; factor lists have hundreds


@dataclass(frozen=True)
class Contender:
    """One method as it is to be measured.

    Attributes:
        name: of its arm in the report.
        method: canonical name.
        arguments: further ones of `patch_model`: options of the method, `dynamic`, `layers`.
        per_length: whether it is patched for each context length anew, if its factor does not follow the length.
    """

    name: str
    method: str
    arguments: Mapping[str, Any]
    per_length: bool


def read_contenders(methods: Iterable[Any], *, per_length: bool) -> list[Contender]:
    """The arms that a list of methods asks for.

    Args:
        methods: each a name; a dict with `method`, and if need be `name` (of the arm), `per_length`, `dynamic`,
            `layers` and options of the method; or a pair of a name and such a dict without `method`.
        per_length: for those that do not say it themselves.

    Raises:
        TypeError: something else.
        ValueError: no method, an unknown one, an argument that `compare` sets itself, or a name that is taken.
    """
    if isinstance(methods, str | Mapping) or not isinstance(methods, Iterable):
        raise TypeError(f"`methods` must be a list, each {KINDS}; got {methods!r}. Write methods=[{methods!r}].")
    found = [_contender(method, per_length) for method in methods]
    if not found:
        raise ValueError("`methods` is empty. Give at least one, see `list_methods(model)`.")
    names = [contender.name for contender in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Two methods have the arm {quoted(twice)}. Leave one out or give it another `name`.")
    return found


def _contender(method: Any, per_length: bool) -> Contender:
    """One entry of the list."""
    given = _as_dict(method)
    taken = [name for name in OURS if name in given]
    if taken:
        raise ValueError(f"{quoted(taken)} of {method!r} cannot be given: `compare` sets it. Use `context_lengths`.")
    chosen = get_method(given.pop("method")).name
    name, own = given.pop("name", None), given.pop("per_length", per_length)
    name = _name(chosen, given) if name is None else str(name)
    if name.partition(" (")[0] in BARS:
        raise ValueError(f"The arm of {method!r} must not be called as a bar ({quoted(BARS)}). Give another `name`.")
    return Contender(name, chosen, given, bool(own))


def _as_dict(method: Any) -> dict[str, Any]:
    """An entry of any kind as a dict with `method`."""
    if isinstance(method, str):
        return {"method": method}
    if isinstance(method, tuple | list) and len(method) == 2 and isinstance(method[1], Mapping):
        return {**method[1], "method": method[0]}
    if isinstance(method, Mapping) and "method" in method:
        return dict(method)
    raise TypeError(f"Each of `methods` must be {KINDS}; got {method!r}.")


def _name(method: str, arguments: Mapping[str, Any]) -> str:
    """Method and options, so that two arms of one method are told apart."""
    words = [f"{key}={_shown(value)}" for key, value in arguments.items() if key != "dynamic"]
    follows = ["(dynamic)"] if arguments.get("dynamic") else []
    return " ".join([f"patched {method}" if method in BARS else method, *words, *follows])


def _shown(value: Any) -> str:
    """The value of an option, cut where it is long."""
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
