"""`relative_bias`: nothing changes while the bias is zero; what it says then is T5's formula, and can be trained."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posext import PatchError, patch_model, record_of
from hf_posext.attention.biased import ByDistance
from hf_posext.contract import BucketedBias, PositionTable
from hf_posext.methods import get_method
from tests import special_models
from tests.architectures import TRAINED_LENGTH
from tests.bucketed import (
    CAUSAL,
    FACTOR,
    FAMILIES,
    biases,
    layoutlm,
    padded_text,
    share_one_bias,
    tiled,
    trained,
    untrained,
    written_out,
)
from tests.dynamic import CACHES, assert_close, in_pieces, positions, steps, text, whole
from tests.snapshots import differences, snapshot

LONG = FACTOR * TRAINED_LENGTH
EXACT = 1e-9
IMPLEMENTATIONS = ("sdpa", "eager")
BIAS = 2 * torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("row", FAMILIES)
def test_a_zero_bias_changes_no_bit_of_short_text_and_leaves_the_longer_table_alone(
    row: str, implementation: str
) -> None:
    model, plain, longer = untrained(row), FAMILIES[row](), tiled(row, torch.float32)
    for each in (model, plain, longer):
        each.set_attn_implementation(implementation)
    for length in (1, 9, TRAINED_LENGTH):
        assert torch.equal(whole(model, text(length, batch=2)), whole(plain, text(length, batch=2)))
    tokens, mask = padded_text(TRAINED_LENGTH, "right")
    assert torch.equal(whole(model, tokens, attention_mask=mask), whole(plain, tokens, attention_mask=mask))
    assert torch.equal(whole(model, text(LONG)), whole(longer, text(LONG)))


def test_a_zero_bias_changes_no_bit_of_decoding() -> None:
    sizes, tokens = steps(20, TRAINED_LENGTH), text(TRAINED_LENGTH)
    models = untrained("gpt2"), FAMILIES["gpt2"]()
    assert torch.equal(*(in_pieces(each, tokens, sizes, CACHES["dynamic"](each, 32)) for each in models))


def test_calls_are_passed_on_as_they_are_while_the_bias_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every device, also where another kernel than the model's own gives other bits."""
    silent, speaking, tokens = untrained("bert"), trained("bert"), text(20)
    monkeypatch.setattr(ByDistance, "attend", lambda self, call: pytest.fail("attention is computed here"))
    whole(silent, tokens)
    with pytest.raises(pytest.fail.Exception):
        whole(speaking, tokens)


def test_a_zero_bias_that_is_not_trained_leaves_gradients_as_they_are() -> None:
    model, plain = untrained("bert"), FAMILIES["bert"]()
    for each in biases(model).values():
        each.requires_grad_(False)
    for each in (model, plain):
        each(text(20)).logits.square().mean().backward()
    expected = {name: each.grad for name, each in plain.named_parameters() if "position" not in name}
    found = dict(model.named_parameters())
    assert [name for name in expected if not torch.equal(found[name].grad, expected[name])] == []


def test_hierarchical_rows_are_those_of_the_method_of_that_name() -> None:
    model, longer = untrained("bert", table="hierarchical"), patch_model(FAMILIES["bert"](), "hierarchical", FACTOR)
    assert torch.equal(whole(model, text(LONG)), whole(longer, text(LONG)))
    assert not torch.equal(whole(model, text(LONG)), whole(untrained("bert"), text(LONG)))


@pytest.mark.parametrize("table", ["tile", "hierarchical"])
def test_the_change_is_that_of_another_method_with_sizes_of_buckets(table: str) -> None:
    rows = torch.randn(6, 3, dtype=torch.float64)
    reading = PositionTable(rows, 0, 20)
    found = get_method("relative_bias").change("learned", reading, 3.0, 3.0, {"table": table, "frozen_rows": True})
    expected = get_method(table).change("learned", reading, 3.0, 3.0, {})
    assert isinstance(found, BucketedBias)
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.rows[:6], rows)
    assert torch.equal(found.old, expected.old)
    assert found.keeps_short
    assert (found.freezes_old, expected.freezes_old, found.is_fixed) == (True, False, False)
    assert (found.buckets, found.max_distance) == (32, 128)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("row", FAMILIES)
