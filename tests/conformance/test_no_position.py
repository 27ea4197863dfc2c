"""Positions switched off, whatever encodes them: what a model computes then does not depend on the order of text."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import hf_posext
from tests.architectures import VOCABULARY, tiny_config
from tests.snapshots import differences, snapshot
from tests.special_models import GPT, build

CAUSAL = {
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 1, "n_head": 4, "seq_length": 32},
    "mpt": {"vocab_size": VOCABULARY, "d_model": 64, "n_layers": 1, "n_heads": 4, "max_seq_len": 32},
    "gpt2": {**GPT, "n_layer": 1},
    "opt": {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "init_std": 0.3,
    },
    "xglm": {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "ffn_dim": 64,
        "num_layers": 1,
        "attention_heads": 4,
        "max_position_embeddings": 32,
        "init_std": 0.3,
    },
}
WIDE = {"bloom", "mpt"}
"""Families whose spread of weights is called `initializer_range`."""
BEGIN_AND_END = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def causal_model(family: str) -> Any:
    """One layer: above it even without an encoding a causal model can tell the order of what came before."""
    if family in ("llama", "gpt_neox", "gptj"):
        config = tiny_config(family)
        setattr(config, "n_layer" if family == "gptj" else "num_hidden_layers", 1)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    spread = {"initializer_range": 0.3} if family in WIDE else {}
    return build("AutoModelForCausalLM", family, {**CAUSAL[family], **spread, **BEGIN_AND_END})


def text(length: int = 20) -> Tensor:
    return torch.randint(5, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(3))


def shuffled(tokens: Tensor) -> Tensor:
    """The same tokens in another order, the last one in its place."""
    order = torch.randperm(tokens.shape[1] - 1, generator=torch.Generator().manual_seed(4))
    return torch.cat((tokens[:, order], tokens[:, -1:]), dim=1)


FAMILIES = ["llama", "gpt_neox", "gptj", *CAUSAL]


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_token_of_a_causal_layer_does_not_see_the_order(family: str) -> None:
    model, tokens = causal_model(family), text()
    before = model(input_ids=tokens).logits[:, -1] - model(input_ids=shuffled(tokens)).logits[:, -1]
    assert before.abs().max() > 1e-2
    hf_posext.patch_model(model, "nope", 2)
    one, other = (model(input_ids=each).logits[:, -1] for each in (tokens, shuffled(tokens)))
    torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "modernbert"])
def test_an_encoder_without_positions_gives_the_same_in_another_order(family: str) -> None:
    settings = {
        "bert": {},
        "roberta": {"max_position_embeddings": 34, "pad_token_id": 1},
        "distilbert": {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
        "modernbert": {"cls_token_id": 1, "sep_token_id": 2, "layer_types": ["full_attention", "sliding_attention"]},
    }[family]
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
        **BEGIN_AND_END,
    }
    if family == "distilbert":
        common = {name: common[name] for name in ("vocab_size", "max_position_embeddings", "initializer_range")}
    model, tokens = build("AutoModelForMaskedLM", family, {**common, **settings}), text()
    order = torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(4))
    hf_posext.patch_model(model, "nope", 2, layers="all")  # ModernBERT has sliding layers as well
    logits, moved = model(input_ids=tokens).logits, model(input_ids=tokens[:, order]).logits
    torch.testing.assert_close(logits[:, order], moved, rtol=0, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_text_beyond_n_can_be_read_and_everything_is_given_back(family: str) -> None:
    model = causal_model(family)
    before = snapshot(model)
    hf_posext.patch_model(model, "nope", 2)
    assert model(input_ids=text(64)).logits.isfinite().all()
    hf_posext.unpatch_model(model)
    assert differences(before, snapshot(model)) == []


def test_native_alibi_is_found_where_it_acts() -> None:
    report = hf_posext.inspect_model(causal_model("bloom"))
    assert [(site.mechanism, site.site) for site in report.sites] == [("alibi", "transformer.h.0.self_attention")]
    assert [method.name for method in hf_posext.list_methods(causal_model("bloom"))] == ["nope", "pi"]
