"""Native ALiBi with a divisor that follows the length of the text."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_posext.mechanisms import alibi
from tests.dynamic import assert_close, in_pieces, padded, steps, whole
from tests.mechanisms.alibi_models import (
    ALL,
    BY_MASK,
    DYNAMIC,
    FACTOR,
    FAMILIES,
    LENGTH,
    STATIC,
    N,
    Patch,
    by_patch,
    divided,
    following,
    raised,
    renamed,
    sites,
    spread_out,
    text,
    tiny,
)


@torch.no_grad()
@pytest.mark.parametrize("patch", [*STATIC, *DYNAMIC])
@pytest.mark.parametrize("family", BY_MASK)
def test_masked_tokens_in_between_count_for_nothing(family: str, patch: Patch) -> None:
    model, tokens = patch(tiny(family), FACTOR), text()
    spread, mask = spread_out(tokens)
    assert_close(whole(model, spread, attention_mask=mask)[:, ::2], whole(model, tokens), 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("patch", DYNAMIC)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_of_at_most_n_tokens_is_read_as_before_to_the_last_bit(family: str, patch: Patch) -> None:
    plain, model = tiny(family), patch(tiny(family), FACTOR)
    tokens, batch = text(N, batch=2), renamed(padded([text(N)[0], text(9, seed=4)[0]], "left"))
    assert torch.equal(whole(model, tokens), whole(plain, tokens))
    assert torch.equal(whole(model, **batch), whole(plain, **batch))
    sizes = [9, 4, 1, 1, 1]
    assert torch.equal(in_pieces(model, tokens, sizes, DynamicCache()), in_pieces(plain, tokens, sizes, DynamicCache()))
    long = text()
    assert (whole(model, long) - whole(raised(plain), long)).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("patch", DYNAMIC)
@pytest.mark.parametrize("family", FAMILIES)
def test_report_095_decoding_and_pieces_equal_one_pass(family: str, patch: Patch) -> None:
    model, tokens = patch(tiny(family), FACTOR), text(batch=2)
    expected = whole(model, tokens)
    for sizes in (steps(20, LENGTH), [10, 20, 10]):
        assert_close(in_pieces(model, tokens, sizes, DynamicCache()), expected)


@torch.no_grad()
@pytest.mark.parametrize("patch", [*STATIC, *DYNAMIC])
def test_where_weights_are_asked_for_falcon_reads_as_its_eager_self(patch: Patch) -> None:
    """transformers adds the bias twice there, so the two ways are not equal; each of them is followed."""
    model, eager = patch(tiny("falcon"), FACTOR), patch(tiny("falcon_eager"), FACTOR)
    assert_close(whole(model, text(), output_attentions=True), whole(eager, text()), 1e-5)
    assert (whole(model, text()) - whole(eager, text())).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("patch", DYNAMIC)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_token_reads_as_with_the_factor_of_its_length(family: str, patch: Patch) -> None:
    """In one layer its own divisor is all that bears on it; a later layer sees what earlier tokens have read."""
    model = patch(tiny(family, layers=1), FACTOR)
    for length in (N + 1, 25, LENGTH, 48):
        static = divided(raised(tiny(family, layers=1)), length / N)
        found, expected = whole(model, text(length)), whole(static, text(length))
        assert_close(found[:, -1], expected[:, -1], 1e-5)
        assert (found[:, N - 1] - expected[:, N - 1]).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_divisor_grows_up_to_the_factor(family: str) -> None:
    model = following(tiny(family, layers=1), factor=1.5)
    static = divided(raised(tiny(family, layers=1)), 1.5)
    raised(model)
    assert_close(whole(model, text())[:, 24:], whole(static, text())[:, 24:], 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("patch", DYNAMIC)
@pytest.mark.parametrize("family", BY_MASK)
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_batch_have_their_own_divisors(family: str, side: str, patch: Patch) -> None:
    model, rows = patch(tiny(family), FACTOR), [text()[0], text(27, seed=4)[0], text(9, seed=5)[0]]
    batch = padded(rows, side)
    found = whole(model, **renamed(batch))
    for index, row in enumerate(rows):
        assert_close(found[index][batch["attention_mask"][index].bool()], whole(model, row[None])[0])
    mask, size = batch["attention_mask"], [20, *[1] * (LENGTH - 20)]
    if side == "left":
        kept = mask.bool()
        assert_close(in_pieces(model, batch["input_ids"], size, DynamicCache(), mask, axes=0)[kept], found[kept])


@torch.no_grad()
@pytest.mark.parametrize("patch", DYNAMIC)
def test_rows_that_share_a_bias_must_be_of_one_length(patch: Patch) -> None:
    model, rows = patch(tiny("mpt"), FACTOR), [text()[0], text(27, seed=4)[0]]
    with pytest.raises(ValueError, match=r"rows of one length .*dynamic=False"):
        whole(model, **renamed(padded(rows, "left")))
    alone = padded([rows[1], rows[1]], "left")
    wide = {name: torch.nn.functional.pad(value, (5, 0)) for name, value in alone.items()}
    expected = whole(model, rows[1][None])[0]
    assert_close(whole(model, **renamed(wide))[0, 5:], expected)
    found = whole(model, **renamed(padded(rows, "right")))  # padding behind the text reads nothing that matters
    assert_close(found[0], whole(model, rows[0][None])[0])
    assert_close(found[1, :27], expected)


@torch.no_grad()
def test_one_length_for_all_tokens_of_a_row() -> None:
    """As frozen scaling asks for it: the length of a row at the end of generation."""
    for family in FAMILIES:
        model, static = raised(tiny(family)), divided(raised(tiny(family)), 2.0)
        for site in sites(model):
            alibi.follow(site, lambda: torch.full((1, 1), 2 * N).expand(2, 20), N, FACTOR)
        assert_close(whole(model, text(20, batch=2)), whole(static, text(20, batch=2)), 1e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon"])
def test_dynamic_scaling_in_half_precision_leaves_short_text_alone(family: str) -> None:
    plain, model = tiny(family).to(torch.bfloat16), following(tiny(family)).to(torch.bfloat16)
    assert torch.equal(whole(model, text(N)), whole(plain, text(N)))
    assert whole(model, text()).isfinite().all()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("change", ["pi", "dynamic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_nothing(family: str, change: str, reentrant: bool) -> None:
    """A shorter text is read before the gradients of the first are computed, which runs its layers again."""
    model, tokens = tiny(family).train(), text()
    ALL[change](model)
    expected = gradients(model, tokens)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    for found, wanted in zip(gradients(model, tokens), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def gradients(model: Any, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = model(input_ids=tokens, use_cache=False).logits.log_softmax(-1)[..., 7].sum()
    model(input_ids=tokens[:, :5], use_cache=False)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@torch.no_grad()
@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon"])
def test_generation_with_a_divisor_that_follows_equals_passes_without_a_cache(family: str) -> None:
    model, tokens = by_patch(tiny(family), dynamic=True), text(12)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = tokens
    for _ in range(24):
        expected = torch.cat((expected, whole(model, expected)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(model.generate(tokens, attention_mask=torch.ones_like(tokens), **options), expected)
