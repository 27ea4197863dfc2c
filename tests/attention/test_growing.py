"""A cache layer with room, against the layer of transformers that copies everything for every token."""

import copy
import pickle
import random

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_posext.attention.growing import GrowingLayer, let_grow
from tests.architectures import tiny_config

HEADS, WIDTH = 2, 4
Both = tuple[GrowingLayer, DynamicLayer]


def states(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """New keys and values; the values are narrower, as under MLA."""
    return torch.randn(batch, HEADS, length, WIDTH), torch.randn(batch, HEADS, length, WIDTH - 1)


def assert_same(pair: Both) -> None:
    mine, plain = pair
    assert mine.get_seq_length() == plain.get_seq_length()
    assert mine.get_mask_sizes(3) == plain.get_mask_sizes(3)
    for name in ("keys", "values"):
        left, right = getattr(mine, name), getattr(plain, name)
        assert (left is None) == (right is None)
        if right is not None:
            assert left.shape == right.shape
            assert torch.equal(left, right)


def change_at_random(pair: Both, draw: random.Random) -> list[Tensor]:
    """One random change of both layers; what `update` returned, if it was one."""
    batch = pair[0].keys.shape[0] if pair[0].get_seq_length() else 2
    length = pair[0].get_seq_length()
    kind = draw.choice(["update"] * 6 + ["crop", "reorder", "select", "repeat", "replace", "reset"])
    if kind == "update" or not length:
        new = states(batch, draw.choice([1, 1, 1, 2, 17, 90]))
        results = [layer.update(*new) for layer in pair]
        for left, right in zip(*results, strict=True):
            assert torch.equal(left, right)
        return list(results[0])
    rows = torch.tensor([draw.randrange(batch) for _ in range(draw.choice([1, 2, batch]))])
    for layer in pair:
        if kind == "crop":
            layer.crop(-min(length, 1 + length // 3))
        elif kind == "reorder":
            layer.reorder_cache(rows.repeat(batch)[:batch])
        elif kind == "select":
            layer.batch_select_indices(rows)
        elif kind == "repeat" and batch < 5:
            layer.batch_repeat_interleave(2)
        elif kind == "replace":
            layer.keys, layer.values = layer.keys[:, :, : length // 2 + 1], layer.values[:, :, : length // 2 + 1]
        elif kind == "reset" and length > 100:
            layer.reset()
    return []


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_changes_gives_what_the_plain_layer_gives(seed: int) -> None:
    """Copies go on beside their original, and whatever was handed out once never changes."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    pairs: list[Both] = [(GrowingLayer(), DynamicLayer())]
    handed_out: list[tuple[Tensor, Tensor]] = []
    for _ in range(150):
        pair = draw.choice(pairs)
        handed_out += [(each, each.clone()) for each in change_at_random(pair, draw)]
        if draw.random() < 0.1:
            how = draw.choice([copy.copy, copy.deepcopy])
            pairs = [*pairs[-3:], (how(pair[0]), how(pair[1]))]
        for each in pairs:
            assert_same(each)
        for view, kept in handed_out[-60:]:
            assert torch.equal(view, kept)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_that_part_do_not_disturb_each_other(how) -> None:
    first, plain_first = GrowingLayer(), DynamicLayer()
    for length in (10, 1, 1):
        new = states(2, length)
        first.update(*new), plain_first.update(*new)
    second, plain_second = how(first), copy.deepcopy(plain_first)
    for _ in range(3):
        for mine, plain in ((first, plain_first), (second, plain_second)):
            new = states(2, 1)
            mine.update(*new), plain.update(*new)
            assert_same((first, plain_first))
            assert_same((second, plain_second))


def test_a_cache_copied_for_every_beam_of_a_tree_keeps_each_branch() -> None:
    root = GrowingLayer()
    for length in (5, 1):
        root.update(*states(1, length))
    prefix = root.keys.clone()
    branches = [copy.copy(root) for _ in range(4)]
    tails = [states(1, 1) for _ in branches]
    for branch, tail in zip(branches, tails, strict=True):
        branch.update(*tail)
    for branch, tail in zip(branches, tails, strict=True):
        assert torch.equal(branch.keys, torch.cat((prefix, tail[0]), dim=2))


@pytest.mark.parametrize("prompt", [1, 100, 1000, 5000])
def test_the_room_is_a_sixteenth_or_64_tokens(prompt: int) -> None:
    layer = GrowingLayer()
    layer.update(*states(1, prompt))
    for _ in range(400):
        keys, values = layer.update(*states(1, 1))
        tokens = keys.shape[2]
        for each in (keys, values):
            capacity = each.untyped_storage().nbytes() / (4 * HEADS * each.shape[3])
            assert capacity <= 1.07 * tokens + 64


def test_tokens_are_copied_seldom() -> None:
    layer = GrowingLayer()
    layer.update(*states(1, 2000))
    places = {layer.update(*states(1, 1))[0].data_ptr() for _ in range(1000)}
    assert len(places) <= 10


def test_gradients_flow_as_through_the_plain_layer() -> None:
    grown, plain = [], []
    for layer, kept in ((GrowingLayer(), grown), (DynamicLayer(), plain)):
        torch.manual_seed(0)
        for _ in range(4):
            new = [each.requires_grad_() for each in states(1, 2)]
            kept += new
            keys, values = layer.update(*new)
        (keys.square().sum() + (values**3).sum()).backward()
    for mine, theirs in zip(grown, plain, strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_learned_prefix_gets_its_gradient_over_several_steps() -> None:
    """Prefix tuning: the cached keys are learned, those of the frozen model are not."""
    gradients = []
    for kind in (GrowingLayer, DynamicLayer):
        torch.manual_seed(0)
        prefix = [each.requires_grad_() for each in states(1, 3)]
        layer, loss = kind(), torch.zeros(())
        layer.update(*prefix)
        for _ in range(3):
            keys, values = layer.update(*states(1, 1))
            loss = loss + keys.square().sum() + (values**3).sum()
        loss.backward()
        gradients.append([each.grad for each in prefix])
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_cache_filled_in_inference_mode_goes_on_outside_of_it() -> None:
    torch.manual_seed(0)
    pair = GrowingLayer(), DynamicLayer()
    with torch.inference_mode():
        for length in (5, 1):
            new = states(1, length)
            for layer in pair:
                layer.update(*new)
    new = states(1, 1)
    with torch.no_grad():
        for layer in pair:
            layer.update(*new)
    assert_same(pair)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_room_is_given_to_plain_dynamic_layers_alone(dtype: torch.dtype) -> None:
    dynamic, sliding = DynamicCache(config=tiny_config("llama")), DynamicCache(config=tiny_config("mistral_sliding"))
    static = StaticCache(config=tiny_config("llama"), max_cache_len=16)
    kinds = [type(layer) for layer in static.layers]
    for cache in (dynamic, sliding, static, None, ((torch.ones(1), torch.ones(1)),)):
        let_grow(cache)
    assert {type(layer) for layer in dynamic.layers} == {GrowingLayer}
    assert {type(layer) for layer in sliding.layers} == {DynamicSlidingWindowLayer}
    assert [type(layer) for layer in static.layers] == kinds
    key, value = states(1, 3)
    dynamic.update(key.to(dtype), value.to(dtype), 0)
    for _ in range(3):
        keys, _ = dynamic.update(key.to(dtype), value.to(dtype), 0)
    assert keys.dtype is dtype
    assert dynamic.get_seq_length() == 12
