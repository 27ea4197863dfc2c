"""Which modules of a model belong to its text part: vision and audio towers are never touched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posext.compat import text_configs


@dataclass(frozen=True)
class Scoped:
    """A module with the sub-model that owns it."""

    name: str
    module: nn.Module
    owner: PreTrainedModel
    config: PreTrainedConfig
    is_text: bool


def scoped_modules(model: nn.Module) -> Iterator[Scoped]:
    """Every module once, each with the nearest enclosing transformers model and whether that one is a text part.

    A sub-model is a text part when the class of its config is the class of one of the model's text configs.
    """
    root = find_root(model)
    if root is None:
        return
    text_types = {type(config) for config in text_configs(root.config)} | {type(root.config)}
    pending: list[tuple[str, nn.Module, PreTrainedModel]] = [("", root, root)]
    seen: set[int] = set()
    while pending:
        name, module, owner = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        owner = module if isinstance(module, PreTrainedModel) else owner
        yield Scoped(name, module, owner, owner.config, type(owner.config) in text_types)
        children = [(f"{name}.{key}" if name else key, child, owner) for key, child in module.named_children()]
        pending.extend(reversed(children))


def find_root(model: nn.Module) -> PreTrainedModel | None:
    """The outermost transformers model: the object itself, or what an adapter or wrapper holds; None without."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((module for module in modules if isinstance(module, PreTrainedModel)), None)


def root_model(model: nn.Module) -> PreTrainedModel:
    """The outermost transformers model inside an object.

    Raises:
        TypeError: there is none.
    """
    root = find_root(model)
    if root is None:
        raise TypeError(f"`model` must be (or contain) a transformers model, got {type(model).__name__}.")
    return root
