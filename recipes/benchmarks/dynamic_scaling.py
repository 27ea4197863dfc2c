"""Dynamic scaling against the same method with a fixed factor, on text of twice the trained length.

    python recipes/benchmarks/dynamic_scaling.py --threads 1

Bars: decoding with a cache of 4096 tokens at most 1.3 times a fixed factor, its peak memory at most 1.1 times, one pass
over 4096 tokens at most 1.05 times. Copies of one model, each patched otherwise, take turns; the last one is unpatched
and has transformers' own `rope_type="dynamic"`. `--size small-mha` is the same model without grouped keys, and
`--size llama-3-8b-layer` one layer as wide as those of an 8B model, where less of a pass is attention.

`wrong_by` is the largest difference, in logits, between generation with a cache across N and one pass over the same
tokens by the same model: rounding for an arm that is right. It has no bar here, since tests hold it.

`peak_mb` is the most that torch has allocated at a time while it decodes: parameters, buffers, cache, tables and what
comes and goes, added up from the allocations and releases that `torch.profiler` records from before the model is built.
The resident set would depend on what the C library keeps for later, and a dispatch mode does not see what an operation
takes inside. Work space that oneDNN takes by itself is not in it.

Results go to stdout, what the profiler says of itself to stderr. In float32 about ten minutes; on a processor without
bfloat16 arithmetic the second half takes most of an hour (`--dtypes float32` leaves it out). Needs 4 GB of memory.
"""

from __future__ import annotations

import argparse
import gc
import inspect
from collections.abc import Callable
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import torch
from harness import compare, report
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_posext

N, LENGTH, FACTOR = 2048, 4096, 4.0
STEPS = 8  # tokens of one timed run of decoding
ACROSS = 256  # tokens generated from N on, for `wrong_by`
DECODING = "decoding"
HOST = "transformers dynamic"
# Arm -> the arm that it is compared with, method and whether the factor follows the length.
ARMS: dict[str, tuple[str, str, bool]] = {
    "yarn": ("yarn", "yarn", False),
    "yarn (dynamic)": ("yarn", "yarn", True),
    "ntk": ("ntk", "ntk", False),
    "ntk (dynamic)": ("ntk", "ntk", True),
    "dynamic_ntk": ("ntk", "dynamic_ntk", True),
    HOST: ("ntk", "", False),
}
Model = LlamaForCausalLM
SIZES: dict[str, dict[str, int]] = {
    "small": {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
    "small-mha": {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
    "llama-3-8b-layer": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}  # fmt: skip


def arguments() -> argparse.Namespace:
    """Those of every benchmark, and the model's; the threads are set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="with those they are compared with")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of decoding; a third as many of one pass")
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    return parsed


def build(arm: str, size: str, dtype: torch.dtype) -> Model:
    """A Llama with weights so large that its random attention looks somewhere, patched as an arm."""
    _, method, dynamic = ARMS[arm]
    own = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": FACTOR}} if arm == HOST else {}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, max_position_embeddings=N, initializer_range=0.05, **SIZES[size], **own,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(dtype)
    return hf_posext.patch_model(model, method, FACTOR, dynamic=dynamic) if method else model


def arguments_of(model: Model, cache: DynamicCache) -> dict[str, Any]:
    """A cache under the name that the installed transformers has for it."""
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}


def one_pass(model: Model, tokens: torch.Tensor) -> Callable[[], Any]:
    """One pass over all tokens."""
    return torch.inference_mode()(lambda: model(tokens, use_cache=False, logits_to_keep=1))


@torch.inference_mode()
def filled(model: Model, tokens: torch.Tensor) -> DynamicCache:
    """A cache that holds some tokens. Short text goes first: transformers' arm starts from its own frequencies then."""
    model(tokens[:, :8], use_cache=False)
    cache = DynamicCache(config=model.config)
    model(tokens, **arguments_of(model, cache), logits_to_keep=1)
    return cache


def decode(model: Model, cache: DynamicCache, tokens: torch.Tensor) -> Callable[[], Any]:
    """A few steps on top of a cache, which goes on growing from run to run."""
    rest = cycle(tokens[:, LENGTH:].split(1, dim=1))
    given = arguments_of(model, cache)
    return torch.inference_mode()(lambda: [model(next(rest), **given).logits for _ in range(STEPS)])


@torch.inference_mode()
def wrong_by(model: Model, tokens: torch.Tensor) -> float:
    """Largest difference in logits between N tokens and some more with a cache, and one pass over all of them."""
    text = tokens[:, : N + ACROSS]
    given = arguments_of(model, filled(model, text[:, :N]))
    steps = [model(token, **given).logits for token in text[:, N:].split(1, dim=1)]
    model(text[:, :8], use_cache=False)
    whole = model(text, use_cache=False, logits_to_keep=ACROSS).logits
    return float((torch.cat(steps, dim=1).float() - whole.float()).abs().max())


def prepare(arm: str, size: str, dtype: torch.dtype, tokens: torch.Tensor) -> tuple[Model, Callable[[], Any], int]:
    """A model, its run of decoding after a first one, and the most bytes that torch held for both while it decoded."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model = build(arm, size, dtype)
        run = decode(model, filled(model, tokens[:, :LENGTH]), tokens)
        with torch.profiler.record_function(DECODING):
            run()
    events = profile.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == DECODING)
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held = accumulate(size for _, size in changes)
    return model, run, max(total for (at, _), total in zip(changes, held, strict=True) if at >= begin)


def measure(size: str, names: list[str], dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """One row for each arm in one precision."""
    wanted = {*names, *(ARMS[name][0] for name in names)}
    arms = {name: ARMS[name] for name in ARMS if name in wanted}
    tokens = torch.randint(0, 4096, (1, LENGTH + 512), generator=torch.Generator().manual_seed(0))
    models, runs, peaks = {}, {}, {}
    for arm in arms:
        models[arm], runs[arm], peaks[arm] = prepare(arm, size, dtype, tokens)
    steps = compare(runs, rounds=rounds)
    runs.clear()
    wrong = {arm: wrong_by(model, tokens) for arm, model in models.items()}
    passes = compare(
        {arm: one_pass(model, tokens[:, :LENGTH]) for arm, model in models.items()},
        rounds=max(1, rounds // 3),
        warmup=0 if dtype == torch.bfloat16 else 1,
    )
    return [
        {
            "arm": arm,
            "dtype": str(dtype).removeprefix("torch."),
            "size": size,
            "versus": versus,
            "decode_ms": 1000 * steps[arm] / STEPS,
            "decode_ratio": steps[arm] / steps[versus],
            "peak_mb": peaks[arm] / 1e6,
            "peak_ratio": peaks[arm] / peaks[versus],
            "pass_s": passes[arm],
            "pass_ratio": passes[arm] / passes[versus],
            "wrong_by": wrong[arm],
        }
        for arm, (versus, _, _) in arms.items()
    ]


def main() -> None:
    """Prints one row for each arm and precision."""
    options = arguments()
    dtypes = [getattr(torch, name) for name in options.dtypes]
    rows = [row for dtype in dtypes for row in measure(options.size, options.arms, dtype, options.rounds)]
    report("dynamic_scaling", rows, options.out)


if __name__ == "__main__":
    main()
