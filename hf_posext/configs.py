"""A model's own copy of its config: fields set in step everywhere the model holds it, and given back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posext.compat import text_configs
from hf_posext.lengths import image_fields, length_fields, side_fields
from hf_posext.mechanisms import root_model

ABSENT = "<absent>"


@dataclass(frozen=True)
class OwnConfigs:
    """The config objects that a model held before it got its own copies."""

    held: list[tuple[nn.Module, str, PreTrainedConfig]]

    def give_back(self) -> None:
        """Binds the former objects again."""
        for module, name, config in self.held:
            module.__dict__[name] = config


def own_configs(model: nn.Module) -> OwnConfigs:
    """Gives the model copies of all configs that its modules hold; what was one object stays one object.

    transformers shares one config among all models built from it: without this a change to one would reach the others.
    """
    memo: dict[int, Any] = {}
    held = []
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, PreTrainedConfig):
                held.append((module, name, value))
                module.__dict__[name] = copy.deepcopy(value, memo)
    return OwnConfigs(held)


def config_tree(config: PreTrainedConfig, path: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """A config and its sub-configs with their dotted paths; the config itself has the empty path."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from config_tree(value, f"{path}.{name}" if path else name)


def config_parts(model: nn.Module) -> list[PreTrainedConfig]:
    """Every distinct config object of the model's text parts, in the config tree and in modules that hold a copy."""
    root = root_model(model)
    wanted = {type(config) for config in text_configs(root.config)}
    held = [
        value for module in model.modules() for value in vars(module).values() if isinstance(value, PreTrainedConfig)
    ]
    every = [*(config for _, config in config_tree(root.config)), *held]
    return list({id(config): config for config in every if type(config) in wanted}.values())


def fields_before(root: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Path of each text config -> the fields that a patch may write, as they are now."""
    wanted = {type(config) for config in text_configs(root.config)}
    return {
        path: {name: copy.deepcopy(getattr(config, name, None)) for name in written_fields(config)}
        for path, config in config_tree(root.config)
        if type(config) in wanted
    }


def written_fields(config: PreTrainedConfig) -> list[str]:
    """Names of the fields that a patch may write."""
    return [*length_fields(config), *side_fields(config), *image_fields(config), "rope_parameters"]


def set_fields(model: nn.Module, before: dict[str, dict[str, Any]]) -> None:
    """Writes recorded fields into the config tree and into the copies of the same class that modules hold."""
    by_type = {type(config): before[path] for path, config in config_tree(root_model(model).config) if path in before}
    for config in config_parts(model):
        for name, value in by_type.get(type(config), {}).items():
            if hasattr(config, name):
                setattr(config, name, copy.deepcopy(value))


@dataclass
class ConfigUndo:
    """First values of the fields that were set, so that they can be given back."""

    first: list[tuple[PreTrainedConfig, dict[str, Any]]] = field(default_factory=list)

    def set(self, config: PreTrainedConfig, **values: Any) -> None:
        """Sets fields of a config and remembers what they were at the first time."""
        remembered = next((fields for known, fields in self.first if known is config), None)
        if remembered is None:
            remembered = {}
            self.first.append((config, remembered))
        for name, value in values.items():
            remembered.setdefault(name, copy.deepcopy(getattr(config, name, ABSENT)))
            setattr(config, name, value)

    def give_back(self) -> None:
        """Sets every field back to its first value, and removes those that were not there."""
        for config, remembered in self.first:
            for name, value in remembered.items():
                if value == ABSENT:
                    delattr(config, name)
                else:
                    setattr(config, name, value)
