"""Time and memory of `patch_model` on a model of a billion parameters, and of `import hf_posext`.

    python recipes/benchmarks/patch_cost.py --threads 1

Bars: under 100 ms and 1 MB; under 0.1 s beyond `import transformers, torch`. Needs 3 GB of memory, about a minute.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from harness import arguments, report
from transformers import LlamaConfig, LlamaForCausalLM

import hf_posext

METHODS = ("pi", "ntk", "yarn", "llama3")
IMPORTS = "import time, torch, transformers; t = time.perf_counter(); import hf_posext; print(time.perf_counter() - t)"


def build() -> LlamaForCausalLM:
    """The shape of Llama 3.2 1B, in bf16."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=True, dtype=torch.bfloat16,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def tensor_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, and of the tensors that a patch keeps beside them."""
    kept = [holder.inv_freq.values() for module in model.modules() if (holder := module.__dict__.get("_posext"))]
    tensors = [*model.parameters(), *model.buffers(), *(tensor for group in kept for tensor in group)]
    return sum(tensor.nbytes for tensor in tensors)


def measure(model: torch.nn.Module, method: str, rounds: int = 7) -> dict[str, Any]:
    """Median milliseconds to patch and unpatch, and bytes added."""
    patch, unpatch, before = [], [], tensor_bytes(model)
    for _ in range(rounds):
        start = time.perf_counter()
        hf_posext.patch_model(model, method, 4)
        patch.append(time.perf_counter() - start)
        added = tensor_bytes(model) - before
        start = time.perf_counter()
        hf_posext.unpatch_model(model)
        unpatch.append(time.perf_counter() - start)
    return {
        "method": method,
        "patch_ms": 1000 * statistics.median(patch),
        "unpatch_ms": 1000 * statistics.median(unpatch),
        "added_bytes": added,
    }


def import_seconds() -> float:
    """Median seconds of `import hf_posext` in fresh processes that have torch and transformers already."""
    runs = [
        subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True) for _ in range(3)
    ]
    return statistics.median(float(run.stdout) for run in runs)


def main() -> None:
    """Prints one row for each method, and the import time."""
    options = arguments(__doc__ or "")
    model = build()
    rows = [measure(model, method) for method in METHODS]
    report("patch_cost", [*rows, {"import_seconds": import_seconds()}], options.out)


if __name__ == "__main__":
    main()
