"""Learned tables of the patches of square images, which the model's own code can interpolate in two dimensions."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from hf_posext.contract import GridChange, GridTable, Site
from hf_posext.errors import PatchError
from hf_posext.lengths import image_fields
from hf_posext.mechanisms import _rows
from hf_posext.mechanisms._held import holder_of
from hf_posext.mechanisms._scope import Scoped

MECHANISM = "grid"
HOOK = "interpolate_pos_encoding"
HOOK_TAKES = ["self", "embeddings", "height", "width"]
IDS = "position_ids"


@dataclass(frozen=True)
class Sizes:
    """How large a table is, and what it is made for.

    Attributes:
        image: pixels per side of an image.
        patch: pixels per side of a patch.
        extra: rows in front that are no patches (of a class token, ...).
    """

    image: int
    patch: int
    extra: int = 0

    @property
    def across(self) -> int:
        """Patches per side."""
        return self.image // self.patch

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.extra + self.across**2

    def numbers(self) -> dict[str, int]:
        """Names under which modules keep such sizes -> what these are."""
        return {
            "image_size": self.image,
            "num_patches": self.across**2,
            "num_patches_per_side": self.across,
            "patch_shape": self.across,
            "num_positions": self.rows,
            "num_embeddings": self.rows,
        }


class GridHolder:
    """What the module around a changed table keeps; it runs as before, so that its class stays.

    Attributes:
        original: the table to go back to.
        field: where it is.
        sizes: path of a part of the module and a name -> number or buffer that was there.
        is_off: never, the table cannot be switched off.
        is_lost: whether the original is not known, since a checkpoint does not have it.
    """

    def __init__(self, site: Site) -> None:
        self.original_class = type(site.module)
        self.original, self.field = table_of(site), site.field
        self.sizes: dict[tuple[str, str], Any] = {}
        self.is_off = self.is_lost = False


def find(scoped: Scoped) -> list[Site]:
    """The module of a vision model that has one table with a row for each patch, and code that interpolates it."""
    module, config = scoped.module, scoped.config
    holder = holder_of(module)
    if isinstance(holder, GridHolder):
        return [Site(MECHANISM, scoped.name, module, config, "", holder.field)]
    hook = getattr(type(module), HOOK, None)
    if hook is None or list(inspect.signature(hook).parameters) != HOOK_TAKES or not image_fields(config):
        return []
    image, patch = square(config.image_size), square(config.patch_size)
    if image is None or patch is None:
        return []
    fields = [name for name, table in module.named_parameters() if is_table(module, name, table)]
    least = Sizes(image, patch).rows
    sites = [Site(MECHANISM, scoped.name, module, config, "", name) for name in fields]
    return [site for site in sites if table_of(site).shape[-2] >= least] if len(sites) == 1 else []


def is_table(module: nn.Module, name: str, table: Tensor) -> bool:
    """Whether a parameter is named after positions and has rows: one of the module, [1, R, W], or of an embedding."""
    path, _, leaf = name.rpartition(".")
    if path:
        return "pos" in path and isinstance(module.get_submodule(path), nn.Embedding)
    return "pos" in leaf and table.dim() == 3 and len(table) == 1


def square(size: Any) -> int | None:
    """A length that is given once, or twice for height and width; None where these differ or there is none."""
    pair = size if isinstance(size, list | tuple) else (size, size)
    return pair[0] if len(pair) == 2 and pair[0] == pair[1] and isinstance(pair[0], int) else None


def like(size: Any, number: int) -> Any:
    """A length in the form of another: once, or as a pair."""
    return number if isinstance(size, int) else type(size)((number, number))


def table_of(site: Site) -> Any:
    """The table, [R, W] or [1, R, W]."""
    return attrgetter(site.field)(site.module)


def sizes_of(site: Site) -> Sizes:
    """How large the table is now, and for what images."""
    image, patch = square(site.config.image_size), square(site.config.patch_size)
    if image is None or patch is None:
        raise PatchError(f"The images that {site} is made for are no squares any more. Load the model again.")
    return Sizes(image, patch, table_of(site).shape[-2] - Sizes(image, patch).rows)


def read(site: Site, trained_length: int) -> GridTable:
    """The whole table as it is now, on the CPU; the images that it is made for are those of the config.

    Raises:
        PatchError: a table on meta, which has no values.
    """
    table = table_of(site).detach()
    if table.is_meta:
        raise PatchError(f"{site} is on the meta device and has no values. Load the weights before patching.")
    sizes = sizes_of(site)
    rows = table.reshape(-1, table.shape[-1]).cpu().double()
    return GridTable(rows, sizes.image, sizes.patch, at=partial(interpolated, site, rows, sizes))


@torch.no_grad()
def interpolated(site: Site, rows: Tensor, sizes: Sizes, image: int) -> Tensor:
    """[R', W] float64: what the module's own code makes of a table for images of another size.

    Args:
        site: the table.
        rows: what it has, [R, W] float64 on the CPU.
        sizes: how large it is.
        image: pixels per side.

    Raises:
        PatchError: it does not give a row for each patch.
    """
    goal = replace(sizes, image=image)
    if goal.rows == sizes.rows:
        return rows
    twin = with_table(site.module, site.field, rows.reshape(*table_of(site).shape[:-2], *rows.shape))
    tokens = rows.new_zeros(1, 1, 1).expand(1, goal.rows, rows.shape[1])  # only their shape is looked at
    found = getattr(twin, HOOK)(tokens, image, image).reshape(-1, rows.shape[1])
    if len(found) != goal.rows:
        raise PatchError(
            f"`{HOOK}` of {site} gives {len(found)} rows for images of {image} x {image} pixels, where {goal.rows} are "
            "expected. The model was left as it was."
        )
    return found.double()


def with_table(module: nn.Module, field: str, table: Tensor) -> nn.Module:
    """A shallow copy of a module that has another table; nothing of the module is written to."""
    twin = copy.copy(module)
    twin._parameters, twin._modules = dict(module._parameters), dict(module._modules)
    name, _, rest = field.partition(".")
    if rest:
        twin._modules[name] = with_table(module.get_submodule(name), rest, table)
    else:
        twin._parameters[name] = nn.Parameter(table, requires_grad=False)
    return twin


def write(site: Site, change: GridChange) -> None:
    """Puts a table for larger images in place; all that the module knows about sizes follows."""
    holder = holder_of(site.module) or GridHolder(site)
    site.module.__dict__["_posext"] = holder
    holder.sizes = {**resize(site, change.rows, change.image), **holder.sizes}


def reset(site: Site, image: int) -> None:
    """Makes an unpatched table one for images of another size, by the module's own interpolation."""
    resize(site, read(site, image).at(image), image)


def resize(site: Site, rows: Tensor, image: int) -> dict[tuple[str, str], Any]:
    """Puts another table in place, [R, W], and sets all numbers and position ids in the module that know its size.

    Returns:
        Path of a part of the module and a name -> the number or buffer that was there.
    """
    old, present = sizes_of(site), table_of(site)
    new, was = replace(old, image=image), {}
    table = rows.to(present.dtype).to(present.device).reshape(*present.shape[:-2], *rows.shape)
    table = nn.Parameter(table, requires_grad=present.requires_grad)
    table._is_hf_initialized = True  # type: ignore[attr-defined]  # else `init_weights` would draw it again
    _rows.bind(place_of(site), table, table)
    for path, part in site.module.named_modules():
        for name, number in new.numbers().items():
            value = vars(part).get(name)
            if value is not None and square(value) == old.numbers()[name]:
                was[path, name] = value
                vars(part)[name] = like(value, number)
        ids = part._buffers.get(IDS)
        if ids is not None and ids.shape[-1] == old.rows:
            was[path, IDS] = ids
            part._buffers[IDS] = torch.arange(new.rows, device=ids.device).expand(*ids.shape[:-1], -1)
    return was


def place_of(site: Site) -> Site:
    """The site as the module that has the table itself."""
    path, _, name = site.field.rpartition(".")
    return replace(site, module=site.module.get_submodule(path), field=name)


def replace_table(module: nn.Module, table: Tensor) -> None:
    """Puts a table that was loaded or trained in place of a changed one of the same size."""
    holder: GridHolder = holder_of(module)
    path, _, name = holder.field.rpartition(".")
    part = module.get_submodule(path)
    if isinstance(table, nn.Parameter):
        part._parameters[name] = table
    else:
        getattr(part, name).data.copy_(table)


def restore(site: Site) -> None:
    """Gives a module back the table and the sizes that it had."""
    holder: GridHolder | None = site.module.__dict__.pop("_posext", None)
    if holder is None:
        return
    present = table_of(site)
    _rows.bind(place_of(site), holder.original, present)
    for (path, name), value in holder.sizes.items():
        part = site.module.get_submodule(path)
        if isinstance(value, Tensor):
            part._buffers[name] = value.to(present.device)
        else:
            vars(part)[name] = value
