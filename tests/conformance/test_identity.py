"""Invariant 1: a factor of 1 changes no bit of any output."""

import pytest
import torch

from hf_posext import record_of
from tests.architectures import tiny_model
from tests.methods import pairs, patch_row
from tests.snapshots import logits_of


@pytest.mark.parametrize(("architecture", "method"), pairs())
def test_factor_1_changes_no_bit_of_the_logits(architecture: str, method: str) -> None:
    model = tiny_model(architecture)
    before = logits_of(model, 24)
    patch_row(model, architecture, method, factor=1)
    assert torch.equal(logits_of(model, 24), before)


@pytest.mark.parametrize(("architecture", "method"), pairs())
def test_factor_2_does_change_the_logits(architecture: str, method: str) -> None:
    """Without this the test above could pass on models that are blind to position."""
    model = tiny_model(architecture)
    before = logits_of(model, 24)
    patch_row(model, architecture, method, factor=2)
    assert (logits_of(model, 24) - before).abs().max() > 1e-4 * before.abs().max()


@pytest.mark.parametrize(("architecture", "method"), pairs(("gemma3", "modernbert", "gemma3_linear")))
def test_factor_1_on_all_layers_changes_no_bit_of_the_logits(architecture: str, method: str) -> None:
    model = tiny_model(architecture)
    before = logits_of(model, 24)
    patch_row(model, architecture, method, factor=1, layers="all")
    assert torch.equal(logits_of(model, 24), before)


def test_factor_1_with_a_temperature_on_the_logits_changes_no_bit() -> None:
    model = tiny_model("gpt_neox")
    before = logits_of(model)
    patch_row(model, "gpt_neox", "yarn", factor=1, temperature="logits")
    assert torch.equal(logits_of(model), before)


def test_factor_1_is_recorded_as_a_patch() -> None:
    model = patch_row(tiny_model("llama"), "llama", "yarn", factor=1)
    record = record_of(model)
    assert (record.native, record.total_factor, model.config.rope_parameters["rope_type"]) == (
        "unchanged",
        1,
        "default",
    )
