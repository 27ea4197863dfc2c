"""Invariant 11: only the text decoder of a multimodal model is stretched, and every other key of its config is kept."""

from typing import Any

import pytest
import torch

from hf_posext import inspect_model, patch_model, record_of, unpatch_model
from tests.architectures import tiny_model
from tests.methods import METHOD, patch_row
from tests.snapshots import Snapshot, differences, snapshot

VISION, ROTARY = "model.visual", "model.language_model.rotary_emb"


def vision(picture: Snapshot) -> dict[str, Any]:
    """What a picture shows of the vision tower."""
    parts = [picture.tensors, picture.state_dict, picture.classes, picture.attributes]
    return {
        f"{index} {name}": value for index, part in enumerate(parts) for name, value in part.items() if VISION in name
    }


@pytest.mark.parametrize("layers", ["full", "all"])
@pytest.mark.parametrize("method", list(METHOD))
def test_the_vision_tower_keeps_every_bit(method: str, layers: str) -> None:
    model = tiny_model("qwen2_vl")
    before = snapshot(model)
    patch_row(model, "qwen2_vl", method, layers=layers)
    changed = [name for name in differences(before, snapshot(model)) if VISION in name]
    assert changed == []
    assert vision(before)


def test_the_vision_tower_sees_the_same_picture() -> None:
    model = tiny_model("qwen2_vl")
    pixels, grid = torch.randn(16, 3 * 2 * 4 * 4), torch.tensor([[1, 4, 4]])
    with torch.no_grad():
        before = model.model.visual(pixels, grid_thw=grid).last_hidden_state
        patch_model(model, "yarn", 4)
        after = model.model.visual(pixels, grid_thw=grid).last_hidden_state
    assert torch.equal(before, after)


@pytest.mark.parametrize("method", list(METHOD))
def test_sections_of_the_position_axes_are_kept(method: str) -> None:
    model = tiny_model("qwen2_vl")
    before = dict(model.config.text_config.rope_parameters)
    patch_row(model, "qwen2_vl", method)
    assert model.config.text_config.rope_parameters["mrope_section"] == [2, 3, 3]
    assert model.model.language_model.rotary_emb.config.rope_parameters["mrope_section"] == [2, 3, 3]
    unpatch_model(model)
    assert model.config.text_config.rope_parameters == before


def test_other_parts_of_the_config_are_kept() -> None:
    model = tiny_model("qwen2_vl")
    before = model.config.to_dict()
    patch_model(model, "yarn", 2)
    after = model.config.to_dict()
    assert {name for name in after if after[name] != before.get(name)} == {"text_config", "posext"}
    assert after["text_config"]["max_position_embeddings"] == 64
    changed = {name for name in after["text_config"] if after["text_config"][name] != before["text_config"].get(name)}
    assert changed == {"max_position_embeddings", "rope_parameters"}


def test_the_three_axes_are_stretched_alike() -> None:
    """Time, height and width may differ for pictures: position s p on each axis turns as p did."""
    model = tiny_model("qwen2_vl")
    rotary = model.get_submodule(ROTARY)
    positions = torch.stack([torch.arange(9), torch.arange(9) * 2, torch.arange(9) % 4])[:, None]  # [3, B, L]
    before = torch.stack(rotary(torch.zeros(1, 9, 1), positions))
    patch_model(model, "pi", 2)
    torch.testing.assert_close(torch.stack(rotary(torch.zeros(1, 9, 1), 2 * positions)), before, rtol=0, atol=1e-6)


def test_a_report_names_what_was_left_alone() -> None:
    model = tiny_model("qwen2_vl")
    report = inspect_model(model)
    assert [site.site for site in report.sites] == [ROTARY]
    tower = model.model.visual.rotary_pos_emb
    assert report.left_alone == [f"model.visual.rotary_pos_emb ({type(tower).__name__})"]


def test_only_the_text_site_is_in_the_record() -> None:
    assert record_of(patch_model(tiny_model("qwen2_vl"), "pi", 2)).sites == [ROTARY]
