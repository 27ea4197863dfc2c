"""Turning queries and keys on, against complex numbers in double precision."""

import pytest
import torch
from torch import Tensor

from hf_posext.attention import turning
from hf_posext.attention.layout import Layout

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 11, 16
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
FLOAT32_ERROR = 4e-6  # of a sum of two products of numbers up to 5


def layout(first: slice | Tensor, second: slice | Tensor, rotated: int) -> Layout:
    return Layout("a", first, second, None, None, WIDTH, rotated)


LAYOUTS = {
    "halves": layout(slice(0, 8, 1), slice(8, 16, 1), 16),
    "side_by_side": layout(slice(0, 15, 2), slice(1, 16, 2), 16),
    "partial_in_front": layout(slice(0, 2, 1), slice(2, 4, 1), 4),
    "partial_behind": layout(slice(8, 12, 1), slice(12, 16, 1), 8),
    "one_pair": layout(slice(3, 4), slice(5, 6), 2),
    "any_order": layout(torch.tensor([3, 9, 0]), torch.tensor([4, 1, 15]), 6),
}


def states(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(BATCH, HEADS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


def table(pairs: int, batch: int = BATCH, amplitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, L, P] float32 of angles of any size."""
    angles = 30 * torch.randn(batch, 1, TOKENS, pairs, generator=torch.Generator().manual_seed(1))
    return amplitude * angles.cos(), amplitude * angles.sin()


def exact(given: Tensor, cosine: Tensor, sine: Tensor, where: Layout) -> Tensor:
    """The same in complex128."""
    given = given.double()
    result = given.clone()
    turned = torch.complex(given[..., where.first], given[..., where.second])
    turned = turned * torch.complex(cosine.double(), sine.double())
    result[..., where.first], result[..., where.second] = turned.real, turned.imag
    return result


@pytest.mark.parametrize("into", [False, True], ids=["expression", "into_memory"])
@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("amplitude", [1.0, 1.3])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_turn_is_a_product_of_complex_numbers(kind: str, amplitude: float, batch: int, into: bool) -> None:
    given = states()
    where = LAYOUTS[kind]
    cosine, sine = table(where.rotated // 2, batch, amplitude)
    out = torch.full_like(given, torch.nan) if into else None
    result = turning.turn(given, cosine, sine, where, out)
    torch.testing.assert_close(result.double(), exact(given, cosine, sine, where), rtol=0, atol=FLOAT32_ERROR)
    assert torch.equal(given, states())


@pytest.mark.parametrize("into", [False, True], ids=["expression", "into_memory"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_half_precision_is_rounded_once(kind: str, dtype: torch.dtype, into: bool) -> None:
    given, where = states(dtype), LAYOUTS[kind]
    cosine, sine = table(where.rotated // 2)
    result = turning.turn(given, cosine, sine, where, torch.empty_like(given) if into else None)
    expected = exact(given, cosine, sine, where)
    assert result.dtype is dtype
    assert ((result.double() - expected).abs() <= torch.finfo(dtype).eps / 2 * expected.abs() + FLOAT32_ERROR).all()
    apart = (result.view(BITS[dtype]).int() - expected.to(dtype).view(BITS[dtype]).int()).abs()
    large = expected.abs() > FLOAT32_ERROR / torch.finfo(dtype).eps  # nearer to 0, float32 itself has no more digits
    assert int(apart[large].max()) <= 1
    assert float((apart[large] > 0).double().mean()) < 0.01


@pytest.mark.parametrize("chunk", [1, 200, turning.CHUNK])
@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("kind", LAYOUTS)
def test_into_memory_is_the_expression_up_to_the_rounding_of_a_product(
    kind: str, dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`addcmul` may round a product and a sum together, so the last bit of float32 may differ."""
    monkeypatch.setattr(turning, "CHUNK", chunk)  # how many heads go at once
    given, where = states(dtype), LAYOUTS[kind]
    cosine, sine = table(where.rotated // 2, amplitude=1.3)
    out = torch.full_like(given, torch.nan)
    result, expected = turning.turn(given, cosine, sine, where, out), turning.turn(given, cosine, sine, where)
    largest = 1.3 * float(given.double().abs().max())
    error = torch.finfo(dtype).eps * expected.double().abs() * (dtype != torch.float32)
    assert ((result.double() - expected.double()).abs() <= error + torch.finfo(torch.float32).eps * largest).all()


@pytest.mark.parametrize("into", [False, True], ids=["expression", "into_memory"])
@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("kind", LAYOUTS)
def test_no_angle_and_no_amplitude_give_every_bit_back(kind: str, dtype: torch.dtype, into: bool) -> None:
    given, where = states(dtype), LAYOUTS[kind]
    ones = torch.ones(1, 1, TOKENS, where.rotated // 2)
    out = torch.empty_like(given) if into else None
    result = turning.turn(given, ones, torch.zeros_like(ones), where, out)
    assert torch.equal(result.view(BITS[dtype]), given.view(BITS[dtype]))


@pytest.mark.parametrize("into", [False, True], ids=["expression", "into_memory"])
def test_states_need_not_be_contiguous(into: bool) -> None:
    where = LAYOUTS["halves"]
    given = states().transpose(1, 2).contiguous().transpose(1, 2)  # [B, H, L, D] as attention modules hand it over
    cosine, sine = table(8)
    out = torch.empty_like(given, memory_format=torch.contiguous_format) if into else None
    assert not given.is_contiguous()
    result = turning.turn(given, cosine, sine, where, out)
    torch.testing.assert_close(result.double(), exact(given, cosine, sine, where), rtol=0, atol=FLOAT32_ERROR)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_gradients_are_those_of_the_complex_product(kind: str) -> None:
    where = LAYOUTS[kind]
    cosine, sine = table(where.rotated // 2, amplitude=1.3)
    weight = torch.randn(BATCH, HEADS, TOKENS, WIDTH)
    given, same = states().requires_grad_(), states().double().requires_grad_()
    (turning.turn(given, cosine, sine, where) * weight).sum().backward()
    (exact(same, cosine, sine, where) * weight).sum().backward()
    torch.testing.assert_close(given.grad.double(), same.grad, rtol=0, atol=FLOAT32_ERROR)
