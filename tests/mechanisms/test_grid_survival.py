"""A changed table of patches through copies, casts, training and other patches, and taken off again bit for bit."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from hf_posext import PatchError, images, load_pretrained, patch_model, patched, record_of, suspended, unpatch_model
from tests.copies import through_pickle, through_torch_save
from tests.mechanisms.vision_models import FAMILIES, ROWS, N, T, image, see, table_of, tiny
from tests.snapshots import differences, snapshot

COPIES = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_torch_save}


@ROWS
@pytest.mark.parametrize("factor", [2, 1.5])
def test_it_is_taken_off_bit_for_bit(row: str, factor: float) -> None:
    model = tiny(row)
    before, seen = snapshot(model, 0), see(model, image(N))
    parameter = model.get_parameter(FAMILIES[row].table)
    with patched(model, "pi", factor):
        assert differences(before, snapshot(model, 0)) != []
    assert differences(before, snapshot(model, 0)) == []
    assert model.get_parameter(FAMILIES[row].table) is parameter
    assert torch.equal(see(model, image(N)), seen)


@ROWS
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES.keys())
def test_a_copy_is_patched_and_goes_its_own_way(row: str, duplicate: Callable[[Any], Any]) -> None:
    model = tiny(row)
    before = snapshot(model, 0)
    patch_model(model, "pi", 2)
    other, seen = duplicate(model), see(model, image())
    assert torch.equal(see(other, image()), seen)
    assert differences(before, snapshot(unpatch_model(other), 0)) == []
    assert torch.equal(see(model, image()), seen)
    assert differences(before, snapshot(unpatch_model(model), 0)) == []


@ROWS
def test_another_model_of_the_same_config_is_left_alone(row: str) -> None:
    model = tiny(row)
    other = type(model)(model.config).eval()
    before = snapshot(other, 0)
    patch_model(model, "pi", 2)
    assert differences(before, snapshot(other, 0)) == []


@ROWS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_table_is_rounded_once(row: str, dtype: torch.dtype) -> None:
    model, whole = tiny(row).to(dtype), tiny(row).to(dtype).float()
    before = snapshot(model, 0)
    table, wanted = (table_of(row, patch_model(each, "pi", 2)) for each in (model, whole))
    assert table.dtype == dtype
    assert (table.float() - wanted).abs().max() <= torch.finfo(dtype).eps / 2 * wanted.abs().max()
    assert see(model, image().to(dtype)).dtype == dtype
    assert differences(before, snapshot(unpatch_model(model), 0)) == []


@ROWS
def test_a_cast_reaches_the_table_and_what_it_was(row: str) -> None:
    model, plain = patch_model(tiny(row), "pi", 2), tiny(row)
    wanted = table_of(row, model).bfloat16()
    assert torch.equal(table_of(row, model.bfloat16()), wanted)
    assert see(model, image().bfloat16()).isfinite().all()
    assert torch.equal(table_of(row, unpatch_model(model)), table_of(row, plain).bfloat16())
    back = unpatch_model(patch_model(tiny(row), "pi", 2).bfloat16().float())
    assert torch.equal(table_of(row, back), table_of(row, plain))


@ROWS
def test_what_was_trained_stays_in_place(row: str) -> None:
    model = tiny(row)
    before = snapshot(model, 0)
    table = patch_model(model, "pi", 2).get_parameter(FAMILIES[row].table)
    model(image())[0].pow(2).sum().backward()
    assert table.grad is not None
    assert bool(table.grad.abs().gt(0).any(-1).all())
    with torch.no_grad():
        table -= 0.01 * table.grad.sign()
    seen = see(model, image())
    with suspended(model):
        assert differences(before, snapshot(model, 0)) == []
    assert torch.equal(see(model, image()), seen)
    assert model.get_parameter(FAMILIES[row].table) is table


@ROWS
def test_a_table_that_is_not_trained_stays_so(row: str) -> None:
    model = tiny(row).requires_grad_(False)
    assert not patch_model(model, "pi", 2).get_parameter(FAMILIES[row].table).requires_grad


@ROWS
def test_one_patch_on_another(row: str) -> None:
    model, first = tiny(row), tiny(row)
    before = snapshot(model, 0)
    patch_model(patch_model(model, "pi", 1.5), "pi", 2, compose=True)
    once = patch_model(first, "pi", 1.5)
    own = see(once, image(48), **({"interpolate_pos_encoding": True} if FAMILIES[row].asks else {}))
    torch.testing.assert_close(see(model, image(48)), own, rtol=0, atol=1e-5)
    record = record_of(model)
    assert (record.trained_length, record.target_length, record.total_factor) == (24, 48, 3.0)
    seen = see(model, image(48))
    with suspended(model):
        assert differences(before, snapshot(model, 0)) == []
    assert torch.equal(see(model, image(48)), seen)
    assert differences(before, snapshot(unpatch_model(model), 0)) == []


@ROWS
def test_what_is_lost_stays_so_when_another_patch_fails(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = patch_model(tiny(row), "pi", 2)
    model.save_pretrained(tmp_path)
    loaded, own = load_pretrained(tmp_path, type(model)).eval(), images.check_sizes
    before = snapshot(loaded, 0)
    monkeypatch.setattr(images, "check_sizes", lambda root, plan: own(root, replace(plan, target_length=N)))
    with pytest.raises(PatchError, match="more than its table"):
        patch_model(loaded, "pi", 1.5, compose=True)
    monkeypatch.undo()
    assert differences(before, snapshot(loaded, 0)) == []
    with pytest.raises(PatchError, match="not in the checkpoint"):
        unpatch_model(loaded)


@ROWS
def test_weights_are_not_drawn_again(row: str) -> None:
    model = patch_model(tiny(row), "pi", 2)
    table = table_of(row, model)
    model.init_weights()
    model.apply(model._init_weights)
    assert torch.equal(table_of(row, model), table)


@ROWS
def test_a_patch_draws_no_random_numbers(row: str) -> None:
    model = tiny(row).train()
    before = torch.get_rng_state()
    patch_model(model, "pi", 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_within_peft() -> None:
    model = tiny("vit")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config).eval()
    own = see(wrapped, image(), interpolate_pos_encoding=True)
    before = snapshot(wrapped, 0)
    patch_model(wrapped, "pi", 2)
    torch.testing.assert_close(see(wrapped, image()), own, rtol=0, atol=1e-5)
    assert differences(before, snapshot(unpatch_model(wrapped), 0)) == []
    with pytest.raises(ValueError, match="doesn't match model"):
        see(wrapped, image(T))
