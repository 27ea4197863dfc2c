"""Tiny vision models with a learned table of patches, and images for them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

N, T, PATCH, WIDTH = 16, 32, 4, 32
"""Pixels per side of the images that an unpatched model reads and of those that one patched by 2 does; of a patch."""
SETTINGS = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "image_size": N,
    "patch_size": PATCH,
    "initializer_range": 0.3,
}


@dataclass(frozen=True)
class Family:
    """One vision model, as data."""

    name: str
    """Class in transformers."""
    table: str
    """Path of the table in the model."""
    extra: int
    """Rows in front that are no patches."""
    asks: bool = True
    """Whether it interpolates only where a keyword asks for it."""
    complains: str = ""
    """What it says about an image that is too small; empty where it reads that."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """More keyword arguments of the configuration."""


FAMILIES = {
    "vit": Family("ViTModel", "embeddings.position_embeddings", 1, complains="doesn't match model"),
    "deit": Family("DeiTModel", "embeddings.position_embeddings", 2, complains="doesn't match model"),
    "dinov2": Family("Dinov2Model", "embeddings.position_embeddings", 1, asks=False),
    "clip": Family("CLIPVisionModel", "embeddings.position_embedding.weight", 1, complains="doesn't match model"),
    "siglip": Family("SiglipVisionModel", "embeddings.position_embedding.weight", 0, complains="must match the size"),
    "internvl": Family(
        "InternVLVisionModel",
        "embeddings.position_embeddings",
        1,
        asks=False,
        settings={"image_size": [N, N], "patch_size": [PATCH, PATCH]},
    ),
}
ROWS = pytest.mark.parametrize("row", FAMILIES)


def tiny(row: str, name: str = "", **changes: Any) -> Any:
    """A random model in evaluation mode, the same each time; its table, which some families begin with zeros, is loud.

    Args:
        row: key of `FAMILIES`.
        name: another class of the same family.
        changes: fields of its configuration.
    """
    family = FAMILIES[row]
    cls = getattr(transformers, name or family.name)
    config = cls.config_class(**{**SETTINGS, **family.settings, **changes}, architectures=[cls.__name__])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(config).eval()
        for key, parameter in model.named_parameters():
            if "position_embedding" in key:
                parameter.data.normal_()
    return model


def image(side: int = T, rows: int = 2) -> Tensor:
    """[B, 3, side, side] float32, the same each time."""
    return torch.randn(rows, 3, side, side, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def see(model: Any, pixels: Tensor, **keywords: Any) -> Tensor:
    """[B, P, W], what the last layer says, or what a head says."""
    return model(pixels, **keywords)[0]


def table_of(row: str, model: Any) -> Tensor:
    """[R, W]: the whole table, a copy."""
    table = model.get_parameter(FAMILIES[row].table)
    return table.detach().reshape(-1, WIDTH).clone()
