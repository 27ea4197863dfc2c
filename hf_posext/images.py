"""Vision models: tables of patches written with the size of the images, and proved on one of the new size."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posext import mechanisms, probe
from hf_posext.compat import quiet
from hf_posext.configs import ConfigUndo, config_parts
from hf_posext.contract import GridChange, Site
from hf_posext.errors import PatchError, quoted
from hf_posext.lengths import image_fields
from hf_posext.mechanisms import grid
from hf_posext.planning import Plan


def write(model: nn.Module, plan: Plan, sites: list[Site], undo: ConfigUndo) -> None:
    """Writes the tables of a plan and the size of the images in the config."""
    for site, change in zip(sites, plan.changes, strict=True):
        if isinstance(change, GridChange):
            grid.write(site, change)
    for config in config_parts(model):
        values = {name: grid.like(getattr(config, name), plan.target_length) for name in image_fields(config)}
        undo.set(config, **values)


def check(model: nn.Module, plan: Plan, sites: list[Site], depth: str, before: Tensor | None) -> None:
    """Demands that the model reads an image of the new size, as its own interpolation would have, and by its table.

    Args:
        model: with the patch in force.
        plan: of the patch.
        sites: its sites.
        depth: how far the outputs to compare ran.
        before: what came out of the unpatched model for an image of the new size; None where it cannot read one.

    Raises:
        NoEffectError: the output does not depend on where patches are.
        PatchError: it cannot be read or saved, or is read otherwise than before.
    """
    size = f"{plan.target_length} x {plan.target_length} pixels"
    check_sizes(mechanisms.root_model(model), plan)
    after = probe.run(model, sites, probe.DEPTHS[-1], plan.target_length)
    if after is None:
        raise PatchError(
            f"{type(model).__name__} cannot read an image of {size} alone: something other than its table of positions "
            "has a size, or it needs more than pixels. The model was left as it was."
        )
    if depth != probe.DEPTHS[-1]:
        after = probe.run(model, sites, depth, plan.target_length)
    if before is not None and (after is None or not is_close(before, after)):
        raise PatchError(
            f"{type(model).__name__} reads an image of {size} otherwise than with its own `{grid.HOOK}`: something "
            "other than its table of positions depends on the size. The model was left as it was."
        )
    with flipped(sites):
        other = probe.run(model, sites, depth, plan.target_length)
    probe.check_effect(other, after, plan.words, depth)


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs are the same but for rounding: the model interpolates in its own dtype, the patch once."""
    if one.shape != other.shape:
        return False
    scale = float(one.abs().max().nan_to_num())
    return torch.allclose(one, other, rtol=0, atol=torch.finfo(one.dtype).eps ** 0.5 * scale, equal_nan=True)


@contextmanager
def flipped(sites: list[Site]) -> Iterator[None]:
    """The rows of all tables are in reverse order for the length of a block."""
    kept = [(table, table.data) for table in map(grid.table_of, sites)]
    for table, values in kept:
        table.data = values.flip(-2)
    try:
        yield
    finally:
        for table, values in kept:
            table.data = values


def check_sizes(root: PreTrainedModel, plan: Plan) -> None:
    """Demands that all that follows the size of images does, as in a model made for it that plain transformers loads.

    Raises:
        PatchError: something else than what the patch has changed.
    """
    old, new = (sizes(fresh(root, image)) for image in (plan.trained_length, plan.target_length))
    live = sizes(root)
    wrong = [name for name, size in new.items() if size not in (old.get(name), live.get(name))]
    if wrong:
        raise PatchError(
            f"{type(root).__name__} has more than its table of positions whose size follows that of the images "
            f"({quoted(wrong)}), and no way to interpolate it. The model was left as it was."
        )


def fresh(root: PreTrainedModel, image: int) -> PreTrainedModel:
    """A model of the same class for images of some size; nothing is allocated."""
    config = copy.deepcopy(root.config)
    for name in image_fields(config):
        setattr(config, name, grid.like(getattr(config, name), image))
    with quiet(), torch.device("meta"):
        return type(root)(config)


def sizes(model: nn.Module) -> dict[str, Any]:
    """Path of each parameter and buffer -> its shape, and of each number or pair that a module keeps -> what it is."""
    found: dict[str, Any] = {name: each.shape for name, each in (*model.named_parameters(), *model.named_buffers())}
    for path, module in model.named_modules():
        kept = {name: value for name, value in vars(module).items() if isinstance(value, int | list | tuple)}
        found |= {f"{path}.{name}": value if isinstance(value, int) else list(value) for name, value in kept.items()}
    return found
