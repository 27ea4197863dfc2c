"""Tables of patches: found, interpolated in two dimensions, saved for plain transformers, and refused where unfit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import interpolate

from hf_posext import (
    NoSiteError,
    PatchError,
    inspect_model,
    list_methods,
    load_pretrained,
    patch_model,
    record_of,
    unpatch_model,
)
from hf_posext.mechanisms import find_sites, grid
from tests.mechanisms.vision_models import FAMILIES, PATCH, ROWS, WIDTH, N, T, image, see, table_of, tiny
from tests.snapshots import differences, snapshot
from tests.tables import make

CLOSE = {"rtol": 0, "atol": 1e-5}
"""Outputs of up to 10 after two layers, whose table was interpolated in another dtype."""


def bicubic(rows: Tensor, side: int) -> Tensor:
    """[side^2, W] float64 by torch from the rows of a square."""
    across = round(len(rows) ** 0.5)
    square = rows.double().T.reshape(1, WIDTH, across, across)
    return interpolate(square, (side, side), mode="bicubic", align_corners=False).reshape(WIDTH, -1).T


@ROWS
@pytest.mark.parametrize("factor", [2, 1.5, 3])
def test_the_table_is_resized_as_a_picture_and_other_rows_stay(row: str, factor: float) -> None:
    model, extra = tiny(row), FAMILIES[row].extra
    before = table_of(row, model)
    after = table_of(row, patch_model(model, "pi", factor))
    assert torch.equal(after[:extra], before[:extra])
    wanted = bicubic(before[extra:], int(N * factor) // PATCH)
    torch.testing.assert_close(after[extra:].double(), wanted, rtol=0, atol=2e-6)
    in_float64 = row != "dinov2"  # whose own code goes back to float32
    assert torch.equal(after[extra:], wanted.float()) == in_float64


@ROWS
def test_larger_images_are_read_as_by_the_models_own_interpolation(row: str) -> None:
    family, model = FAMILIES[row], tiny(row)
    own = see(model, image(), **({"interpolate_pos_encoding": True} if family.asks else {}))
    patch_model(model, "pi", 2)
    assert own.shape[1] == family.extra + (T // PATCH) ** 2
    torch.testing.assert_close(see(model, image()), own, **CLOSE)


@ROWS
def test_smaller_images_are_what_the_family_says(row: str) -> None:
    model, complains = patch_model(tiny(row), "pi", 2), FAMILIES[row].complains
    if complains:
        with pytest.raises((ValueError, RuntimeError), match=complains):
            see(model, image(N))
    else:
        assert see(model, image(N)).shape[1] == FAMILIES[row].extra + (N // PATCH) ** 2


@ROWS
def test_all_sizes_are_those_of_a_model_that_is_made_for_larger_images(row: str) -> None:
    size = [T, T] if "image_size" in FAMILIES[row].settings else T
    fresh, model = tiny(row, image_size=size), patch_model(tiny(row), "pi", 2)
    assert sizes(model) == sizes(fresh)
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in fresh.state_dict().items()
    }
    assert model.config.image_size == fresh.config.image_size
    for (name, buffer), (_, wanted) in zip(model.named_buffers(), fresh.named_buffers(), strict=True):
        assert torch.equal(buffer, wanted), name


def sizes(model: nn.Module) -> dict[str, Any]:
    """Every number, or pair of numbers, that a module keeps."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | tuple) and not name.startswith("_")
    }


@ROWS
@pytest.mark.parametrize("factor", [2, 1.5])
def test_plain_transformers_loads_it(row: str, factor: float, tmp_path: Path) -> None:
    model, pixels = patch_model(tiny(row), "pi", factor), image(int(N * factor))
    assert record_of(model).native == "weights"
    model.save_pretrained(tmp_path)
    plain, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(see(plain.eval(), pixels), see(model, pixels))


