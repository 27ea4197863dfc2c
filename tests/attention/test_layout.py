"""The channel pairs of a head are found from what a rotation does to it, however a family keeps them."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import hf_posext
from hf_posext.attention.layout import Channels, Layout, LayoutError, fit, usual

TOKENS = 24


@dataclass(frozen=True)
class Pair:
    """Channels (first, second) become (x cos - y sin, y cos + x sin) at one frequency, on one position axis."""

    first: int
    second: int
    frequency: int
    axis: int = 0


def halves(width: int, start: int = 0) -> list[Pair]:
    half = width // 2
    return [Pair(start + i, start + half + i, i) for i in range(half)]


def side_by_side(width: int, start: int = 0) -> list[Pair]:
    return [Pair(start + 2 * i, start + 2 * i + 1, i) for i in range(width // 2)]


def sections(width: int, sizes: tuple[int, ...]) -> list[Pair]:
    """Halves in which the first frequencies follow the first axis, the next ones the second, and so on."""
    axes = [axis for axis, size in enumerate(sizes) for _ in range(size)]
    return [Pair(pair.first, pair.second, pair.frequency, axis) for pair, axis in zip(halves(width), axes, strict=True)]


def in_any_order(width: int, seed: int) -> list[Pair]:
    """Pairs anywhere in the head, each at any frequency."""
    generator = torch.Generator().manual_seed(seed)
    channels = torch.randperm(width, generator=generator).tolist()
    frequencies = torch.randperm(width // 2, generator=generator).tolist()
    return [Pair(channels[2 * i], channels[2 * i + 1], frequencies[i]) for i in range(width // 2)]


def angles_for(count: int, axes: int = 1) -> Tensor:
    """Angles [A, T, F] of F frequencies between 0 and pi at 24 tokens, whose places differ from axis to axis."""
    tokens = torch.arange(TOKENS)
    places = torch.stack((tokens, (5 * tokens + 3) % TOKENS, (7 * tokens + 1) % TOKENS))[:axes]
    return places.double()[:, :, None] * (math.pi * (torch.arange(count, dtype=torch.float64) + 0.5) / count)


def head(width: int, seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rotated(still: Tensor, pairs: list[Pair], angles: Tensor) -> Tensor:
    """Each pair as a complex number times e^(i angle); channels in no pair stay."""
    turned = still.clone()
    for pair in pairs:
        z = torch.complex(still[:, pair.first], still[:, pair.second])
        z = z * torch.polar(torch.ones(TOKENS, dtype=torch.float64), angles[pair.axis, :, pair.frequency])
        turned[:, pair.first], turned[:, pair.second] = z.real, z.imag
    return turned


def listed(channels: Channels, width: int) -> list[int]:
    return torch.arange(width)[channels].tolist()


def pairs_of(layout: Layout) -> set[Pair]:
    """What a layout says, pair by pair."""
    firsts, seconds = listed(layout.first, layout.width), listed(layout.second, layout.width)
    frequencies = list(range(len(firsts))) if layout.frequencies is None else layout.frequencies.tolist()
    axes = [0] * len(firsts) if layout.axes is None else layout.axes.tolist()
    return {Pair(*each) for each in zip(firsts, seconds, frequencies, axes, strict=True)}


KINDS: dict[str, tuple[int, list[Pair], int]] = {
    "halves": (16, halves(16), 1),
    "halves_wide": (64, halves(64), 1),
    "side_by_side": (16, side_by_side(16), 1),
    "partial_in_front": (16, halves(4), 1),
    "partial_in_front_side_by_side": (16, side_by_side(8), 1),
    "partial_behind": (32, halves(16, 16), 1),
    "partial_behind_side_by_side": (32, side_by_side(16, 16), 1),
    "three_axes": (16, sections(16, (2, 3, 3)), 3),
    "any_order": (16, in_any_order(16, 0), 1),
    "any_order_wide": (40, in_any_order(40, 1), 1),
    "one_pair": (8, [Pair(3, 5, 0)], 1),
}
"""Kind of head -> its width, its pairs and the number of position axes."""


def frequencies_in(pairs: list[Pair]) -> int:
    return max(pair.frequency for pair in pairs) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_pairs_of_a_head_are_found(kind: str, dtype: torch.dtype) -> None:
    width, pairs, axes = KINDS[kind]
    angles, still = angles_for(frequencies_in(pairs), axes), head(width)
    layout = fit("a", still.to(dtype), rotated(still, pairs, angles).to(dtype), angles)
    assert pairs_of(layout) == set(pairs)
    assert (layout.name, layout.width, layout.rotated) == ("a", width, 2 * len(pairs))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("any_order")])
def test_regular_channels_are_slices_which_give_views(kind: str) -> None:
    width, pairs, axes = KINDS[kind]
    angles, still = angles_for(frequencies_in(pairs), axes), head(width)
    layout = fit("a", still, rotated(still, pairs, angles), angles)
    assert isinstance(layout.first, slice)
    assert isinstance(layout.second, slice)
    assert layout.frequencies is None
    assert (layout.axes is not None) == (axes > 1)


def test_a_part_of_the_frequencies_may_be_in_use() -> None:
    pairs = [Pair(i, 4 + i, 2 * i + 1) for i in range(4)]
    angles, still = angles_for(8), head(16)
    assert pairs_of(fit("a", still, rotated(still, pairs, angles), angles)) == set(pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_did_not_change_has_no_layout(dtype: torch.dtype) -> None:
    still = head(16).to(dtype)
    assert fit("a", still, still.clone(), angles_for(8)) is None


def normed(states: Tensor) -> Tensor:
    """RMS norm with a weight for each channel: before a rotation harmless, behind it no rotation any more."""
    weight = 1 + 0.5 * torch.rand(states.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return states / states.square().mean(1, keepdim=True).sqrt() * weight


NO_ROTATIONS = {
    "a_norm_behind": lambda still, turned: (normed(still), normed(turned)),
    "other_states": lambda still, turned: (still, head(16, seed=7)),
    "an_offset": lambda still, turned: (still, turned + 0.3),
    "twice_the_size": lambda still, turned: (still, 2 * turned),
    "noise_of_a_tenth": lambda still, turned: (still, turned + 0.1 * head(16, seed=7)),
    "one_channel_of_a_pair": lambda still, turned: (still, torch.cat((turned[:, :12], still[:, 12:]), dim=1)),
    "channels_in_another_order": lambda still, turned: (still, turned.roll(1, dims=1)),
    "tokens_in_another_order": lambda still, turned: (still, turned.roll(1, dims=0)),
}


@pytest.mark.parametrize("kind", NO_ROTATIONS)
def test_what_is_no_rotation_of_pairs_is_refused(kind: str) -> None:
    angles, still = angles_for(8), head(16)
    before, after = NO_ROTATIONS[kind](still, rotated(still, halves(16), angles))
    with pytest.raises(LayoutError):
        fit("a", before, after, angles)


def test_a_norm_before_the_rotation_is_none_of_its_business() -> None:
    angles, still = angles_for(8), normed(head(16))
    assert pairs_of(fit("a", still, rotated(still, halves(16), angles), angles)) == set(halves(16))


@pytest.mark.parametrize(("kind", "place"), [("halves", 0), ("side_by_side", 1), ("partial_in_front", 0)])
def test_usual_layouts_are_those_that_are_found_by_watching(kind: str, place: int) -> None:
    width, pairs, _ = KINDS[kind]
    layout = usual("a", width, len(pairs))[place]
    assert pairs_of(layout) == set(pairs)
    assert (layout.name, layout.width, layout.rotated) == ("a", width, 2 * len(pairs))


def test_no_usual_layout_rotates_more_channels_than_a_head_has() -> None:
    assert usual("a", 14, 8) == []


def qwen(*silenced: int) -> Qwen3ForCausalLM:
    """A random Qwen3 whose keys have nothing in some channels of a head, as in a released Gemma-3."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=32, initializer_range=0.3, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_norm.weight[list(silenced)] = 0
    return model


@pytest.mark.parametrize("silenced", [(), (3,), (3, 11), (0, 3, 5, 13)])
def test_a_channel_without_content_hides_no_layout(silenced: tuple[int, ...]) -> None:
    """One layer, so that the last of 64 tokens must be read as by the patch with the factor 64 / 32."""
    ids = torch.randint(0, 50, (1, 64), generator=torch.Generator().manual_seed(1))
    model = qwen(*silenced)
    with torch.no_grad():
        short = model(ids[:, :32]).logits
        with hf_posext.patched(model, "yarn", 2):
            expected = model(ids).logits[:, -1]
        hf_posext.patch_model(model, "yarn", 2, dynamic=True)
        assert torch.equal(model(ids[:, :32]).logits, short)
        torch.testing.assert_close(model(ids).logits[:, -1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["self_extend", "rerope"])
def test_distances_are_remapped_though_a_channel_has_no_content(method: str) -> None:
    model = hf_posext.patch_model(qwen(3, 5), method, 2)
    assert hf_posext.inspect_model(model).record is not None
