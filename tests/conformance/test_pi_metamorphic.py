"""Invariant 2: under `pi` a model sees position s p as it saw p before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_posext import patch_model
from tests import special_models
from tests.architectures import ARCHITECTURE, ARCHITECTURES, tiny_model
from tests.snapshots import logits_of

WITH_POSITIONS = [row.id for row in ARCHITECTURES if row.takes_position_ids]
FACTORS = (2, 3)
TOLERANCE = 1e-5
"""Relative to the largest logit."""


def at(model: Any, positions: torch.Tensor) -> torch.Tensor:
    """Logits at given positions; the mask says that gaps between them are not borders of documents."""
    positions = positions.expand(2, -1)
    return logits_of(model, positions.shape[1], position_ids=positions, attention_mask=torch.ones_like(positions))


def old_positions(architecture: str) -> torch.Tensor:
    """Sixteen positions that reach beyond the very first N on a checkpoint that is stretched already."""
    return torch.arange(16) * int(ARCHITECTURE[architecture].native_factor)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("architecture", WITH_POSITIONS)
def test_position_s_p_gives_the_logits_of_p(architecture: str, factor: int) -> None:
    model, positions = tiny_model(architecture), old_positions(architecture)
    before = at(model, positions)
    patch_model(model, "pi", factor, layers="all")
    assert (at(model, factor * positions) - before).abs().max() <= TOLERANCE * before.abs().max()


@pytest.mark.parametrize("architecture", WITH_POSITIONS)
def test_position_p_does_not_give_the_logits_of_p(architecture: str) -> None:
    """Without this the test above could pass on models that are blind to position."""
    model, positions = tiny_model(architecture), old_positions(architecture)
    before = at(model, positions)
    patch_model(model, "pi", 2, layers="all")
    assert (at(model, positions) - before).abs().max() > 100 * TOLERANCE * before.abs().max()


@pytest.mark.parametrize("factor", FACTORS)
def test_row_s_p_of_a_roformer_table_is_row_p(factor: int) -> None:
    model = tiny_model("roformer")
    table = model.roformer.encoder.embed_positions.weight.detach().clone()
    patch_model(model, "pi", factor)
    stretched = model.roformer.encoder.embed_positions.weight.detach()
    assert stretched.shape[0] == factor * table.shape[0]
    torch.testing.assert_close(stretched[::factor], table, rtol=0, atol=2e-6)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("make", [special_models.esm, special_models.codegen], ids=["esm", "codegen"])
def test_rotary_module_turns_s_p_as_p(make: Callable[[], Any], factor: int) -> None:
    """ESM makes its positions from the mask, CodeGen looks them up in a table."""
    model = make()
    before = turned(model, 1)
    patch_model(model, "pi", factor)
    torch.testing.assert_close(turned(model, factor), before, rtol=0, atol=5e-6)


def turned(model: Any, stride: int) -> torch.Tensor:
    """Cosines and sines of every `stride`-th position, sixteen of them."""
    positions = stride * torch.arange(16)
    for module in model.modules():
        table = getattr(module, "embed_positions", None)
        if torch.is_tensor(table):
            return table[positions]
        if "RotaryEmbedding" in type(module).__name__:
            return torch.stack(module(torch.zeros(1, 16, 1), positions[None]))
    raise LookupError("no rotary module")
