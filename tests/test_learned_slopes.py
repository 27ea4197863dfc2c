"""ALiBi slopes as parameters: the same numbers as fixed ones, gradients of their own, saved and brought back."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_posext
from hf_posext import PatchError
from tests.architectures import ARCHITECTURE, tiny_inputs, tiny_model
from tests.host_logs import Lines
from tests.snapshots import differences, snapshot

ROWS = ["llama", "qwen3", "modernbert"]
NAME = "posext_slopes"


def learned(row: str) -> Any:
    return hf_posext.patch_model(tiny_model(row), "alibi", 2, learned=True)


def slopes(model: Any) -> dict[str, Tensor]:
    return {name: each for name, each in model.named_parameters() if name.endswith(NAME)}


@pytest.mark.parametrize("row", ROWS)
def test_before_training_they_are_the_published_ones(row: str) -> None:
    fixed = hf_posext.patch_model(tiny_model(row), "alibi", 2)
    inputs = tiny_inputs(48)
    with torch.no_grad():
        expected, found = fixed(**inputs).logits, learned(row)(**inputs).logits
    assert torch.equal(found, expected)
    torch.testing.assert_close(learned(row)(**inputs).logits, expected, rtol=0, atol=1e-4)  # the path with gradients


@pytest.mark.parametrize("row", ROWS)
def test_their_gradient_is_what_a_small_step_changes(row: str) -> None:
    model, inputs = learned(row).double(), tiny_inputs(24, batch=1)
    loss = model(**inputs).logits.square().mean()
    loss.backward()
    name, parameter = next(iter(slopes(model).items()))
    assert parameter.shape == (2, 4)
    place, step = (0, 1), 2.0**-12  # exact in float32, in which slopes are used and norms computed
    losses = []
    with torch.no_grad():
        for change in (step, -2 * step):
            parameter[place] += change
            losses.append(float(model(**inputs).logits.square().mean()))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(parameter.grad[place]), rel=5e-3), name


@pytest.mark.parametrize("row", ["llama", "modernbert"])
def test_trained_slopes_are_saved_and_brought_back_quietly(row: str, tmp_path: Path, host_logs: Lines) -> None:
    model, inputs = learned(row), tiny_inputs(48)
    with torch.no_grad():
        for each in slopes(model).values():
            each.mul_(torch.linspace(0.5, 2, each.numel()).view_as(each))
        expected = model(**inputs).logits
        model.save_pretrained(tmp_path)
        auto_class = getattr(transformers, ARCHITECTURE[row].auto_class)
        found = hf_posext.load_pretrained(tmp_path, auto_class)
        assert torch.equal(found(**inputs).logits, expected)
    assert host_logs.complaints() == []


def test_a_checkpoint_without_them_is_refused(tmp_path: Path) -> None:
    model = learned("llama")
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if NAME not in k})
    with pytest.raises(PatchError, match=r"has no `model.layers.0.self_attn.posext_slopes`"):
        hf_posext.load_pretrained(tmp_path)


@pytest.mark.parametrize("row", ROWS)
def test_unpatching_takes_them_away(row: str) -> None:
    model = tiny_model(row)
    before = snapshot(model)
    hf_posext.unpatch_model(hf_posext.patch_model(model, "alibi", 2, learned=True))
    assert differences(before, snapshot(model)) == []


def test_they_outlive_a_suspension_and_an_evaluation() -> None:
    """The same objects: an optimiser goes on with them."""
    model, inputs = learned("llama"), tiny_inputs(48)
    for each in slopes(model).values():
        each.data.fill_(0.1)
    before, parameters = model(**inputs).logits, list(slopes(model).values())
    with hf_posext.suspended(model):
        assert slopes(model) == {}
    hf_posext.perplexity(model, None, [list(range(5, 80))] * 2, context_lengths=[32, 64], targets=8)
    assert all(one is other for one, other in zip(slopes(model).values(), parameters, strict=True))
    assert torch.equal(model(**inputs).logits, before)


def test_a_model_without_its_head_gets_them_too(tmp_path: Path) -> None:
    model = learned("llama")
    for each in slopes(model).values():
        each.data.fill_(0.1)
    model.save_pretrained(tmp_path)
    found = hf_posext.load_pretrained(tmp_path, transformers.AutoModel)
    assert all(bool((each == 0.1).all()) for each in slopes(found).values())
    assert len(slopes(found)) == 2


@pytest.mark.parametrize("value", [1, "yes", None])
def test_only_true_and_false_are_taken(value: Any) -> None:
    with pytest.raises(TypeError, match=r"`learned` must be True or False"):
        hf_posext.patch_model(tiny_model("llama"), "alibi", 2, learned=value)
