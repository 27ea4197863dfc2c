"""Heads that look at the tokens beside each one from the first step, which small models are slow to find by themselves.

Used by `pretrain_tiny.py` where a config says `start: neighbours`.
"""

from __future__ import annotations

from typing import Any

import torch

SHARPNESS = 3.0  # nine tenths of the attention of GPT-NeoX's head goes where it should, two thirds of BERT's


@torch.no_grad()
def look_beside(model: Any) -> None:
    """Makes the heads of BERT's first two layers look one and two tokens to the left and right.

    The first channels of the hidden states, as many as a head has, begin with nothing but sines and cosines of the
    position in them; there a rotation of queries by d positions is all that it takes.
    """
    bert, size = model.bert, model.config.hidden_size // model.config.num_attention_heads
    omega = 100.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(model.config.max_position_embeddings)[:, None] * omega
    for embedding in ("word_embeddings", "token_type_embeddings"):
        getattr(bert.embeddings, embedding).weight[:, :size] = 0
    rows = bert.embeddings.position_embeddings.weight.zero_()
    rows[:, 0:size:2], rows[:, 1:size:2] = angles.sin(), angles.cos()
    rows *= 2**0.5 * model.config.initializer_range
    for number, layer in enumerate(bert.encoder.layer[:2], start=1):
        attention = layer.attention.self
        for head in range(model.config.num_attention_heads):
            mine = slice(head * size, (head + 1) * size)
            turn = omega * (number if head % 2 else -number)
            attention.query.weight[mine] = 0
            attention.key.weight[mine] = 0
            attention.key.weight[mine, :size] = SHARPNESS * torch.eye(size)
            attention.query.weight[mine, :size] = SHARPNESS * torch.block_diag(*map(rotation, turn))


def rotation(angle: torch.Tensor) -> torch.Tensor:
    """[2, 2]: takes (sin a, cos a) to (sin(a + angle), cos(a + angle))."""
    sine, cosine = angle.sin(), angle.cos()
    return torch.stack((torch.stack((cosine, sine)), torch.stack((-sine, cosine))))


@torch.no_grad()
def look_before(model: Any) -> None:
    """Makes the first head of GPT-NeoX look at the token before each one, by the biases of its query and key."""
    layer, theta = model.gpt_neox.layers[0].attention.query_key_value, model.gpt_neox.rotary_emb.inv_freq
    size = model.config.hidden_size // model.config.num_attention_heads
    layer.weight[: 2 * size] = 0
    layer.bias[: 2 * size] = 0
    layer.bias[: 2 * len(theta)] = SHARPNESS**2 * torch.cat((theta.cos(), -theta.sin()))
    layer.bias[size : size + len(theta)] = SHARPNESS**2


STARTS = {"BertForMaskedLM": look_beside, "GPTNeoXForCausalLM": look_before}
