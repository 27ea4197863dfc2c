"""Registration and look-up of methods: one function per mechanism, and that alone decides what applies where."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, TypeVar

from hf_posext.contract import MECHANISMS, MethodInfo
from hf_posext.errors import quoted, unknown

ENTRY_POINT_GROUP = "hf_posext.methods"
Function = TypeVar("Function", bound=Callable[..., Any])
LIMIT = "limit"  # keyword of method functions that is not an option: the factor of the patch
REGISTRY: dict[str, Method] = {}


@dataclass(frozen=True)
class Method:
    """A published way to change how position is encoded.

    Attributes:
        name: canonical name.
        aliases: other names that users know it by.
        summary: one line.
        paper: source with the equation or section.
        functions: mechanism -> function (reading, factor, *, options) -> change.
        follows_length: given the options, whether the method itself says different things at different lengths, so that
            it is dynamic without being asked.
        is_bounded: whether the scale of dynamic patching stops at the factor of the patch.
        needs_tuning: whether a model that was trained with another encoding is of no use before it is tuned.
    """

    name: str
    aliases: tuple[str, ...]
    summary: str
    paper: str
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    follows_length: Callable[[dict[str, Any]], bool] = lambda options: False
    is_bounded: bool = True
    needs_tuning: bool = False

    def on(self, mechanism: str) -> Callable[[Function], Function]:
        """Registers the decorated function for a mechanism and returns it unchanged.

        Raises:
            TypeError: unknown mechanism, a second function for it, or a signature other than (reading, factor, *, ...).
        """

        def register(function: Function) -> Function:
            if mechanism not in MECHANISMS:
                raise TypeError(unknown("mechanism", mechanism, MECHANISMS))
            if mechanism in self.functions:
                raise TypeError(f"`{self.name}` already has a function for `{mechanism}`.")
            positional = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
            if len(positional) != 2 or positional[1].name != "factor":
                raise TypeError(f"{function.__name__} must take (reading, factor, *, options) to serve `{self.name}`.")
            self.functions[mechanism] = function
            return function

        return register

    def options(self, mechanism: str) -> dict[str, Any]:
        """Option name -> default for one mechanism; `inspect.Parameter.empty` marks a required one."""
        parameters = inspect.signature(self.functions[mechanism]).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != LIMIT}

    def change(self, mechanism: str, reading: Any, factor: Any, limit: float, options: dict[str, Any]) -> Any:
        """What the method makes of a reading at one scale.

        Args:
            mechanism: of the reading.
            reading: what the site reads as.
            factor: the scale in force, a number or [B]: that of the patch, or less where it follows the length.
            limit: the factor of the patch, for functions with a parameter of that name.
            options: the method's own, those for other mechanisms included.
        """
        function = self.functions[mechanism]
        options = {name: value for name, value in options.items() if name in self.options(mechanism)}
        if LIMIT in inspect.signature(function).parameters:
            options = {LIMIT: limit, **options}
        return function(reading, factor, **options)

    def check_options(self, given: dict[str, Any], mechanisms: Iterable[str] | None = None) -> None:
        """Refuses unknown options and missing required ones.

        Args:
            given: option name -> value.
            mechanisms: those of the model at hand; all if None.

        Raises:
            TypeError: naming the option, what the method takes, and the nearest known name.
        """
        every = self.all_options()
        used = [each for each in self.functions if mechanisms is None or each in mechanisms]
        allowed = {name: default for mechanism in used for name, default in self.options(mechanism).items()}
        for name in given:
            if name in every and name not in allowed:
                kinds = [mechanism for mechanism in self.functions if name in self.options(mechanism)]
                raise TypeError(
                    f"Option `{name}` of `{self.name}` has a meaning for {quoted(kinds)} positions only, and the model "
                    f"has {quoted(used)}. Leave it out."
                )
            if name not in allowed:
                raise TypeError(unknown(f"option of `{self.name}`:", name, allowed))
        missing = [
            name for name, default in allowed.items() if default is inspect.Parameter.empty and name not in given
        ]
        if missing:
            raise TypeError(f"`{self.name}` needs {quoted(missing)}, for example {missing[0]}=...")

    def all_options(self) -> dict[str, Any]:
        """Option name -> default over all mechanisms."""
        return {name: default for mechanism in self.functions for name, default in self.options(mechanism).items()}

    def info(self) -> MethodInfo:
        """The row of `list_methods`."""
        return MethodInfo(self.name, self.aliases, tuple(self.functions), self.summary, self.paper, self.all_options())


def method(
    name: str,
    *,
    aliases: tuple[str, ...] = (),
    summary: str,
    paper: str,
    follows_length: Callable[[dict[str, Any]], bool] = lambda options: False,
    is_bounded: bool = True,
    needs_tuning: bool = False,
) -> Method:
    """Declares a method under a new name; its functions are added with `Method.on`. For the arguments see `Method`.

    Raises:
        TypeError: a name or alias that is taken.
    """
    for word in (name, *aliases):
        taken = lookup_registered(word)
        if taken is not None:
            raise TypeError(f"`{word}` is already a name of the method `{taken.name}`.")
    declared = Method(name, aliases, summary, paper, {}, follows_length, is_bounded, needs_tuning)
    REGISTRY[name] = declared
    return declared


def lookup_registered(name: str) -> Method | None:
    """The registered method of that name or alias."""
    if name in REGISTRY:
        return REGISTRY[name]
    return next((candidate for candidate in REGISTRY.values() if name in candidate.aliases), None)


def get_method(name: object) -> Method:
    """The method of that name or alias; installed plugins are loaded only when the name is not a built-in one.

    Raises:
        TypeError: not a string.
        ValueError: unknown, with the valid names and the nearest one.
    """
    if not isinstance(name, str):
        raise TypeError(f"`method` must be the name of a method, got {name!r}. Allowed: {quoted(REGISTRY)}.")
    found = lookup_registered(name)
    if found is None:
        for plugin in entry_points(group=ENTRY_POINT_GROUP):
            plugin.load()
        found = lookup_registered(name)
    if found is None:
        words = [word for candidate in REGISTRY.values() for word in (candidate.name, *candidate.aliases)]
        raise ValueError(unknown("method", name, words))
    return found
