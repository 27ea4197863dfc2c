"""bf16: keys are rounded when cached and when read, so a long generation is as near to one pass as it always was."""

import functools
import inspect

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_posext
from tests.architectures import DECODER, FIRST_TEXT_TOKEN, VOCABULARY

TRAINED, PROMPT, LENGTH, FACTOR = 256, 100, 1100, 8
ALLOWED = 1.5
"""How many times the distance of a model without dynamic scaling."""
ARMS = {"unpatched": None, "fixed": False, "dynamic": True}
"""Arm -> whether its factor follows the length; None for no patch."""


def build(arm: str, initializer_range: float):
    """A tiny bf16 Llama with N = 256, of the same weights for every arm."""
    settings = {**DECODER, "max_position_embeddings": TRAINED, "initializer_range": initializer_range}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval().to(torch.bfloat16)
    if ARMS[arm] is not None:
        hf_posext.patch_model(model, "yarn", FACTOR, dynamic=ARMS[arm])
    return model


@functools.cache
@torch.inference_mode()
def distance(arm: str, initializer_range: float) -> tuple[float, float]:
    """Largest and root mean square difference of the logits between a thousand cached steps and one pass."""
    model = build(arm, initializer_range)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(FIRST_TEXT_TOKEN, VOCABULARY, (1, LENGTH), generator=generator)
    whole = model(ids, use_cache=False).logits[:, PROMPT:]
    cache = {name: DynamicCache(config=model.config)}
    model(ids[:, :PROMPT], **cache)
    steps: list[Tensor] = [model(ids[:, at : at + 1], **cache).logits for at in range(PROMPT, LENGTH)]
    difference = torch.cat(steps, dim=1).double() - whole.double()
    return float(difference.abs().max()), float(difference.square().mean().sqrt())


@pytest.mark.parametrize(("initializer_range", "other"), [(0.1, "fixed"), (0.3, "fixed"), (0.3, "unpatched")])
def test_a_thousand_cached_steps_are_as_near_to_one_pass_as_without_dynamic_scaling(
    initializer_range: float, other: str
) -> None:
    largest, typical = distance("dynamic", initializer_range)
    allowed = distance(other, initializer_range)
    assert 0 < largest <= ALLOWED * allowed[0]
    assert 0 < typical <= ALLOWED * allowed[1]
