"""Models with divided distances go back, are copied, compiled and freed as any other."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posext
from hf_posext.contract import DistanceChange
from hf_posext.mechanisms import relative_bias
from tests.copies import through_pickle, through_torch_save
from tests.mechanisms.relative_models import (
    CLOSE,
    CONVOLVES,
    FAMILIES,
    SAYS,
    answer,
    divided,
    inkling,
    sites,
    text,
    tiny,
)
from tests.snapshots import differences, snapshot


@pytest.mark.parametrize("family", FAMILIES)
def test_restoring_gives_everything_back(family: str) -> None:
    model = tiny(family)
    logits, before = answer(model, text()), snapshot(model, 0)  # a router notes the dtype of what it read
    divided(model, 3)
    assert (answer(model, text()) - logits).abs().max() > 0.01
    assert list(snapshot(model, 0).state_dict) == list(before.state_dict)
    for site in sites(model):
        relative_bias.restore(site)
    assert differences(before, snapshot(model, 0)) == []
    assert torch.equal(answer(model, text()), logits)


@CONVOLVES
@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("family", ["t5", "umt5", "layoutlmv3", "deberta", "inkling_text"])
def test_copies_are_divided_and_stand_alone(family: str, copied: Callable[[Any], Any]) -> None:
    model = inkling(family) if family == "inkling_text" else tiny(family)
    before, other = answer(model, text()), model
    divided(model, 3)
    after, other = answer(model, text()), copied(model)
    assert torch.equal(answer(other, text()), after)
    for site in sites(model):
        relative_bias.restore(site)
    assert torch.equal(answer(other, text()), after)
    for site in sites(other):
        relative_bias.restore(site)
    assert torch.equal(answer(other, text()), before)
    assert not torch.equal(before, after)


def test_other_models_and_classes_stay() -> None:
    model, other = tiny("t5"), tiny("t5")
    before, kinds = answer(other, text()), [dict(vars(type(module))) for module in model.modules()]
    divided(model, 3)
    assert [dict(vars(type(module))) for module in model.modules()] == kinds
    assert torch.equal(answer(other, text()), before)


def test_a_patched_model_is_freed_when_it_goes() -> None:
    model = divided(tiny("umt5"), 2)
    gc.collect()
    gc.disable()
    try:
        known = weakref.ref(model)
        del model
        assert known() is None
    finally:
        gc.enable()


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("family", ["t5", "umt5", "layoutlmv3", "deberta_v2"])
def test_it_compiles_in_one_graph(family: str) -> None:
    module = sites(divided(tiny(family), 1.5))[0].module
    compiled = torch.compile(SAYS[family], fullgraph=True, backend="eager")
    assert torch.equal(compiled(module), SAYS[family](module))


def test_what_is_divided_twice_is_divided_by_the_product() -> None:
    for family in ("t5", "layoutlmv3"):
        twice, once = divided(divided(tiny(family), 1.5), 2), divided(tiny(family), 3)
        assert torch.equal(answer(twice, text()), answer(once, text()))


def test_one_bias_for_all_rows_cannot_have_a_divisor_for_each() -> None:
    site = sites(tiny("t5"))[0]
    with pytest.raises(ValueError, match=r"one number, got a tensor of shape \(2,\)"):
        relative_bias.write(site, DistanceChange(torch.tensor([1.0, 2.0])))


@pytest.mark.parametrize("family", ["t5", "umt5", "xlnet"])
def test_a_saved_model_is_divided_again_when_it_is_loaded(family: str, tmp_path: Path) -> None:
    model = hf_posext.patch_model(tiny(family), "pi", 3, original_max_position_embeddings=32)
    after = answer(model, text())
    model.save_pretrained(tmp_path)
    loaded = hf_posext.load_pretrained(tmp_path, type(model))
    assert torch.equal(answer(loaded, text()), after)
    before = answer(tiny(family), text())
    torch.testing.assert_close(answer(hf_posext.unpatch_model(loaded), text()), before, **CLOSE)
