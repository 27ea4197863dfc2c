"""A learned bias by distance in the tests: models of several families, biases that say something, and a reference."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posext import patch_model
from tests import special_models
from tests.architectures import ENCODER, TRAINED_LENGTH, VOCABULARY
from tests.dynamic import text
from tests.in_attention import bert, gpt2

FACTOR = 4
NAME = "posext_bias"
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def roberta() -> Any:
    """Reserved rows up to that of padding; positions are counted from token ids."""
    settings = {**ENCODER, **WITHOUT_DROPOUT, "max_position_embeddings": TRAINED_LENGTH + 2, "pad_token_id": 1}
    return special_models.build("AutoModelForMaskedLM", "roberta", settings)


def electra() -> Any:
    """A table as wide as the embeddings of words, which may be narrower than the layers."""
    return special_models.build("AutoModelForMaskedLM", "electra", {**ENCODER, **WITHOUT_DROPOUT, "embedding_size": 32})


def distilbert() -> Any:
    """Attention modules with other names than those of BERT."""
    settings = {"vocab_size": VOCABULARY, "dim": 64, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "dropout": 0.0}
    more = {"attention_dropout": 0.0, "max_position_embeddings": TRAINED_LENGTH, "initializer_range": 0.3}
    return special_models.build("AutoModelForMaskedLM", "distilbert", {**settings, **more})


def layoutlm() -> Any:
    """An encoder whose attention modules do not say that they look both ways."""
    return special_models.build("AutoModelForMaskedLM", "layoutlm", {**ENCODER, **WITHOUT_DROPOUT})


FAMILIES: dict[str, Callable[[], Any]] = {
    "bert": bert,
    "roberta": roberta,
    "electra": electra,
    "distilbert": distilbert,
    "gpt2": gpt2,
}
CAUSAL = ("gpt2",)


def untrained(row: str, **options: Any) -> Any:
    """A model with the patch as it is put on: the bias is zero."""
    return patch_model(FAMILIES[row](), "relative_bias", FACTOR, **options)


def trained(row: str, **options: Any) -> Any:
    """The model with biases that say something, others in each layer."""
    model, generator = untrained(row, **options), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each in biases(model).values():
            each.copy_(2 * torch.randn(each.shape, generator=generator))
    return model


def biases(model: Any) -> dict[str, torch.nn.Parameter]:
    """Path -> bias of each attention module, [buckets, H]."""
    return {name: each for name, each in model.named_parameters() if name.endswith(NAME)}


def share_one_bias(model: Any, bias: Tensor) -> Any:
    """The model with the same bias in every layer."""
    with torch.no_grad():
        for each in biases(model).values():
            each.copy_(bias)
    return model


def written_out(bias: Tensor, places: Tensor, is_causal: bool, seen: Tensor | None = None, **sizes: int) -> Tensor:
    """The bias as a mask of four axes, [B, H, L, L] in its dtype, with T5's own buckets; differentiable in the bias.

    Args:
        bias: [buckets, H].
        places: [B, L], where the tokens stand.
        is_causal: whether keys behind the query are hidden, which then have no buckets.
        seen: [B, L], 0 for keys of padding.
        sizes: `num_buckets` and `max_distance`, if they are not those of T5.
    """
    apart = places[:, None, :] - places[:, :, None]
    number = T5Attention._relative_position_bucket(apart, bidirectional=not is_causal, **sizes)
    found = bias[number].permute(0, 3, 1, 2)
    lowest = torch.finfo(bias.dtype).min
    if is_causal:
        length = places.shape[1]
        found = found.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), lowest)
    return found if seen is None else found.masked_fill(seen[:, None, None] == 0, lowest)


def tiled(row: str, dtype: torch.dtype = torch.float64) -> Any:
    """The model with a longer table alone, as which a bias of zero leaves it."""
    return patch_model(FAMILIES[row](), "tile", FACTOR).to(dtype)


def padded_text(length: int, side: str) -> tuple[Tensor, Tensor]:
    """Two texts [2, L], the first of which has 9 tokens of padding on one side, and the mask."""
    tokens, mask = text(length, batch=2), torch.ones(2, length, dtype=torch.int64)
    mask[0, :9] = 0
    return tokens, mask if side == "left" else mask.flip(1)
