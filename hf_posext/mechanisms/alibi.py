"""Native ALiBi: attention that is handed a bias by distance, computed once for all layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_posext.contract import Host, Site
from hf_posext.mechanisms._held import Unheld, hold, holder_of, release
from hf_posext.mechanisms._scope import Scoped

MECHANISM = "alibi"
NAMES = ("alibi", "position_bias")  # parameters by which families hand it on
BUILDERS = ("build_alibi_tensor", "build_mpt_alibi_tensor")  # methods of models that compute it


def find(scoped: Scoped) -> list[Site]:
    """An attention module that takes the bias, in a model that builds one; not what only hands it on to a part.

    A module that can rotate as well may get the bias within its mask, where it cannot be told from it.
    """
    if not any(hasattr(scoped.owner, name) for name in BUILDERS):
        return []
    name = parameter_of(scoped.module)
    if name is None or any(parameter_of(child) for child in scoped.module.children()):
        return []
    if "position_embeddings" in inspect.signature(scoped.module.forward).parameters:
        return []
    return [Site(MECHANISM, scoped.name, scoped.module, scoped.config, "", name)]


def parameter_of(module: nn.Module) -> str | None:
    """Name of the parameter of its forward that takes a bias."""
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in NAMES if name in parameters), None)


class BiasHolder(Unheld):
    """What an attention module keeps whose bias is switched off."""

    def __init__(self, module: nn.Module, field: str) -> None:
        self.original_class = type(module)
        self.field = field

    def run(self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward with a bias of zeros."""
        bound = inspect.signature(forward).bind(module, *args, **kwargs)
        bias = bound.arguments.get(self.field)
        if torch.is_tensor(bias):
            bound.arguments[self.field] = torch.zeros_like(bias)
        return forward(*bound.args, **bound.kwargs)


def read(site: Site, trained_length: int) -> Host:
    """The trained length: the slopes are the model's own business."""
    return Host(trained_length)


def silence(model: nn.Module, site: Site, target_length: int, more: int) -> None:
    """Switches the bias off."""
    if holder_of(site.module) is None:
        hold(site.module, BiasHolder(site.module, site.field))


def restore(site: Site) -> None:
    """Switches the bias on again."""
    if holder_of(site.module) is not None:
        release(site.module)


def reset(model: nn.Module, site: Site, more: int) -> None:
    """Nothing: the bias is computed in each forward."""
