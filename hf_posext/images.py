"""Vision models: tables of patches written with the size of the images, and proved on one of the new size."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

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
    check_saved(mechanisms.root_model(model), sites, plan)
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


def check_saved(root: PreTrainedModel, sites: list[Site], plan: Plan) -> None:
    """Demands that the tables are all whose shape follows the images, so that plain transformers loads what is saved.

    Raises:
        PatchError: other weights would not fit.
    """
    old, new = shapes(root, plan.trained_length), shapes(root, plan.target_length)
    tables = {f"{site.name}.{site.field}".lstrip("."): grid.table_of(site).shape for site in sites}
    wrong = {name for name, shape in new.items() if shape != tables.get(name, old[name])}
    if wrong:
        raise PatchError(
            f"{type(root).__name__} has other weights than its table of positions whose size follows that of the images "
            f"({quoted(sorted(wrong))}), and no way to interpolate them. The model was left as it was."
        )


def shapes(root: PreTrainedModel, image: int) -> dict[str, torch.Size]:
    """Key of the state dict -> shape, in a model of the same class for images of some size; nothing is allocated."""
    config = copy.deepcopy(root.config)
    for name in image_fields(config):
        setattr(config, name, grid.like(getattr(config, name), image))
    with quiet(), torch.device("meta"):
        return {name: value.shape for name, value in type(root)(config).state_dict().items()}
