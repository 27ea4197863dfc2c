"""A complete picture of a model, to be compared bit for bit before and after."""

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from tests.architectures import tiny_inputs

TENSOR_STORES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Snapshot:
    """Everything of a model that a user or transformers can see."""

    logits: torch.Tensor | None
    tensors: dict[str, torch.Tensor]
    """Parameters and buffers, persistent or not, by path."""
    state_dict: dict[str, torch.Tensor]
    classes: dict[str, type]
    """Class of each module by path; the object itself, since a subclass may have the same name."""
    attributes: dict[str, str]
    """Every attribute of every module (configs as JSON, flags, hooks, scalings) by path, in text."""


@torch.no_grad()
def logits_of(model: nn.Module, length: int = 16, **inputs: Any) -> torch.Tensor:
    """Logits [B, L, V] for the same text tokens each time."""
    return model(**{**tiny_inputs(length), **inputs}).logits


def snapshot(model: nn.Module, length: int = 16) -> Snapshot:
    """The picture of a model after one forward of `length` tokens (0: none, since some modules keep state in it)."""
    logits = logits_of(model, length) if length else None
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return Snapshot(
        logits=logits,
        tensors={name: value.detach().clone() for name, value in tensors.items()},
        state_dict={name: value.detach().clone() for name, value in model.state_dict().items()},
        classes={name: type(module) for name, module in model.named_modules()},
        attributes={
            f"{name}.{key}": described(value)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if key not in TENSOR_STORES
        },
    )


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """Names of all that is not the same; empty for two pictures of the same model."""
    found = [] if same(before.logits, after.logits) else ["logits"]
    for part in ("tensors", "state_dict", "classes", "attributes"):
        one, other = getattr(before, part), getattr(after, part)
        if list(one) != list(other) and sorted(one) == sorted(other) and part == "state_dict":
            found.append("order of the state dict")
        found += [f"{part}: {name}" for name in sorted({*one, *other}) if not same(one.get(name), other.get(name))]
    return found


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit; tensors in dtype, device and shape too."""
    if not (torch.is_tensor(one) and torch.is_tensor(other)):
        return one is other if isinstance(one, type) else one == other
    alike = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
    return alike and torch.equal(one, other)


def described(value: Any) -> str:
    """A value as text that is the same for equal values in two models."""
    if isinstance(value, PreTrainedConfig):
        return value.to_json_string(use_diff=False)
    if torch.is_tensor(value):
        return f"{value.dtype} {value.tolist()}"
    if isinstance(value, dict):
        return str({str(key): described(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return str([described(item) for item in value])
    if isinstance(value, set | frozenset):
        return str(sorted(map(str, value)))
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return f"function {getattr(value, '__qualname__', value)}"
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return repr(value)
    return f"object of {type(value).__qualname__}"
