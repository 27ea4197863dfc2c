"""Relative biases: what a module makes of the distance between two tokens, which one function of it is about.

An object in the instance takes the place of that function and asks the class's own about d / s, toward zero, in place
of d. Keys carry nothing of it, so decoding with a cache is one pass.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext.contract import DistanceChange, Host, Site
from hf_posext.mechanisms._held import Unheld, hold, holder_of, original_class, release
from hf_posext.mechanisms._scope import Scoped

MECHANISM = "relative_bias"
LARGEST_DENOMINATOR = 10**6
"""Factors are fractions of at most this denominator, which is exact for decimals and for T / N."""


class StandIn:
    """An object that takes the place of a function of one module. It holds no module, so that copies stay apart."""

    def __init__(self, module: nn.Module, place: Place, divisor: Fraction) -> None:
        function = inspect.getattr_static(original_class(module), place.function)
        self.function: Callable[..., Any] = getattr(function, "__func__", function)
        self.owner = () if isinstance(function, staticmethod) else (SimpleNamespace(**settings(module)),)
        self.divisor = divisor

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """What the class's own function gives."""
        return self.function(*self.owner, *args, **kwargs)


class Asked(StandIn):
    """For a function that is given distances: it is given shorter ones."""

    def __call__(self, distances: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the function makes of d / s."""
        return self.own(quotient(distances, self.divisor), *args, **kwargs)


class AskedOfBlocks(Asked):
    """For one that is given distances to blocks of text, [B, L, blocks], and those within a window, [W, 3W], as well.

    The window keeps its own: they are no longer in a longer text.
    """

    def __call__(self, distances: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the function makes of d / s for blocks, of d within the window."""
        if distances.dim() == 2:
            return self.own(distances, *args, **kwargs)
        return super().__call__(distances, *args, **kwargs)


class AskedUpTo(Asked):
    """For one that is given distances up to a limit, where the module has cut them off, and those of boxes as well.

    The module's limit is raised to one that is no other setting of it, by which the distances of tokens are known.
    """

    def __init__(self, module: nn.Module, place: Place, divisor: Fraction) -> None:
        super().__init__(module, place, divisor)
        self.limit: int = getattr(module, place.limit)
        self.raised = math.ceil(self.limit * divisor)
        while self.raised in settings(module).values():
            self.raised += 1

    def __call__(self, distances: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the function makes of d / s for tokens, of d for boxes."""
        if kwargs["max_distance"] != self.raised:
            return self.own(distances, *args, **kwargs)
        return super().__call__(distances, *args, **{**kwargs, "max_distance": self.limit})


class Picked(StandIn):
    """For a function that makes distances itself, and gives [..., L, S] that at (i, j) depends on i - j alone.

    No distance gets longer, so what it would give for a shorter one stands elsewhere in what it gives.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """At (i, j) what the function gives for (i - j) / s."""
        given = self.own(*args, **kwargs)
        rows, columns = (torch.arange(size, device=given.device) for size in given.shape[-2:])
        distances = quotient(rows[:, None] - columns, self.divisor)
        return given[..., distances.clamp(min=0), (-distances).clamp(min=0)]


class DistanceHolder(Unheld):
    """What a module keeps whose forward is given distances, or the positions that it makes them from."""

    def __init__(self, module: nn.Module, divisor: Fraction) -> None:
        self.original_class = type(module)
        self.names = tuple(inspect.signature(module.forward).parameters)
        self.divisor = divisor

    def run(self, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """[B, H, L, S], the bias at d / s.

        Of positions, each query is asked for its biases at all distances up to the last that has one.
        """
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if "relative_distance" in given:
            return forward(module, **{**given, "relative_distance": quotient(given["relative_distance"], self.divisor)})
        queries, keys = given["query_positions"], given["key_positions"]
        distances = quotient(queries[:, None] - keys, self.divisor)
        reach = torch.arange(module.rel_extent + 1, device=keys.device)
        profile = forward(module, **{**given, "query_positions": torch.zeros_like(queries), "key_positions": -reach})
        return profile.gather(-1, distances.clamp(0, module.rel_extent).expand(*profile.shape[:2], -1, -1))


@dataclass(frozen=True)
class Place:
    """A function by which modules make something of distances between tokens.

    Attributes:
        function: its name.
        distances: name of its parameter that shows what it is about.
        table: attribute of the module that the distances index in the end, empty where they go into a formula.
        stand_in: what takes its place; None for a forward, which needs its module.
        having: attribute that such a module has besides.
        limit: attribute that says where the module cuts distances off before.
    """

    function: str
    distances: str
    table: str = ""
    stand_in: type[StandIn] | None = Asked
    having: str = ""
    limit: str = ""

    def is_in(self, module: nn.Module) -> bool:
        """Whether a module has such a function, and what it takes besides."""
        kind: Any = original_class(module)
        if not speaks_of(kind, self.function, self.distances):
            return False
        return all(getattr(module, name, None) is not None for name in (self.table, self.having) if name)


@cache
def speaks_of(module_class: type, name: str, parameter: str) -> bool:
    """Whether a class has a function with a parameter of some name."""
    function = getattr(module_class, name, None)
    return callable(function) and parameter in inspect.signature(function).parameters


DISTANCE, BIAS = "relative_position", "relative_attention_bias"
# The first that fits counts.
PLACES = (
    Place("_relative_position_bucket", DISTANCE, BIAS, AskedOfBlocks, having="global_relative_attention_bias"),
    Place("_relative_position_bucket", DISTANCE, BIAS),  # T5 and its kin
    Place("relative_position_bucket", DISTANCE, BIAS),  # MPNet
    Place("_position_bucket", DISTANCE, BIAS),  # CPM-Ant
    Place("relative_position_bucket", DISTANCE, "rel_pos_bias", AskedUpTo, limit="max_rel_pos"),  # LayoutLMv3
    Place("positional_embedding", "pos_seq"),  # XLNet
    Place("get_rel_pos", "relative_pos", "rel_embeddings", Picked),  # DeBERTa
    Place("get_relative_position", "positions", BIAS, Picked),  # encoder of UDOP
)
FORWARDS = (  # Inkling
    Place("forward", "relative_distance", "proj", None, having="rel_extent"),
    Place("forward", "query_positions", "proj", None, having="rel_extent"),
)


def find(scoped: Scoped) -> list[Site]:
    """A module with a function of distances between tokens, or a part of it whose forward is given them.

    In a model of sounds or pictures the same functions are about frames or patches, so these are left alone.
    """
    if scoped.owner.main_input_name != "input_ids":
        return []
    module = scoped.module
    found = [(scoped.name, module, place) for place in PLACES if place.is_in(module) and counts_tokens(module)][:1]
    for name, part in module.named_children():
        found += [(f"{scoped.name}.{name}", part, place) for place in FORWARDS if place.is_in(part)]
    label = label_of(module)
    return [Site(MECHANISM, name, part, scoped.config, label, place.function) for name, part, place in found]


def counts_tokens(module: nn.Module) -> bool:
    """Whether distances are whole tokens: those of boxes are scaled, and some models cut them off before."""
    return getattr(module, "scaling_factor", 1) == 1 and getattr(module, "clamp_len", 0) <= 0


def label_of(module: nn.Module) -> str:
    """The layer type of a module that sees a window, and of one whose class has such layers; empty for others."""
    if hasattr(module, "local_radius") and not hasattr(module, "global_block_size"):
        return "local_attention"
    if hasattr(module, "is_sliding"):
        return "sliding_attention" if module.is_sliding else "full_attention"
    return ""


def settings(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module: numbers, switches and words."""
    return {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}


def quotient(distances: Tensor, divisor: Fraction) -> Tensor:
    """Distances / s in their own dtype: whole numbers toward zero, by whole numbers, so that 6 / 1.2 is 5."""
    over, under = divisor.numerator, divisor.denominator
    if distances.is_floating_point():
        return distances * under / over
    return torch.div(distances.long() * under, over, rounding_mode="trunc").to(distances.dtype)


def read(site: Site, trained_length: int) -> Host:
    """The trained length: the table has a row for any distance."""
    return Host(trained_length)


def write(site: Site, change: DistanceChange) -> None:
    """Divides distances from now on; what already is divided is divided once more.

    Raises:
        ValueError: another divisor for each row or token, which one table for all of them cannot have.
    """
    if torch.is_tensor(change.divisor) and change.divisor.numel() != 1:
        raise ValueError(
            f"{site} makes one bias for all rows of a batch, so `divisor` must be one number, got a tensor of shape "
            f"{tuple(change.divisor.shape)}. Give a factor that does not follow the length."
        )
    divisor = Fraction(float(change.divisor)).limit_denominator(LARGEST_DENOMINATOR)
    before = present(site)
    if before is not None:
        divisor *= before.divisor
        restore(site)
    place = place_of(site)
    if place.stand_in is None:
        hold(site.module, DistanceHolder(site.module, divisor))
        return
    stand_in = place.stand_in(site.module, place, divisor)
    site.module.__dict__[place.function] = stand_in
    if isinstance(stand_in, AskedUpTo):
        site.module.__dict__[place.limit] = stand_in.raised


def place_of(site: Site) -> Place:
    """What a site was found by."""
    return next(place for place in (*PLACES, *FORWARDS) if place.function == site.field and place.is_in(site.module))


def present(site: Site) -> StandIn | DistanceHolder | None:
    """What divides the distances of a site now; None where nothing does."""
    candidates = (holder_of(site.module), site.module.__dict__.get(site.field))
    return next((each for each in candidates if isinstance(each, StandIn | DistanceHolder)), None)


def restore(site: Site) -> None:
    """Gives the module back its own function, and its limit."""
    changed = present(site)
    if isinstance(changed, DistanceHolder):
        release(site.module)
    elif changed is not None:
        del site.module.__dict__[site.field]
    if isinstance(changed, AskedUpTo):
        site.module.__dict__[place_of(site).limit] = changed.limit


def reset(model: nn.Module, site: Site) -> None:
    """Nothing: the bias is computed in each forward."""
