"""Kernels of GPUs for linear biases, as far as they can be tried without one: what they are asked for, and Flex."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from hf_posext.attention import gpu
from hf_posext.attention.interface import Call

SLOPES = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-1])


def call_of(length: int, keys: int, dtype: torch.dtype = torch.float32) -> Call:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, length, 16, generator=generator).to(dtype)
    key, value = (torch.randn(2, 2, keys, 16, generator=generator).to(dtype) for _ in range(2))
    module: Any = SimpleNamespace(training=False)
    return Call(lambda *_, **__: (query, None), module, query, key, value, None, {})


def reference(call: Call, scale: float, before: Tensor, after: Tensor, is_causal: bool) -> Tensor:
    """The same in float64 with the whole bias, [B, H, L, D]."""
    query, key, value = call.query.double(), *(each.double().repeat_interleave(2, 1) for each in (call.key, call.value))
    length, keys = query.shape[2], key.shape[2]
    distance = (torch.arange(length)[:, None] + keys - length - torch.arange(keys)).double()
    bias = torch.where(distance >= 0, -before[:, None, None] * distance, after[:, None, None] * distance)
    logits = query @ key.mT * scale + bias
    if is_causal:
        logits = logits.masked_fill(distance < 0, -torch.inf)
    return logits.softmax(-1) @ value


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("length", "keys", "is_causal"), [(12, 12, True), (5, 12, True), (1, 12, True), (12, 12, False)]
)
def test_flex_attention_adds_the_bias(length: int, keys: int, is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def uncompiled(*args: Any, training: bool, **options: Any) -> Any:
        return flex_attention(*args, **options)

    monkeypatch.setattr(gpu, "compile_friendly_flex_attention", uncompiled)
    call, after = call_of(length, keys), SLOPES.flip(0)
    found = gpu.flex_linear(call, 0.3, SLOPES, after, is_causal)
    expected = reference(call, 0.3, SLOPES.double(), after.double(), is_causal)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("is_causal", [True, False])
def test_flash_attention_is_given_slopes_in_float32_and_its_own_layout(
    is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def flash_attn_func(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen.update(options, shapes=(query.shape, key.shape, value.shape))
        return query

    package = ModuleType("flash_attn")
    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    call = call_of(5, 12, torch.bfloat16)
    assert torch.equal(gpu.flash_linear(call, 0.3, SLOPES, is_causal), call.query)
    assert seen["shapes"] == ((2, 5, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16))
    assert (seen["softmax_scale"], seen["causal"]) == (0.3, is_causal)
    assert seen["alibi_slopes"].dtype == torch.float32
    assert torch.equal(seen["alibi_slopes"], SLOPES)


@pytest.mark.parametrize(
    ("dtype", "installed", "expected"),
    [(torch.bfloat16, True, True), (torch.float32, True, False), (torch.bfloat16, False, False)],
)
def test_flash_attention_is_asked_only_where_it_can_answer(
    dtype: torch.dtype, installed: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "is_flash_attn_2_available", lambda: installed)
    assert gpu.has_flash(call_of(4, 4, dtype)) is expected
