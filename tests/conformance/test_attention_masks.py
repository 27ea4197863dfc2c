"""Masks and attention implementations under methods that act in attention: what is hidden stays so, weights add up."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_posext import patch_model, unpatch_model
from tests.architectures import DECODER, TRAINED_LENGTH
from tests.dynamic import assert_close, in_pieces, padded, positions, steps, text, whole
from tests.in_attention import (
    BIDIRECTIONAL,
    FEW_CACHED,
    LENGTH,
    MIXED,
    MIXED_PAIRS,
    bert,
    length_for,
    named,
    patch,
    patched_model,
    shared_model,
    text_for,
)


def square(row: str, length: int) -> Tensor:
    """[1, 1, L, L] bool: what a token of a row sees without padding."""
    seen = torch.ones(1, 1, length, length, dtype=torch.bool)
    return seen if row in BIDIRECTIONAL else seen.tril()


def added(seen: Tensor) -> Tensor:
    """A mask as what is added to the logits."""
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


MASKS: dict[str, Callable[[str, int], Tensor]] = {
    "ones": lambda row, length: torch.ones(2, length, dtype=torch.int64),
    "boolean": lambda row, length: square(row, length).expand(2, -1, -1, -1),
    "additive": lambda row, length: added(square(row, length)).expand(2, -1, -1, -1),
}


ONE_MASK = [pair for pair in MIXED_PAIRS if pair[0] not in ("gemma3", "modernbert")]
"""Pairs whose layers all have the same mask: one of four axes is taken for that of every layer."""


@pytest.mark.parametrize(
    ("mask", "row", "kind"),
    [
        *(("ones", *pair) for pair in MIXED_PAIRS),
        *((mask, *pair) for mask in ("boolean", "additive") for pair in ONE_MASK),
    ],
)
def test_a_mask_that_hides_nothing_changes_nothing(mask: str, row: str, kind: str) -> None:
    model, tokens = shared_model(row, kind), text_for(row, kind, batch=2)
    found = whole(model, tokens, attention_mask=MASKS[mask](row, tokens.shape[1]))
    assert_close(found, whole(model, tokens))


@pytest.mark.parametrize(
    ("mask", "row", "kind"), [(("boolean", "additive")[index % 2], *pair) for index, pair in enumerate(ONE_MASK)]
)
def test_a_key_that_a_mask_of_four_axes_hides_is_not_read(mask: str, row: str, kind: str) -> None:
    """Changing the hidden token changes only what it says itself."""
    model, tokens, hidden = shared_model(row, kind), text_for(row, kind), 9
    seen = square(row, tokens.shape[1]).clone()
    seen[..., hidden + 1 :, hidden] = False
    seen[..., :hidden, hidden] = False
    other = tokens.clone()
    other[0, hidden] = (tokens[0, hidden] + 7) % 90 + 5
    given = seen if mask == "boolean" else added(seen)
    one, two = (whole(model, each, attention_mask=given) for each in (tokens, other))
    kept = torch.arange(tokens.shape[1]) != hidden
    assert_close(one[:, kept], two[:, kept])
    assert not torch.allclose(one[:, hidden], two[:, hidden], atol=0.1)
    assert not torch.allclose(one[:, hidden + 1], whole(model, tokens)[:, hidden + 1], atol=1e-3)


@pytest.mark.parametrize(("row", "kind"), MIXED)
def test_eager_and_sdpa_agree_before_and_after_the_patch(row: str, kind: str) -> None:
    rows = [text(length, seed=length)[0] for length in (11, length_for(row, kind))]
    batch, model = padded(rows, "right"), patched_model(row, kind)
    kept, expected = batch["attention_mask"].bool(), whole(model, **renamed(batch))
    model.set_attn_implementation("eager")
    assert_close(whole(model, **renamed(batch))[kept], expected[kept])
    check_weights(model, row, rows[1][None])
    unpatch_model(model)
    assert model.config._attn_implementation == "eager"
    patch(model, kind)
    assert_close(whole(model, **renamed(batch))[kept], expected[kept])
    model.set_attn_implementation("sdpa")
    assert torch.equal(whole(model, **renamed(batch)), expected)


@torch.no_grad()
def check_weights(model: Any, row: str, tokens: Tensor) -> None:
    """Eager attention answers with weights that sum to one and look back alone where the model does."""
    given = model(input_ids=tokens, output_attentions=True).attentions
    assert len(given) == 2
    for weights in given:
        assert weights.shape == (1, 4, tokens.shape[1], tokens.shape[1])
        assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]), 1e-5)
        if row not in BIDIRECTIONAL:
            assert torch.equal(weights, weights.tril())


def renamed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch as arguments of `whole`."""
    return {"tokens": batch["input_ids"], "attention_mask": batch["attention_mask"]}


