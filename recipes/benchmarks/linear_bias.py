"""Attention with a bias linear in the distance (ALiBi) against attention without one, both in torch's CPU kernel.

    python recipes/benchmarks/linear_bias.py --threads 1 --lengths 1024 2048 4096 --dtypes float32

`plain` is `scaled_dot_product_attention` without a bias, causal or not as the bias is; the other columns are ratios to
it: `linear` leaves out keys that provably weigh nothing, `unpruned` does not, and `matrix` is what a mask [1, H, L, S]
costs that was built ahead (where it has at most 2^28 entries). Slopes are ALiBi's, 2^-1 to 2^-8; states are random.
`largest` and `matrix_largest` are the largest tensors made, in numbers of S * H * D: constant where memory is linear in
the length. A chunk is 512 queries over a cache of the length; its `plain` needs the causal mask [L, S].

Bars: causal at most 1.05 at every length, and at most 0.9 from 4096 with keys left out; both directions at most 1.08;
decoding at most 1.04; linear memory. All of float32 takes about 40 minutes and bfloat16 without hardware for it many
times that, so name lengths, shapes, dtypes and kinds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import compare, report
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from hf_posext.attention.bias import causal_linear, distance_bias, symmetric_linear

SHAPES = {"8x64": (8, 8, 64), "8x128": (8, 8, 128), "8/2x128": (8, 2, 128)}
KINDS = ("causal", "both_ways", "chunk", "decode")
CHUNK = 512
BUDGET = 40.0  # seconds for one row of the table
Arms = dict[str, Callable[[], Any]]


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation returns, in numbers."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation; views count with the memory that they span."""
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, Tensor):
                self.numbers = max(self.numbers, result.untyped_storage().nbytes() // result.element_size())
        return results


def largest(run: Callable[[], Any], unit: int) -> float:
    """The largest tensor of a run, in units."""
    with Largest() as seen:
        run()
    return seen.numbers / unit


def outputs(kind: str, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The ways to compute one kind of attention."""
    (heads, length, width), size = query.shape[1:], key.shape[2]
    slopes = 2.0 ** -(8 / heads * torch.arange(1.0, heads + 1))
    scale = width**-0.5
    places = torch.arange(size)[None]
    plain = {"is_causal": True} if kind == "causal" else {}
    hidden = places[0] > torch.arange(size - length, size)[:, None]
    if kind == "chunk":
        plain = {"attn_mask": ~hidden}
    ways = {"plain": lambda: scaled_dot_product_attention(query, key, value, **plain, scale=scale, enable_gqa=True)}
    for name, prune in (("linear", True), ("unpruned", False)):
        if kind == "both_ways":
            ways[name] = lambda prune=prune: symmetric_linear(query, key, value, slopes, slopes, scale, prune=prune)
        else:
            ways[name] = lambda prune=prune: causal_linear(query, key, value, slopes, scale, prune=prune)
    if heads * length * size <= 2**28:
        mask = distance_bias(slopes, None, places[:, size - length :], places)
        mask = mask if kind == "both_ways" else mask.masked_fill_(hidden, -torch.inf)
        ways["matrix"] = lambda: scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    return ways


def row(kind: str, shape: str, size: int, dtype: torch.dtype, backward: bool) -> dict[str, Any]:
    """One row of the table."""
    heads, groups, width = SHAPES[shape]
    length = {"chunk": min(CHUNK, size), "decode": 1}.get(kind, size)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, count, tokens, width).to(dtype).requires_grad_(backward)
        for count, tokens in ((heads, length), (groups, size), (groups, size))
    )
    upstream = torch.randn(1, heads, length, width).to(dtype)

    def arm(way: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(way(), (query, key, value), upstream) if backward else way()

    arms = {name: arm(way) for name, way in outputs(kind, query, key, value).items()}
    with torch.set_grad_enabled(backward):
        start = time.perf_counter()
        sizes = {name: largest(run, heads * width * max(length, size)) for name, run in arms.items()}
        rounds = int(BUDGET / (time.perf_counter() - start))
        seconds = compare(arms, rounds=min(201 if kind == "decode" else 15, max(3, rounds)), warmup=1)
    table = {"kind": kind, "what": "both" if backward else "forward", "dtype": str(dtype)[6:], "shape": shape}
    ratios = {name: seconds[name] / seconds["plain"] for name in list(arms)[1:]}
    table |= {"length": size, "plain_seconds": seconds["plain"], **ratios, "largest": sizes["linear"]}
    return table | ({"matrix_largest": (heads * length * size) / (heads * width * size)} if "matrix" in arms else {})


def main() -> None:
    """Times every combination that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--what", nargs="+", choices=("forward", "both"), default=["forward", "both"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for kind in options.kinds:
        for what in options.what if kind in ("causal", "both_ways") else ["forward"]:
            for dtype in options.dtypes:
                for shape in options.shapes:
                    for length in options.lengths:
                        rows.append(row(kind, shape, length, getattr(torch, dtype), what == "both"))
                        report("", rows[-1:], None)
    if options.out is not None:
        report("linear_bias", rows, options.out)


if __name__ == "__main__":
    main()
