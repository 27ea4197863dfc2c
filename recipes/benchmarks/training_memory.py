"""Memory and time of one training step with the loss that holds no logits, against transformers' own.

    python recipes/benchmarks/training_memory.py --threads 1

A row of 4096 tokens, a vocabulary of 128k, a Llama of 2 layers that is 128 wide, in float32: little but logits. With
`frozen` all but the query projections is, as with LoRA; with `full` everything is trained, the head too. Each arm runs
in processes of its own. `peak_mb` is the largest resident set of a process less the one before its step (forward and
backward of the first one); `step_s` is the median of the steps after it, with the arms in turns. Needs 10 GB of memory,
about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from harness import report
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posext.training.loss import loss_without_logits

LENGTH, VOCABULARY = 4096, 128_000
TRAINED = ("frozen", "full")
ARMS = ("transformers", "hf_posext")


def build(trained: str) -> LlamaForCausalLM:
    """The model, with the parameters that are trained."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained == "full" or "q_proj" in name)
    return model


def peak() -> float:
    """Largest resident set of this process so far, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def step(model: LlamaForCausalLM, tokens: torch.Tensor) -> tuple[float, float]:
    """The loss of a forward and a backward, and their seconds."""
    model.zero_grad()
    start = time.perf_counter()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), time.perf_counter() - start


def measure(arm: str, trained: str, chunk: int) -> dict[str, float]:
    """One arm in this process."""
    model = build(trained)
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    block: AbstractContextManager[None] = nullcontext()
    if arm == "hf_posext":
        block = loss_without_logits(model, chunk=chunk)
    with block:
        step(model, tokens[:, :64])  # what the libraries keep for themselves
        before = peak()
        loss, _ = step(model, tokens)
        after = peak()
        return {"loss": loss, "peak_mb": after - before, "step_s": step(model, tokens)[1]}


def in_a_process(arm: str, trained: str, options: argparse.Namespace) -> dict[str, float]:
    """One arm in a fresh process."""
    words = ["--threads", str(options.threads), "--chunk", str(options.chunk), "--arm", arm, "--trained", trained]
    run = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def rows(trained: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each arm, with ratios to transformers."""
    runs = [{arm: in_a_process(arm, trained, options) for arm in ARMS} for _ in range(options.rounds)]
    medians = {arm: {key: statistics.median(run[arm][key] for run in runs) for key in runs[0][arm]} for arm in ARMS}
    stock = medians["transformers"]
    return [
        {
            "trained": trained,
            "arm": arm,
            "chunk": options.chunk if arm == "hf_posext" else LENGTH,
            **found,
            "peak_ratio": found["peak_mb"] / stock["peak_mb"],
            "step_ratio": found["step_s"] / stock["step_s"],
        }
        for arm, found in medians.items()
    ]


def main() -> None:
    """Prints one row for each arm and kind of training; with `--arm`, measures one of them here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--chunk", type=int, default=256, help="rows of hidden states that the head sees at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trained", choices=TRAINED, nargs="+", default=list(TRAINED))
    parser.add_argument("--arm", choices=ARMS, help="measure this arm in this process, for the script itself")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.arm is not None:
        print(json.dumps(measure(options.arm, options.trained[0], options.chunk)))
        return
    report("training_memory", [row for trained in options.trained for row in rows(trained, options)], options.out)


if __name__ == "__main__":
    main()
