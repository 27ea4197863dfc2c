"""Tiny models of families that need more than a row: each does something with its positions that no other one does."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, EsmConfig, PhimoeConfig, SmolLM3Config

from tests.architectures import DECODER, ENCODER


def build(auto_class: Any, config: Any, seed: int = 0) -> Any:
    """A random float32 model in evaluation mode, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return auto_class.from_config(config, dtype=torch.float32).eval()


def esm() -> Any:
    """One persistent `inv_freq` per layer, in the state dict; positions are made from the mask."""
    settings = {**ENCODER, "position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": False}
    return build(AutoModelForMaskedLM, EsmConfig(**settings))


def phimoe() -> Any:
    """A rotary `forward` that asks its config for frequencies and ignores the buffer."""
    settings = {**DECODER, "num_local_experts": 2, "num_experts_per_tok": 2}
    return build(AutoModelForCausalLM, PhimoeConfig(**settings))


def smollm3() -> Any:
    """A first layer without rotation: nothing of a patch shows in its output."""
    return build(AutoModelForCausalLM, SmolLM3Config(**DECODER, no_rope_layers=[0, 1]))