@ROWS
def test_a_loaded_patch_is_in_force_and_cannot_be_taken_off(row: str, tmp_path: Path) -> None:
    model = patch_model(tiny(row), "pi", 2)
    with torch.no_grad():
        model.get_parameter(FAMILIES[row].table).mul_(1.5)  # trained since
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, type(model)).eval()
    assert torch.equal(see(loaded, image()), see(model, image()))
    assert sizes(loaded) == sizes(model)
    assert inspect_model(loaded).in_force
    before = snapshot(loaded, 0)
    with pytest.raises(PatchError, match="not in the checkpoint"):
        unpatch_model(loaded)
    assert differences(before, snapshot(loaded, 0)) == []


@pytest.mark.transformers_logs("says that the weights of the head are left over")
def test_a_head_comes_and_goes_between_saving_and_loading(tmp_path: Path) -> None:
    model = patch_model(tiny("vit", "ViTForImageClassification", num_labels=3), "pi", 2)
    model.save_pretrained(tmp_path)
    bare = load_pretrained(tmp_path, transformers.ViTModel, add_pooling_layer=False).eval()
    with torch.no_grad():
        assert torch.equal(see(bare, image()), model.vit(image())[0])
    with pytest.raises(PatchError, match="not in the checkpoint"):
        unpatch_model(bare)


@ROWS
def test_factor_1_changes_no_bit_and_can_be_loaded_and_taken_off(row: str, tmp_path: Path) -> None:
    model = tiny(row)
    before, seen = snapshot(model, 0), see(model, image(N))
    patch_model(model, "pi", 1)
    assert torch.equal(see(model, image(N)), seen)
    model.save_pretrained(tmp_path)
    loaded = unpatch_model(load_pretrained(tmp_path, type(model))).eval()
    assert torch.equal(see(loaded, image(N)), seen)
    assert sizes(loaded) == sizes(model)
    fresh = tiny(row)
    assert differences(before, snapshot(unpatch_model(patch_model(fresh, "pi", 1)), 0)) == []


@ROWS
def test_a_target_may_be_given_in_pixels(row: str) -> None:
    by_target, by_factor = (patch_model(tiny(row), "pi", **how) for how in ({"target_length": 24}, {"factor": 1.5}))
    assert torch.equal(table_of(row, by_target), table_of(row, by_factor))
    assert record_of(by_target).describe() == "pi x1.5 (16 -> 24 pixels per side)"


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"factor": 1.1}, ValueError, r"16 pixels per side by a factor of 1.1 are 17.6. Give `target_length`=20"),
        ({"factor": 1.125}, ValueError, r"whole patches of 4 x 4 pixels.*Give `target_length`=20"),
        ({"target_length": 30}, ValueError, r"Give `target_length`=32"),
        ({"factor": 0.5}, ValueError, r"`factor` must be a finite number >= 1, got 0.5"),
        ({"factor": 2, "original_max_position_embeddings": 8}, ValueError, r"16 pixels per side, got 8"),
        ({"factor": 2, "dynamic": True}, ValueError, r"no meaning for images"),
        ({"factor": 2, "mode": "cubic"}, TypeError, r"`mode` of `pi` .* the model has `grid`"),
        ({"factor": 2, "align": "corners"}, TypeError, r"`align` of `pi` .* the model has `grid`"),
        ({"factor": 2, "frozen_rows": True}, TypeError, r"`frozen_rows` of `pi` .* the model has `grid`"),
    ],
)
def test_other_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    model = tiny("vit")
    before = snapshot(model, 0)
    with pytest.raises(error, match=says):
        patch_model(model, "pi", **arguments)
    assert differences(before, snapshot(model, 0)) == []


@pytest.mark.parametrize("method", ["yarn", "tile", "alibi", "nope", "window", "relative_bias", "self_extend"])
def test_other_methods_are_refused(method: str) -> None:
    with pytest.raises(NoSiteError, match=rf"`{method}` has no meaning for a grid encoding. Methods that do: `pi`\."):
        patch_model(tiny("clip"), method, 2)
    assert [each.name for each in list_methods(tiny("clip"))] == ["pi"]


