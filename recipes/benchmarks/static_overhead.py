"""Forward and cached decoding of a patched model against the same model unpatched. Bar: at most 1.02, no extra memory.

    python recipes/benchmarks/static_overhead.py --threads 1

Two copies of one model, one patched, take turns; the weights are random, which changes no timing. About two minutes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import arguments, compare, report
from transformers import LlamaConfig, LlamaForCausalLM

import hf_posext

METHODS = ("pi", "ntk", "ntk_by_parts", "yarn", "llama3")
LENGTH, STEPS = 512, 16


def build() -> LlamaForCausalLM:
    """A Llama of 30M parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def forward(model: LlamaForCausalLM, tokens: torch.Tensor) -> Callable[[], Any]:
    """One pass over all tokens."""
    return torch.inference_mode()(lambda: model(tokens, use_cache=False, logits_to_keep=1))


def decode(model: LlamaForCausalLM, tokens: torch.Tensor) -> Callable[[], Any]:
    """A few greedy steps after a short prompt."""
    prompt = tokens[:, :64]
    return torch.inference_mode()(
        lambda: model.generate(prompt, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, pad_token_id=0)
    )


def main() -> None:
    """Times every method and prints the ratios."""
    options = arguments(__doc__ or "")
    plain, changed = build(), build()
    tokens = torch.randint(0, 4096, (1, LENGTH))
    rows = []
    for method in METHODS:
        with hf_posext.patched(changed, method, 4):
            for name, make in (("forward", forward), ("decode", decode)):
                seconds = compare({"plain": make(plain, tokens), "patched": make(changed, tokens)})
                rows.append({"method": method, "what": name, **seconds, "ratio": seconds["patched"] / seconds["plain"]})
    report("static_overhead", rows, options.out)


if __name__ == "__main__":
    main()
