"""Attention with remapped far distances (SelfExtend, ReRoPE) against plain attention of the same shapes.

    python recipes/benchmarks/remapped.py --threads 1
    python recipes/benchmarks/remapped.py --parts prefill --lengths 2048 --dtypes float32 --shapes 8/8x64

Arms, which take turns: plain attention; two regions, both views given; two regions and the rotation of the far views;
and up to 2048 tokens two whole score matrices. Bars for the second, in prefill: at most 1.7 of plain at 2048 tokens and
1.3 from 8192 on. Its memory grows with the length: `peak` is the largest sum of tensors alive beyond the inputs, in
megabytes, without the workspace inside the kernels. Decoding and the chunk read a cache of both key views. All parts
take about an hour on one thread, most of it in prefill from 8192 on and in training in bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import compare, report
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from hf_posext.attention.layout import Layout
from hf_posext.attention.remap import two_regions
from hf_posext.attention.turning import turn

WINDOWS = (256, 512, 1024, 2048)
SHAPES = ("8/8x64", "8/8x128", "8/2x64")
LONGEST_EAGER, LONGEST_TRAINING, CHUNK = 2048, 4096, 512


class Case:
    """Random states of one shape, for one pass forward or, in training, forward and backward."""

    def __init__(self, shape: str, length: int, keys: int, dtype: torch.dtype, training: bool) -> None:
        heads, _, rest = shape.partition("/")
        groups, _, width = rest.partition("x")
        self.width, self.training, self.length, self.keys = int(width), training, length, keys
        self.query, self.far_query = (self.states(int(heads), length, dtype) for _ in range(2))
        self.key, self.far_key, self.value = (self.states(int(groups), keys, dtype) for _ in range(3))
        self.weight = torch.randn_like(self.query)
        half = self.width // 2
        self.layout = Layout("head", slice(0, half, 1), slice(half, self.width, 1), None, None, self.width, self.width)
        angles = torch.rand(1, 1, max(length, keys), half) * 100
        self.cosine, self.sine = angles.cos(), angles.sin()

    def states(self, heads: int, tokens: int, dtype: torch.dtype) -> Tensor:
        """[1, H, L, D] in the layout in which models make them."""
        return torch.randn(1, tokens, heads, self.width).to(dtype).transpose(1, 2).requires_grad_(self.training)

    def finish(self, output: Tensor, *inputs: Tensor) -> None:
        """The backward pass, if there is one."""
        if self.training:
            torch.autograd.grad(output, inputs, self.weight)

    def plain(self) -> None:
        """Causal attention; a chunk needs a mask."""
        mask = None
        if 1 < self.length < self.keys:
            mask = torch.ones(self.length, self.keys, dtype=torch.bool).tril(self.keys - self.length)
        output = scaled_dot_product_attention(
            self.query, self.key, self.value, mask, is_causal=self.length == self.keys, enable_gqa=True
        )
        self.finish(output, self.query, self.key, self.value)

    def regions(self, window: int) -> None:
        """Both views given."""
        views = self.query, self.key, self.far_query, self.far_key
        self.finish(two_regions(*views, self.value, window, self.width**-0.5), *views, self.value)

    def turned(self, window: int) -> None:
        """The far views are made from the near ones."""
        far_query = self.turn(self.query)
        far_key = self.turn(self.key) if self.length == self.keys else self.far_key
        output = two_regions(self.query, self.key, far_query, far_key, self.value, window, self.width**-0.5)
        self.finish(output, self.query, self.key, self.value)

    def turn(self, states: Tensor) -> Tensor:
        """One view from the other; into new memory where no gradient is wanted."""
        tokens = states.shape[2]
        out = None if self.training else torch.empty_like(states)
        return turn(states, self.cosine[:, :, :tokens], self.sine[:, :, :tokens], self.layout, out)

    def eager(self, window: int) -> None:
        """Two whole score matrices, of which each pair takes one."""
        copies = self.query.shape[1] // self.key.shape[1]
        key, far_key, value = (each.repeat_interleave(copies, 1) for each in (self.key, self.far_key, self.value))
        apart = torch.arange(self.keys - self.length, self.keys)[:, None] - torch.arange(self.keys)
        logits = torch.where(apart < window, self.query @ key.mT, self.far_query @ far_key.mT) * self.width**-0.5
        weights = logits.masked_fill(apart < 0, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
        self.finish(weights @ value, self.query, self.key, self.far_query, self.far_key, self.value)


def peak(run: Callable[[], Any]) -> float:
    """Most megabytes of tensors alive at once while it runs, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    alive = highest = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            highest = max(highest, alive)
    return highest / 1e6


def measure(part: str, case: Case, about: dict[str, Any], windows: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """One row for each window."""
    rows = []
    for window in windows:
        if window >= case.keys:
            continue
        arms: dict[str, Callable[[], Any]] = {
            "plain": case.plain,
            "regions": lambda window=window: case.regions(window),
            "turned": lambda window=window: case.turned(window),
        }
        if part == "prefill" and case.keys <= LONGEST_EAGER:
            arms["eager"] = lambda window=window: case.eager(window)
        seconds = compare(arms, rounds=rounds, warmup=1)
        ratios = {f"{name}/plain": seconds[name] / seconds["plain"] for name in arms if name != "plain"}
        memory = {f"peak_{name}": peak(run) for name, run in arms.items()} if part == "prefill" else {}
        rows.append({"part": part, **about, "window": window, "plain_ms": seconds["plain"] * 1e3, **ratios, **memory})
        report("remapped", rows[-1:], None)
    return rows


def main() -> None:
    """Times the parts that are asked for; each row is printed as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--parts", nargs="+", default=["prefill", "training", "chunk", "decode"])
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens; for chunk and decode, keys in the cache")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="query heads / key heads x width")
    parser.add_argument("--windows", type=int, nargs="+", default=WINDOWS)
    parser.add_argument("--rounds", type=int, help="fewer for the longest texts unless it is given")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for part in options.parts:
        cached = part in ("chunk", "decode")
        for keys in options.lengths or ((4096, 16384) if cached else (1024, 2048, 4096, 8192, 16384)):
            if part == "training" and keys > LONGEST_TRAINING and not options.lengths:
                continue
            length = {"chunk": CHUNK, "decode": 1}.get(part, keys)
            rounds = options.rounds or (51 if part == "decode" else 7 if length * keys <= 2048**2 else 3)
            for dtype in options.dtypes:
                for shape in options.shapes:
                    torch.manual_seed(0)
                    case = Case(shape, length, keys, getattr(torch, dtype), part == "training")
                    about = {"shape": shape, "dtype": dtype, "queries": length, "keys": keys}
                    rows += measure(part, case, about, options.windows, rounds)
    if options.out is not None:
        report("remapped", rows, options.out)


if __name__ == "__main__":
    main()
