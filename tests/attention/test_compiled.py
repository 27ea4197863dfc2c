"""A factor that follows the length under `torch.compile`: one graph, right results, no compilation for every length."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, StaticCache

import hf_posext
from tests.architectures import tiny_config, tiny_inputs

LENGTH, PROMPT = 48, 46


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def stretched(layers: int = 1):
    config = tiny_config("llama")
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return hf_posext.patch_model(model, "yarn", 4, dynamic=True)


def tokens(length: int = LENGTH) -> Tensor:
    return tiny_inputs(length)["input_ids"]


def cache_name(model: Any) -> str:
    """The keyword of the cache, which transformers has renamed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def check_one_graph(model: Any, backend: str) -> None:
    """One pass and steps with a static cache, compiled without a break, against the model as it is."""
    ids = tokens()
    expected = model(ids, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, expected, rtol=0, atol=1e-4)
    cache = {cache_name(model): StaticCache(config=model.config, max_cache_len=64)}
    model(ids[:, :PROMPT], **cache)
    steps = [compiled(ids[:, place : place + 1], **cache).logits for place in range(PROMPT, LENGTH)]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected[:, PROMPT:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_report_053_one_graph(backend: str) -> None:
    check_one_graph(stretched(), backend)


@torch.no_grad()
def test_report_053_no_compilation_for_every_length() -> None:
    """At most two again for 32, 48 and 64 tokens, and none for any length after these."""
    model, counter = stretched(), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    for length in (32, 48, 64, 56):
        found = compiled(tokens(length), use_cache=False).logits
        torch.testing.assert_close(found, model(tokens(length), use_cache=False).logits, rtol=0, atol=1e-4)
    assert counter.frame_count <= 3


@torch.no_grad()
def test_report_092_more_layers_are_not_compiled_more_often() -> None:
    """Every layer on its own, as in regional compilation: no guard on what differs from layer to layer."""
    counts = {}
    for layers in (2, 3):  # the second one finds tables that the first has made
        model, counter = stretched(layers), CompileCounterWithBackend("eager")
        expected = model(tokens(), use_cache=False).logits
        for layer in model.model.layers:
            layer.compile(backend=counter)
        torch.testing.assert_close(model(tokens(), use_cache=False).logits, expected, rtol=0, atol=1e-4)
        counts[layers] = counter.frame_count
        torch._dynamo.reset()
    assert counts[2] == counts[3]