@pytest.mark.parametrize(("row", "kind"), FEW_CACHED)
def test_eager_attention_decodes_as_sdpa(row: str, kind: str) -> None:
    model, tokens = patched_model(row, kind), text_for(row, kind)
    expected = whole(model, tokens)
    model.set_attn_implementation("eager")
    assert_close(in_pieces(model, tokens, steps(40), DynamicCache()), expected)


SLOPES = {
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    12: [*(2.0**-power for power in range(1, 9)), *(2.0 ** -(power + 0.5) for power in range(4))],
}
"""Published slopes for head counts that are no powers of two."""


def llama_of(heads: int) -> LlamaForCausalLM:
    """A Llama of so many heads."""
    settings = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "hidden_size": 16 * heads}
    return LlamaForCausalLM(LlamaConfig(**{**DECODER, **settings})).eval()


def bert_of(heads: int) -> Any:
    """A BERT of so many heads."""
    return bert(num_attention_heads=heads, hidden_size=16 * heads)


def silenced(model: Any) -> Any:
    """The model with queries and keys that are zero."""
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[0].endswith(("q_proj", "k_proj", "self.query", "self.key")):
            parameter.data.zero_()
    return model


@torch.no_grad()
def weights_of(model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
    """Weights of the last layer, [B, H, L, S] float64."""
    model.set_attn_implementation("eager")
    return model(input_ids=tokens, output_attentions=True, **inputs).attentions[-1].double()


def biased(before: list[float], after: list[float] | None, length: int) -> Tensor:
    """softmax(-m |q - k|) in float64, [1, H, L, L]; keys behind the query are hidden without slopes for them."""
    apart = torch.arange(length, dtype=torch.float64)[:, None] - torch.arange(length)
    slopes = torch.tensor(before, dtype=torch.float64)[:, None, None]
    behind = torch.tensor(before if after is None else after, dtype=torch.float64)[:, None, None]
    bias = torch.where(apart >= 0, -slopes * apart, behind * apart)
    if after is None:
        bias = bias.masked_fill(apart < 0, -torch.inf)
    return bias.softmax(-1)[None]


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("heads", SLOPES)
def test_without_queries_the_weights_are_those_of_the_bias_alone(heads: int, order: str) -> None:
    """Whether the weights were zero before the patch or became so after it."""
    if order == "before":
        model = patch_model(silenced(llama_of(heads)), "alibi", 4)
    else:
        model = silenced(patch_model(llama_of(heads), "alibi", 4))
    assert_close(weights_of(model, text(100)), biased(SLOPES[heads], None, 100), 1e-6)


@pytest.mark.parametrize("heads", SLOPES)
def test_the_weights_of_an_encoder_are_symmetric_or_as_asked(heads: int) -> None:
    series = SLOPES[heads]
    found = weights_of(patch_model(silenced(bert_of(heads)), "alibi", 4), text(100))
    assert_close(found, biased(series, series, 100), 1e-6)
    found = weights_of(patch_model(silenced(bert_of(heads)), "alibi", 4, asymmetric=True), text(100))
    assert_close(found, biased(series, series[::-1], 100), 1e-6)
    other = [0.01 * (1 + head) for head in range(heads)]
    found = weights_of(
        patch_model(silenced(bert_of(heads)), "alibi", 4, slopes=series[::-1], asymmetric=other), text(100)
    )
    assert_close(found, biased(series[::-1], other, 100), 1e-6)


def test_given_slopes_and_a_slower_decay_are_used() -> None:
    given = [0.5, 0.25, 0.0, 3.0]
    model = silenced(patch_model(llama_of(4), "alibi", 4, slopes=given))
    assert_close(weights_of(model, text(60)), biased(given, None, 60), 1e-6)
    model = silenced(patch_model(llama_of(4), "alibi", 4, bias_max=16))
    assert_close(weights_of(model, text(60)), biased([2**-4, 2**-8, 2**-12, 2**-16], None, 60), 1e-6)


@pytest.mark.parametrize("row", ["llama", "bert"])
def test_without_queries_a_window_is_an_average_over_what_is_seen(row: str) -> None:
    length = 80 if row == "llama" else TRAINED_LENGTH
    model = silenced(patch_model(llama_of(4) if row == "llama" else bert_of(4), "window", 4, width=7, sinks=3))
    seen = torch.tensor(
        [[(abs(q - k) < 7 or k < 3) and (k <= q or row == "bert") for k in range(length)] for q in range(length)]
    ).double()
    expected = (seen / seen.sum(-1, keepdim=True)).expand(1, 4, -1, -1)
    assert_close(weights_of(model, text(length)), expected, 1e-6)


PACKING = ("llama", "qwen3", "gpt_neox", "gemma3")
"""Rows in which transformers knows packed texts by their positions."""


@pytest.mark.parametrize(("row", "kind"), named(pair for pair in MIXED_PAIRS if pair[0] in PACKING))
def test_two_packed_copies_of_a_text_are_read_alike(row: str, kind: str) -> None:
    """transformers hides the other text itself where positions start anew; else the mask of blocks is given."""
    model, tokens = shared_model(row, kind), text(LENGTH)
    packed, places = tokens.repeat(1, 2), torch.arange(LENGTH).repeat(2)[None]
    found, alone = whole(model, packed, position_ids=places), whole(model, tokens)
    assert_close(found[:, :LENGTH], alone)
    assert_close(found[:, LENGTH:], alone)
    if row == "gemma3":
        return
    blocks = torch.block_diag(*[torch.ones(LENGTH, LENGTH).tril()] * 2).bool()[None, None]
    for mask in (blocks, added(blocks)):
        found = whole(model, packed, position_ids=places, attention_mask=mask)
        assert_close(found, torch.cat((alone, alone), 1))


@pytest.mark.parametrize("kind", ["alibi", "nope", "window_sinks"])
def test_two_packed_copies_of_a_text_are_read_alike_by_an_encoder(kind: str) -> None:
    model, length = shared_model("bert", kind), 16
    tokens = text(length)
    packed, places = tokens.repeat(1, 2), torch.arange(length).repeat(2)[None]
    blocks = torch.block_diag(*[torch.ones(length, length)] * 2).bool()[None, None]
    found = whole(model, packed, position_ids=places, attention_mask=blocks)
    assert_close(found, whole(model, tokens).repeat(1, 2, 1))


@pytest.mark.parametrize("kind", ["alibi", "self_extend", "rerope", "window_sinks"])
def test_a_row_of_padding_alone_gives_numbers(kind: str) -> None:
    model, tokens = shared_model("llama", kind), text(batch=2)
    mask = torch.ones_like(tokens)
    mask[0] = 0
    found = whole(model, tokens, attention_mask=mask, position_ids=positions(mask))
    assert torch.isfinite(found).all()
    assert_close(found[1:], whole(model, tokens[1:]))
