"""How many tokens a model reads, and by how much each of its tables grows with a patch."""

from __future__ import annotations

from torch import nn

from hf_posext import mechanisms
from hf_posext.contract import Site
from hf_posext.lengths import LENGTH_FIELDS, trained_length
from hf_posext.mechanisms import grid


def length_of(model: nn.Module) -> int | None:
    """N in tokens of a model as it is: what its tables of positions have rows for, else what its config says.

    Tables that the length of the whole model decides come first, those of one side of an encoder-decoder after them.
    A vision model reads images of N pixels per side.
    """
    sites = mechanisms.find_sites(model)
    sides = [grid.sizes_of(site).image for site in sites if mechanisms.is_grid(site)]
    if sides:
        return min(sides)
    tables = [site for site in sites if mechanisms.has_rows(site)]
    if not tables:
        return trained_length(mechanisms.root_model(model).config)
    whole = [mechanisms.count_positions(site) for site in tables if is_whole(site)]
    stated = trained_length(mechanisms.root_model(model).config)
    return min(whole if stated is None else [*whole, stated]) if whole else max(map(mechanisms.count_positions, tables))


def is_whole(site: Site) -> bool:
    """Whether a table is as long as the length fields of the whole model say."""
    return any(name in LENGTH_FIELDS for name in mechanisms.size_fields(site))


def growths(sites: list[Site], most: int | None, length: int, target: int, factor: float) -> dict[str, int]:
    """Path of each table of rows -> by how many positions it becomes longer.

    All that the length fields of the whole model say the size of grow alike; one of another side to its own length
    times the factor.

    Args:
        sites: those that a method changes.
        most: `length_of` the model.
        length: N, which may be less.
        target: T of the model.
        factor: s.

    Raises:
        ValueError: N is more than there are rows for, or not the size of the images that a grid is for.
    """
    sides = [grid.sizes_of(site).image for site in sites if mechanisms.is_grid(site)]
    if sides and sides != [length]:
        raise ValueError(
            f"`original_max_position_embeddings` must be the `image_size` of the config, {sides[0]} pixels per side, "
            f"got {length}. Leave it out."
        )
    tables = [site for site in sites if mechanisms.has_rows(site)]
    if not tables or most is None:
        return {}
    if length > most:
        raise ValueError(
            f"`original_max_position_embeddings` must be at most {most}, since {tables[0]} has no more rows for "
            f"positions; got {length}."
        )
    counts = {str(site): mechanisms.count_positions(site) for site in tables}
    goals = {
        str(site): target - most + counts[str(site)] if is_whole(site) else int(counts[str(site)] * factor + 1e-9)
        for site in tables
    }
    return {name: max(goal - counts[name], 0) for name, goal in goals.items()}
