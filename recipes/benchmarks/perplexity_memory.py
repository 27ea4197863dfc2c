"""Peak memory of `perplexity` on a long context and a large vocabulary, beside a forward that makes no logits.

    python recipes/benchmarks/perplexity_memory.py --threads 1

A Llama of 262,144 words reads 32,768 tokens in float32; its logits would take 34 GB. The arms, each in a process of its
own: `forward`, the model up to its hidden states; `tail`, 128 targets behind contexts of 1k to 32k; `full`, every token
scored. `peak_mb` is the largest resident set of a process, `step_mb` the part of it that came after the model was
loaded and had read two tokens. `peak_ratio` and `step_ratio` are those beside `forward`.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from harness import report
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posext import perplexity

VOCABULARY = 262_144
ARMS = ("forward", "tail", "full")


def build(hidden: int, length: int) -> LlamaForCausalLM:
    """One layer: without gradients more of them need no more memory for what they compute."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=1,
        num_attention_heads=hidden // 32, max_position_embeddings=length, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def peak() -> float:
    """Largest resident set of this process so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def run(arm: str, model: LlamaForCausalLM, tokens: torch.Tensor) -> None:
    """What an arm does with the tokens, [length + 1]."""
    length = len(tokens) - 1
    if arm == "forward":
        with torch.no_grad():
            model.model(tokens[None, :-1], use_cache=False)
        return
    lengths = [length] if arm == "full" else sorted({min(1024, length), min(8192, length), length})
    targets = {"targets": min(128, lengths[0]), "endpoints_per_document": 1} if arm == "tail" else {}
    perplexity(
        model, None, [tokens.tolist()], context_lengths=lengths, protocol=arm, bars=[], resamples=10, progress=False,
        **targets,
    )  # fmt: skip


def measure(arm: str, hidden: int, length: int) -> dict[str, float]:
    """One arm in this process."""
    model = build(hidden, length)
    tokens = torch.randint(0, VOCABULARY, (length + 1,), generator=torch.Generator().manual_seed(0))
    run(arm, model, tokens[:3])  # what the libraries keep for themselves
    before, start = peak(), time.perf_counter()
    run(arm, model, tokens)
    return {"peak_mb": peak(), "step_mb": peak() - before, "seconds": time.perf_counter() - start}


def in_a_process(arm: str, options: argparse.Namespace) -> dict[str, float]:
    """One arm in a fresh process."""
    words = ["--threads", options.threads, "--hidden", options.hidden, "--length", options.length, "--arm", arm]
    run_ = subprocess.run([sys.executable, __file__, *map(str, words)], capture_output=True, text=True, check=True)
    return json.loads(run_.stdout)


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each arm, with ratios to the forward without logits."""
    found = {arm: in_a_process(arm, options) for arm in dict.fromkeys(("forward", *options.arms))}
    stock = found["forward"]
    return [
        {
            "arm": arm,
            "hidden": options.hidden,
            "length": options.length,
            **numbers,
            "peak_ratio": numbers["peak_mb"] / stock["peak_mb"],
            "step_ratio": numbers["step_mb"] / stock["step_mb"],
        }
        for arm, numbers in found.items()
    ]


def main() -> None:
    """Prints one row for each arm; with `--arm`, measures one of them here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model, a multiple of 32")
    parser.add_argument("--length", type=int, default=32_768, help="tokens that are read")
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=list(ARMS))
    parser.add_argument("--arm", choices=ARMS, help="measure this arm in this process, for the script itself")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.arm is not None:
        print(json.dumps(measure(options.arm, options.hidden, options.length)))
        return
    report("perplexity_memory", rows(options), options.out)


if __name__ == "__main__":
    main()
