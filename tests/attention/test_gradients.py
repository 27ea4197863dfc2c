"""Training with a factor that follows the length: gradients with and without checkpointing, whole and through LoRA."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import hf_posext
from hf_posext import PatchError
from tests import reference
from tests.architectures import VOCABULARY, tiny_config, tiny_inputs, tiny_model

LENGTH = 48
DEFAULT_OF_PEFT = ["q_proj", "v_proj"]
"""Where peft puts LoRA on a Llama that is given no targets."""


def stretched(row: str, method: str):
    return hf_posext.patch_model(tiny_model(row), method, 4, dynamic=True).train()


def tokens(length: int = LENGTH, seed: int = 0) -> Tensor:
    return tiny_inputs(length, seed=seed)["input_ids"]


def left_padded(ids: Tensor, count: int = 5) -> dict[str, Tensor]:
    """Inputs whose first row begins with some tokens of padding."""
    mask = torch.ones_like(ids)
    mask[0, :count] = 0
    return {"input_ids": ids, "attention_mask": mask}


def checkpoint(model) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def trainable(model) -> dict[str, Tensor]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def backward(model, inputs: dict[str, Tensor], *, between: bool = False) -> dict[str, Tensor]:
    """Gradients of the loss over a text.

    Args:
        model: in training mode.
        inputs: of the forward whose loss it is.
        between: other forwards, shorter and longer, happen before the gradients are asked for.
    """
    model.zero_grad()
    loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
    if between:
        with torch.no_grad():
            model(input_ids=tokens(20), use_cache=False)
        model(input_ids=tokens(90, seed=1), use_cache=False)
    loss.backward()
    return {name: each.grad.clone() for name, each in trainable(model).items()}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


@contextmanager
def counted(module: torch.nn.Module) -> Iterator[list[int]]:
    """Number of times that a module runs in a with-block, in a list of one entry."""
    count = [0]

    def hook(*args: object) -> None:
        count[0] += 1

    handle = module.register_forward_pre_hook(hook)
    try:
        yield count
    finally:
        handle.remove()


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left_padded"])
@pytest.mark.parametrize("method", ["yarn", "pi"])
@pytest.mark.parametrize("row", ["llama", "gpt_neox"])
def test_gradients_are_those_without_checkpointing(row: str, method: str, padded: bool) -> None:
    model = stretched(row, method)
    inputs = left_padded(tokens()) if padded else {"input_ids": tokens()}
    expected = backward(model, inputs)
    attention = next(module for name, module in model.named_modules() if name.endswith(("0.self_attn", "0.attention")))
    checkpoint(model)
    with counted(attention) as count:
        found = backward(model, inputs)
    assert count == [2]  # run again on the way back, so checkpointing is on
    assert_same_gradients(found, expected)
    assert_same_gradients(backward(model, inputs, between=True), expected)


def one_layer():
    """A Llama in which a token's logits depend on nothing but how it reads the others itself."""
    config = tiny_config("llama")
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


@pytest.mark.parametrize("method", ["pi", "yarn"])
def test_gradients_are_the_sum_over_plain_models_of_each_length(method: str) -> None:
    length, ids = 40, tokens(40)
    weight = torch.randn(2, length, VOCABULARY, generator=torch.Generator().manual_seed(0))
    model = hf_posext.patch_model(one_layer(), method, 4, dynamic=True)
    (model(input_ids=ids, use_cache=False).logits * weight).sum().backward()
    plain = one_layer()
    rotary, theta = plain.model.rotary_emb, plain.model.rotary_emb.inv_freq.clone()
    (plain(input_ids=ids[:, :32], use_cache=False).logits * weight[:, :32]).sum().backward()
    gamma = reference.ramp_over_index(16, 1e4, 32, 32, 1, True)
    for now in range(33, length + 1):
        s = now / 32
        forms = {"pi": reference.pi(16, 1e4, s), "yarn": reference.by_parts(16, 1e4, s, gamma)}
        rotary.inv_freq = torch.from_numpy(forms[method]).to(theta)
        rotary.attention_scaling = reference.yarn_attention_factor(s) if method == "yarn" else 1.0
        (plain(input_ids=ids[:, :now], use_cache=False).logits[:, -1] * weight[:, now - 1]).sum().backward()
    expected = dict(plain.named_parameters())
    for name, each in model.named_parameters():
        assert (each.grad - expected[name].grad).norm() <= 1e-5 * expected[name].grad.norm(), name


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left_padded"])
@pytest.mark.parametrize(
    "targets", [DEFAULT_OF_PEFT, ["k_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]], ids="-".join
)
def test_report_008_every_lora_weight_gets_its_gradient_with_and_without_checkpointing(
    targets: list[str], padded: bool
) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    model = get_peft_model(stretched("llama", "yarn"), config).train()
    inputs = left_padded(tokens()) if padded else {"input_ids": tokens()}
    expected = backward(model, inputs)
    assert len(expected) == 2 * 2 * len(targets)
    assert all(float(gradient.norm()) > 1e-3 for gradient in expected.values())
    checkpoint(model)
    assert_same_gradients(backward(model, inputs), expected)


@pytest.mark.parametrize("method", ["yarn", "pi"])
def test_a_model_whose_layers_get_no_keywords_refuses_checkpointing_rather_than_be_wrong(method: str) -> None:
    model = stretched("stablelm", method)
    inputs = {"input_ids": tokens()}
    expected = backward(model, inputs)
    assert all(float(gradient.norm()) > 0 for gradient in expected.values())
    checkpoint(model)
    for between in (False, True):
        with pytest.raises(PatchError, match=r"checkpointing.*dynamic=False"):
            backward(model, inputs, between=between)