def test_a_bias_is_what_the_same_numbers_in_a_mask_are(row: str, implementation: str) -> None:
    model, expected = share_one_bias(untrained(row).double(), BIAS), tiled(row)
    for each in (model, expected):
        each.set_attn_implementation(implementation)
    tokens = text(LONG, batch=2)
    mask = written_out(BIAS, torch.arange(LONG)[None], row in CAUSAL)
    assert_close(whole(model, tokens), whole(expected, tokens, attention_mask=mask), EXACT)


@pytest.mark.parametrize("row", ["bert", "gpt2"])
def test_other_numbers_of_buckets_and_distances(row: str) -> None:
    bias = BIAS[:10]
    model = share_one_bias(untrained(row, buckets=10, max_distance=40).double(), bias)
    mask = written_out(bias, torch.arange(LONG)[None], row in CAUSAL, num_buckets=10, max_distance=40)
    assert_close(whole(model, text(LONG)), whole(tiled(row), text(LONG), attention_mask=mask), EXACT)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("row", ["bert", "gpt2"])
def test_padding_has_no_distance(row: str, side: str) -> None:
    model, (tokens, mask) = share_one_bias(untrained(row).double(), BIAS), padded_text(60, side)
    places = positions(mask)
    found = whole(model, tokens, attention_mask=mask, position_ids=places)
    full = written_out(BIAS, places, row in CAUSAL, mask)
    expected = whole(tiled(row), tokens, attention_mask=full, position_ids=places)
    assert_close(found[mask.bool()], expected[mask.bool()], EXACT)
    alone = whole(model, tokens[:1][mask[:1].bool()][None])
    assert_close(found[:1][mask[:1].bool()], alone[0], EXACT)


@pytest.mark.parametrize("row", ["bert", "gpt2"])
def test_positions_with_gaps_are_taken_as_they_are(row: str) -> None:
    gaps = torch.tensor([[1, 1, 3, 1, 1, 2] * 8, [2, 1, 1, 5, 1, 1] * 8])
    places, tokens = gaps.cumsum(1) - gaps[:, :1], text(48, batch=2)
    model = share_one_bias(untrained(row).double(), BIAS)
    found = whole(model, tokens, attention_mask=torch.ones_like(tokens), position_ids=places)
    mask = written_out(BIAS, places, row in CAUSAL)
    assert_close(found, whole(tiled(row), tokens, attention_mask=mask, position_ids=places), EXACT)


def test_a_mask_of_four_axes_still_hides_what_it_hides() -> None:
    model, tokens = trained("bert"), text(48)
    seen = torch.ones(1, 1, 48, 48, dtype=torch.bool)
    seen[..., 10:, 9] = seen[..., :9, 9] = False
    other = tokens.clone()
    other[0, 9] = (tokens[0, 9] + 7) % 90 + 5
    one, two = (whole(model, each, attention_mask=seen) for each in (tokens, other))
    kept = torch.arange(48) != 9
    assert_close(one[:, kept], two[:, kept])
    assert not torch.allclose(one[:, 9], two[:, 9], atol=0.1)


@pytest.mark.parametrize("row", ["bert", "gpt2"])
def test_long_text_is_read_in_blocks_as_by_eager_attention(row: str) -> None:
    """More than one block of queries, on the way for masks that say nothing and on that for all others."""
    model = patch_model(FAMILIES[row](), "relative_bias", 20)
    share_one_bias(model, BIAS)
    tokens, mask = text(600, batch=2), torch.ones(2, 600, dtype=torch.int64)
    mask[0, 590:] = 0
    found = whole(model, tokens), whole(model, tokens, attention_mask=mask)
    model.set_attn_implementation("eager")
    assert_close(found[0], whole(model, tokens))
    assert_close(found[1][mask.bool()], whole(model, tokens, attention_mask=mask)[mask.bool()])


