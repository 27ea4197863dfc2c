"""Tiny models of families that need more than a row: each does something with its positions that no other one does."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

from tests.architectures import DECODER, ENCODER, SLIDING, TRAINED_LENGTH, VOCABULARY

GPT = {
    "vocab_size": VOCABULARY,
    "n_positions": TRAINED_LENGTH,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(auto_class: str, model_type: str, settings: Mapping[str, Any]) -> Any:
    """A random float32 model in evaluation mode, the same each time."""
    config = transformers.AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, auto_class).from_config(config, dtype=torch.float32).eval()


def esm() -> Any:
    """A persistent `inv_freq`, in the state dict; positions are made from the mask."""
    settings = {**ENCODER, "position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": False}
    return build("AutoModelForMaskedLM", "esm", settings)


def codegen() -> Any:
    """A table of sines and cosines in each layer."""
    return build("AutoModelForCausalLM", "codegen", {**GPT, "rotary_dim": 8})


def phimoe() -> Any:
    """A rotary `forward` that asks its config for frequencies and ignores the buffer."""
    settings = {**DECODER, "num_local_experts": 2, "num_experts_per_tok": 2}
    return build("AutoModelForCausalLM", "phimoe", settings)


def smollm3() -> Any:
    """A first layer without rotation: nothing of a patch shows in its output."""
    return build("AutoModelForCausalLM", "smollm3", {**DECODER, "no_rope_layers": [0, 1]})


def falcon() -> Any:
    """Keys and values of one head for all queries, attention and MLP side by side."""
    settings = {name: DECODER[name] for name in DECODER if name not in ("num_key_value_heads", "head_dim")}
    return build("AutoModelForCausalLM", "falcon", {**settings, "multi_query": True, "alibi": False})


def beam() -> Any:
    """Only the layers with a sliding window rotate."""
    settings = {
        **DECODER,
        "layer_types": SLIDING,
        "mlp_layer_types": ["dense", "dense"],
        "sliding_window": 8,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
    }
    return build("AutoModelForCausalLM", "beam", settings)


def gpt2() -> Any:
    """A learned table of positions, no rotation."""
    return build("AutoModelForCausalLM", "gpt2", GPT)


def mamba() -> Any:
    """No attention and no encoding of positions."""
    settings = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 32}
    return build("AutoModelForCausalLM", "mamba", settings)


ROTARY: dict[str, Callable[[], Any]] = {
    "esm": esm,
    "codegen": codegen,
    "phimoe": phimoe,
    "smollm3": smollm3,
    "falcon": falcon,
}
"""Those that a patch of full layers changes, by name."""
