"""Angles by hand, and rotations against those of Llama, GPT-NeoX and GPT-J."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as rotate_neox
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_gptj
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_llama

from hf_posext.functional import apply_rotary, rotary_angles


def test_angles_are_position_times_frequency() -> None:
    places = torch.tensor([[0, 1, 3_001], [7, 65_535, 1_000_000]])
    numbers = [[[int(p) * 500.0 ** (-2 * i / 12) / 2.5 for i in range(6)] for p in row] for row in places]
    expected = torch.tensor(numbers, dtype=torch.float64)
    angles = rotary_angles(places, 12, base=500.0, factor=2.5)
    assert angles.dtype == torch.float32
    torch.testing.assert_close(angles.double(), expected, rtol=2**-24, atol=0)  # one rounding
    wide = rotary_angles(places, 12, base=500.0, factor=2.5, dtype=torch.float64)
    torch.testing.assert_close(wide, expected, rtol=1e-15, atol=0)


def test_given_frequencies_replace_the_geometric_ones() -> None:
    inv_freq = torch.tensor([1.0, 0.25, 0.0])
    angles = rotary_angles(torch.tensor([4.5]), 6, inv_freq=inv_freq, factor=2)
    assert torch.equal(angles, torch.tensor([[2.25, 0.5625, 0.0]]))
    assert torch.equal(inv_freq, torch.tensor([1.0, 0.25, 0.0]))


def test_a_count_stands_for_its_positions() -> None:
    assert torch.equal(rotary_angles(9, 4), rotary_angles(torch.arange(9), 4))


@pytest.mark.parametrize(
    ("positions", "options", "message"),
    [
        (torch.zeros(2, dtype=torch.float16), {}, "`positions` must be .*got torch.float16"),
        (torch.zeros(2, dtype=torch.bool), {}, "`positions` must be .*got torch.bool"),
        (4, {"width": 5}, "`width` must be even.* got 5"),
        (4, {"dtype": torch.bfloat16}, "`dtype` must be torch.float32 or torch.float64, got torch.bfloat16"),
        (4, {"inv_freq": torch.ones(3)}, r"\[2\] for a `width` of 4, got \[3\]"),
        (4, {"inv_freq": torch.ones(2).half()}, "`inv_freq` must be .*got torch.float16"),
        (4, {"factor": 0}, "`factor` must be a finite number > 0, got 0"),
    ],
)
def test_bad_arguments_of_angles_are_refused(positions: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        rotary_angles(positions, **{"width": 4, **options})


def states_and_angles(width: int, rotated: int) -> tuple[Tensor, Tensor]:
    """States [2, 3, 5, width], and angles [2, 1, 5, rotated / 2] of rows that begin at other positions."""
    places = torch.tensor([[0, 1, 2, 3, 4], [90, 91, 92, 93, 94]])
    return torch.randn(2, 3, 5, width), rotary_angles(places, rotated)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rotate", "rotated"), [(rotate_llama, 8), (rotate_neox, 8), (rotate_neox, 4)])
def test_rotation_in_halves_is_that_of_llama_and_gpt_neox(rotate: Any, rotated: int, dtype: torch.dtype) -> None:
    states, angles = states_and_angles(8, rotated)
    states = states.to(dtype)
    twice = torch.cat((angles, angles), -1)[:, 0].to(dtype)
    theirs, _ = rotate(states, states, twice.cos() * 1.1, twice.sin() * 1.1)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(apply_rotary(states, angles, scaling=1.1), theirs, rtol=4 * eps, atol=4 * eps)


def test_interleaved_rotation_is_that_of_gptj() -> None:
    states, angles = states_and_angles(8, 6)
    rows = states.transpose(1, 2)  # GPT-J rotates before heads come to the front
    theirs = rotate_gptj(rows[..., :6], angles[:, 0].sin(), angles[:, 0].cos()).transpose(1, 2)
    turned = apply_rotary(states, angles, layout="interleaved")
    torch.testing.assert_close(turned[..., :6], theirs)
    assert torch.equal(turned[..., 6:], states[..., 6:])


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_scores_depend_on_the_distance_alone(layout: str) -> None:
    query, key = torch.randn(2, 1, 16, dtype=torch.float64)
    places = torch.tensor([0, 3, 1_000, 100_003])

    def score(ahead: int) -> Tensor:
        turned = [
            apply_rotary(states.expand(4, 16), rotary_angles(at, 16, dtype=torch.float64), layout=layout)
            for states, at in ((query, places + ahead), (key, places))
        ]
        return (turned[0] * turned[1]).sum(-1)

    # angles of 1e5 radians are rounded to 1e-11
    torch.testing.assert_close(score(7), score(7)[:1].expand(4), rtol=0, atol=1e-9)
    assert (score(7)[0] - score(8)[0]).abs() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states_are_turned_in_float32_and_keep_their_dtype(dtype: torch.dtype) -> None:
    states, _ = states_and_angles(8, 6)
    angles = rotary_angles(torch.arange(3_001, 3_006), 6)
    turned = apply_rotary(states.to(dtype), angles, scaling=1.2)
    assert turned.dtype == dtype
    assert torch.equal(turned, apply_rotary(states.to(dtype).float(), angles, scaling=1.2).to(dtype))


def test_what_is_given_stays_as_it_is_and_gradients_come_back() -> None:
    states, angles = states_and_angles(8, 4)
    before, angles_before = states.clone(), angles.clone()
    states.requires_grad_()
    turned = apply_rotary(states, angles)
    turned.square().sum().backward()  # a rotation keeps lengths, so the gradient is twice the states
    torch.testing.assert_close(states.grad, 2 * before)
    assert torch.equal(states.detach(), before)
    assert torch.equal(angles, angles_before)
    assert apply_rotary(before, angles * 0).data_ptr() != before.data_ptr()


@pytest.mark.parametrize(
    ("states", "angles", "message"),
    [
        ((2, 3, 5, 8), (2, 5, 4), r"\[2, 5, 4\] do not fit .*`angles\[:, None\]`"),
        ((3, 3, 5, 8), (3, 5, 4), r"do not fit `states` of the shape \[3, 3, 5, 8\]"),
        ((5, 8), (2, 5, 4), "do not fit"),
        ((5, 8), (6, 4), "do not fit"),
        ((5, 8), (5, 5), r"2F <= D .*got \[5, 5\] for \[5, 8\]"),
        ((5, 8), (4,), "must have the shape"),
    ],
)
def test_angles_that_do_not_fit_are_refused(states: tuple[int, ...], angles: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_rotary(torch.zeros(states), torch.zeros(angles))