def test_an_encoder_that_does_not_say_that_it_looks_both_ways_has_buckets_for_both() -> None:
    model = patch_model(layoutlm(), "relative_bias", FACTOR)
    before = whole(model, text(20))
    with torch.no_grad():
        for each in biases(model).values():
            each[20] = 3.0  # keys four tokens behind the query
    assert not torch.allclose(whole(model, text(20)), before, atol=0.1)


def gradients(model: Any, **inputs: Any) -> dict[str, Tensor]:
    """Gradients of all parameters for the square of what a model says."""
    model.config.use_cache = False
    model.zero_grad()
    model(**inputs).logits.square().mean().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("scale", [0.0, 1.0], ids=["zero", "trained"])
@pytest.mark.parametrize("row", ["bert", "gpt2"])
def test_gradients_are_those_of_the_same_numbers_in_a_mask(row: str, scale: float) -> None:
    """At zero too, where without a gradient nothing would be added."""
    bias, tokens = (scale * BIAS).requires_grad_(), text(48)
    model, expected = share_one_bias(untrained(row).double(), bias), tiled(row)
    found = gradients(model, input_ids=tokens)
    mask = written_out(bias, torch.arange(48)[None], row in CAUSAL)
    plain = gradients(expected, input_ids=tokens, attention_mask=mask)
    assert float(bias.grad.abs().max()) > 1e-3
    assert_close(sum(found[name] for name in biases(model)), bias.grad, EXACT)
    for name, gradient in plain.items():
        assert_close(found[name], gradient, EXACT)


def test_gradients_are_those_without_checkpointing() -> None:
    model, tokens = trained("bert").train(), text(48)
    expected = gradients(model, input_ids=tokens)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for name, gradient in gradients(model, input_ids=tokens).items():
        assert_close(gradient, expected[name], 1e-5)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"buckets": 31}, ValueError, r"`buckets` must be even in bidirectional attention, got 31"),
    ({"buckets": 2}, ValueError, r"`buckets` must be a whole number >= 4, got 2"),
    ({"buckets": "32"}, TypeError, r"`buckets` must be a whole number >= 4, got '32' of type str"),
    ({"max_distance": 8}, ValueError, r"`max_distance` must be more than 8 tokens.*got 8"),
    ({"table": "pi"}, ValueError, r"`table`: 'pi'\. Allowed: `tile`, `hierarchical`"),
    ({"frozen_rows": 1}, TypeError, r"`frozen_rows` must be True or False, got 1"),
    ({"dynamic": True}, ValueError, r"`relative_bias` does not move the positions of short text.*`dynamic`"),
    ({"distance": 64}, TypeError, r"Unknown option of `relative_bias`: 'distance'.*`max_distance`"),
]


@pytest.mark.parametrize(("options", "error", "words"), BAD)
def test_a_bad_value_is_named_and_the_model_left_alone(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = FAMILIES["bert"]()
    before = snapshot(model)
    with pytest.raises(error, match=words):
        patch_model(model, "relative_bias", FACTOR, **options)
    assert differences(before, snapshot(model)) == []


def test_attention_outside_of_the_registry_is_refused_and_the_model_left_alone() -> None:
    model = special_models.build("AutoModelForMaskedLM", "mpnet", copy.deepcopy(special_models.ENCODER))
    before = snapshot(model)
    with pytest.raises(PatchError, match="attention registry"):
        patch_model(model, "relative_bias", FACTOR)
    assert differences(before, snapshot(model)) == []


def test_factor_1_adds_nothing() -> None:
    model = patch_model(FAMILIES["bert"](), "relative_bias", 1)
    assert biases(model) == {}
    assert record_of(model).factor == 1