def no_squares() -> Any:
    """ViT for wide images."""
    return tiny("vit", image_size=[N, T])


def relative_in_windows() -> Any:
    """BEiT, which has no table of its own."""
    return transformers.BeitModel(transformers.BeitConfig(**tiny("vit").config.to_diff_dict() | {"model_type": "beit"}))


@pytest.mark.parametrize("build", [no_squares, relative_in_windows])
def test_other_tables_are_not_found(build: Callable[[], Any]) -> None:
    model = build()
    assert [site for site in find_sites(model) if site.mechanism == "grid"] == []
    with pytest.raises(PatchError, match="has no position encoding that is known"):
        patch_model(model, "pi", 2)


MAE = {"decoder_hidden_size": 32, "decoder_num_attention_heads": 4}
SWIN = {
    "embed_dim": 8,
    "depths": [1, 1],
    "num_attention_heads": [2, 2],
    "window_size": 2,
    "use_absolute_embeddings": True,
}


@pytest.mark.parametrize(
    ("name", "changes", "other"),
    [
        ("ViTMAEForPreTraining", MAE, "decoder.decoder_pos_embed"),
        ("SwinModel", SWIN, "encoder.layers.0.blocks.0.input_resolution"),
    ],
)
def test_whatever_else_follows_the_size_is_named(name: str, changes: dict[str, Any], other: str) -> None:
    model = tiny("vit", name, **changes)
    before = snapshot(model, 0)
    with pytest.raises(PatchError, match=rf"more than its table .*`{other}`"):
        patch_model(model, "pi", 2)
    assert differences(before, snapshot(model, 0)) == []


def test_a_model_that_does_not_use_its_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("siglip")
    before = snapshot(model, 0)
    monkeypatch.setattr(
        type(model.embeddings), "forward", lambda self, pixels, **_: self.patch_embedding(pixels).flatten(2).mT
    )
    with pytest.raises(PatchError, match="has no effect"):
        patch_model(model, "pi", 2)
    monkeypatch.undo()
    assert differences(before, snapshot(model, 0)) == []


def test_a_table_other_than_by_the_models_own_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = tiny("vit"), grid.interpolated
    before = snapshot(model, 0)
    monkeypatch.setattr(grid, "interpolated", lambda *arguments: own(*arguments).flip(1))
    with pytest.raises(PatchError, match="otherwise than with its own `interpolate_pos_encoding`"):
        patch_model(model, "pi", 2)
    assert differences(before, snapshot(model, 0)) == []


def test_a_report_shows_the_table() -> None:
    model = tiny("clip")
    assert inspect_model(model).summary() == "trained for 16 pixels per side, not patched"
    report = inspect_model(patch_model(model, "pi", 2))
    assert report.summary() == "trained for 16, reads 32 pixels per side by pi x2"
    (site,) = report.sites
    assert (site.mechanism, site.site, site.rows, site.is_patched) == ("grid", "embeddings", 65, True)
    assert "65 rows" in str(report)


def test_the_tower_of_a_model_that_reads_too_stays_as_it_is() -> None:
    vision = {**tiny("clip").config.to_dict(), "architectures": None}
    text = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "max_position_embeddings": N, "initializer_range": 0.3}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    model = transformers.CLIPModel(config).eval()
    tower = snapshot(model.vision_model, 0)
    patch_model(model, "pi", 2)
    assert record_of(model).sites == ["text_model.embeddings.position_embedding"]
    assert differences(tower, snapshot(model.vision_model, 0)) == []
    assert model.config.vision_config.image_size == N


def test_models_that_read_have_no_grid() -> None:
    assert {site.mechanism for site in find_sites(make("bert"))} == {"learned"}
