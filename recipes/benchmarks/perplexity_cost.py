"""What an evaluation costs beside the loop that people write by hand, for each protocol.

    python recipes/benchmarks/perplexity_cost.py --threads 1

The loop by hand feeds one window after the other to the model, takes the logits of all its tokens, and scores those
that the protocol names. Both give the same NLL, which is checked. A random Llama of 4 layers of width 192 with a
vocabulary of 32,768 on a random document; and a random Gemma-3 (five sixths of its layers with a window of 512 tokens)
that is read at once and in blocks of 1024 tokens with a cache. Tokens read are counted beside the time. Four minutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from harness import arguments, compare, report
from torch import Tensor, nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import hf_posext

VOCABULARY = 32_768
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 16_384, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
Window = tuple[Tensor, int]  # token ids, and how many of the last ones are scored

POWERS = [256, 512, 1024, 2048]
GRID = [*range(256, 2049, 256)]
TARGETS = 128


def by_hand(model: nn.Module, windows: Iterable[Window]) -> tuple[float, int]:
    """Mean NLL in nats per scored token, and how many tokens were fed."""
    total, scored, fed = 0.0, 0, 0
    with torch.no_grad():
        for ids, count in windows:
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
            nll = nn.functional.cross_entropy(logits[-count:], ids[-count:], reduction="sum")
            total, scored, fed = total + float(nll), scored + count, fed + len(ids) - 1
    return total / scored, fed


def tail(documents: list[Tensor], lengths: list[int], ends: Callable[[int], list[int]]) -> Iterator[Window]:
    """The same targets with contexts of each length."""
    for length in lengths:
        for ids in documents:
            yield from ((ids[end - length : end + 1], TARGETS) for end in ends(len(ids)))


def full(documents: list[Tensor], lengths: list[int]) -> Iterator[Window]:
    """A pass for each length."""
    for length in lengths:
        yield from ((ids[: length + 1], length) for ids in documents)


def rolling(documents: list[Tensor], length: int, stride: int) -> Iterator[Window]:
    """Windows that move by a stride, each scoring what is new."""
    for ids in documents:
        scored, count = 1, length
        while scored < len(ids):
            count = min(count, len(ids) - scored)
            scored += count
            yield ids[max(0, scored - 1 - length) : scored], count
            count = stride


def spread(length: int) -> list[int]:
    """Two endpoints: the first that is deep enough, and the last token."""
    return [POWERS[-1], length - 1]


def every_grid_step(length: int) -> list[int]:
    """Four endpoints on the grid of the lengths."""
    return [GRID[-1], *(length - 1 - 256 * step for step in (2, 1, 0))]


def cases() -> dict[str, tuple[list[Window], dict[str, Any]]]:
    """Name -> the windows of the loop by hand, and what `perplexity` is asked for."""
    long, short = texts(1, 6000), texts(1, GRID[-1] + 1 + 3 * 256 + 100)
    two = {"context_lengths": POWERS, "endpoints_per_document": 2}
    four = {"context_lengths": GRID, "endpoints_per_document": 4}
    return {
        "tail, 4 lengths, 2 endpoints far apart": ([*tail(long, POWERS, spread)], {"documents": long, **two}),
        "tail, 8 lengths, 4 endpoints 256 apart": ([*tail(short, GRID, every_grid_step)], {"documents": short, **four}),
        "the same, with a cache in blocks of 1024": (
            [*tail(short, GRID, every_grid_step)],
            {"documents": short, "prefill_chunk_size": 1024, **four},
        ),
        "full, 4 lengths": ([*full(long, POWERS)], {"documents": long, "protocol": "full", "context_lengths": POWERS}),
        "sliding, 1024 by 256": (
            [*rolling(long, 1024, 256)],
            {"documents": long, "protocol": "sliding", "context_lengths": [1024], "stride": 256},
        ),
        "disjoint, 1024": (
            [*rolling(long, 1024, 1024)],
            {"documents": long, "protocol": "disjoint", "bos": "none", "context_lengths": [1024]},
        ),
    }


def texts(count: int, length: int) -> list[Tensor]:
    """Random documents."""
    return list(torch.randint(0, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(0)))


def measured(model: nn.Module, documents: list[Tensor], **settings: Any) -> float:
    """Mean NLL over all lengths by `perplexity`, in nats per scored token."""
    found = hf_posext.perplexity(
        model, None, documents, targets=TARGETS, bars=[], resamples=1, progress=False, **settings
    ).measurements
    return sum(sum(each.nll) for each in found) / sum(sum(each.tokens) for each in found)


class Counter:
    """Tokens that a model has read."""

    def __init__(self, model: nn.Module) -> None:
        self.tokens = 0
        model.get_decoder().layers[0].register_forward_hook(self._note)

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.tokens += inputs[0].shape[:2].numel() if inputs else 0


def row(model: nn.Module, name: str, windows: list[Window], settings: dict[str, Any]) -> dict[str, Any]:
    """Times one protocol both ways, and checks that the numbers agree."""
    (expected, fed), counter = by_hand(model, windows), Counter(model)
    found = measured(model, **settings)
    if not math.isclose(found, expected, rel_tol=1e-5):
        raise SystemExit(f"{name}: {found} by hf_posext, {expected} by hand")
    tokens = counter.tokens
    seconds = compare(
        {"ours": lambda: measured(model, **settings), "hand": lambda: by_hand(model, windows)}, rounds=3, warmup=1
    )
    return {"what": name, "tokens_by_hand": fed, "tokens": tokens, "seconds_by_hand": seconds["hand"],
            "ratio": seconds["ours"] / seconds["hand"]}  # fmt: skip


def blocks(length: int) -> dict[str, Any]:
    """Times one long pass of a model with sliding layers, at once and in blocks."""
    torch.manual_seed(0)
    layers = {"num_hidden_layers": 6, "sliding_window": 512, "sliding_window_pattern": 6}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**{**SIZES, **layers})).eval()
    settings = {"documents": texts(1, length + 1), "context_lengths": [length], "endpoints_per_document": 1}
    arms = {str(size): lambda size=size: measured(model, prefill_chunk_size=size, **settings) for size in (None, 1024)}
    seconds = compare(arms, rounds=3, warmup=1)
    return {"what": f"sliding layers, {length} tokens in blocks of 1024", "tokens_by_hand": length, "tokens": length,
            "seconds_by_hand": seconds["None"], "ratio": seconds["1024"] / seconds["None"]}  # fmt: skip


def main() -> None:
    """Times all protocols and prints the ratios."""
    options = arguments(__doc__ or "")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=4)).eval()
    rows = [row(model, name, *case) for name, case in cases().items()]
    rows += [blocks(length) for length in (2048, 8192)]
    report("perplexity_cost", rows, options.out)


if __name__ == "__main__":
    main()
