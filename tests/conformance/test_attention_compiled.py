"""Invariant 9 for methods that act in attention: `torch.compile` makes one graph of a patched model, a right one."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hf_posext import PatchError, unpatch_model
from tests.dynamic import CACHES, assert_close, cache_name, has_cache, in_pieces, text, whole
from tests.in_attention import make, named, patch, text_for

COMPILED = [
    ("llama", "alibi"),
    ("llama", "self_extend_uneven"),
    ("modernbert", "leaky_rerope"),
    ("bert", "alibi"),
]


def one_layer(row: str, kind: str) -> Any:
    """A patched model with the first layer alone."""
    model = make(row)
    for name, module in model.named_modules():
        if name.endswith((".layers", ".layer")):
            del module[1:]
    model.config.num_hidden_layers = 1
    return patch(model, kind)


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("row", "kind"), named(COMPILED))
def test_a_patched_model_compiles_as_one_graph(row: str, kind: str) -> None:
    """One pass, and steps with a static cache."""
    model, tokens, counter = one_layer(row, kind), text_for(row, kind), CompileCounterWithBackend("eager")
    expected = whole(model, tokens)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=counter)
    assert_close(whole(compiled, tokens), expected)
    assert counter.frame_count == 1
    if not has_cache(model):
        return
    held = CACHES["static"](model, 48)
    in_pieces(model, tokens[:, :45], [45], held)
    found = [compiled(tokens[:, place : place + 1], **{cache_name(model): held}).logits for place in range(45, 48)]
    assert_close(torch.cat(found, 1), expected[:, 45:])


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
def test_padded_rows_are_right_in_a_traced_graph() -> None:
    model, tokens = one_layer("llama", "window_sinks"), text(batch=2)
    mask = torch.ones_like(tokens)
    mask[0, :13] = 0
    inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    found = whole(torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager"), tokens, **inputs)
    assert_close(found[mask.bool()], whole(model, tokens, **inputs)[mask.bool()])


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
def test_a_group_that_follows_the_length_is_not_compiled() -> None:
    compiled = torch.compile(one_layer("llama", "self_extend_dynamic"), fullgraph=True, dynamic=False, backend="eager")
    refused = PatchError, torch._dynamo.exc.Unsupported  # what a compiler makes of an error while it traces
    with pytest.raises(refused, match=r"group_size.*dynamic"):
        whole(compiled, text())


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_graph_does_not_outlive_the_patch() -> None:
    model = unpatch_model(one_layer("llama", "alibi"))
    before = whole(model, text(20))
    compiled = torch.compile(model, dynamic=False, backend="eager")
    assert_close(whole(compiled, text(20)), before)
    patch(model, "alibi")
    assert_close(whole(compiled, text(20)), whole(model, text(20)))
    unpatch_model(model)
    assert_close(whole(compiled, text(20)), before)
