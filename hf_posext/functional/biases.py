"""What is added to attention logits: slopes of linear biases, and buckets of relative ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_posext.arguments import check_flag, check_positive
from hf_posext.functional._checks import check_precision, check_whole


def alibi_slopes(heads: int, bias_max: float = 8.0) -> Tensor:
    """Slope of each head, [H] float64 on the CPU.

    A power of two: 2^(-bias_max h / H) for h = 1, ..., H. Any other H: the slopes of the power of two below, and then
    every second one of the power of two above, as in the authors' code. The order is not monotonic then.

    Args:
        heads: H >= 1, all heads of the layer, also where a device holds a part of them.
        bias_max: exponent of the last head of a power of two.

    Raises:
        TypeError, ValueError: a bad value.

    Source: ALiBi (arXiv 2108.12409), sec. 3, and the published code for other head counts.
    """
    heads, exponent = check_whole("heads", heads), check_positive("bias_max", bias_max)
    below = 2 ** math.floor(math.log2(heads))
    slopes = 2.0 ** (-exponent * torch.arange(1, below + 1, dtype=torch.float64, device="cpu") / below)
    if below == heads:
        return slopes
    return torch.cat((slopes, alibi_slopes(2 * below, exponent)[0::2][: heads - below]))


def relative_buckets(distances: Tensor, *, bidirectional: bool, buckets: int = 32, max_distance: int = 128) -> Tensor:
    """Bucket of each distance as T5 numbers them, from 0 to B - 1.

    Each side has n buckets, and E = n // 2 of them hold one distance each. The bucket of d tokens is d for d < E, else
    min(n - 1, E + floor((n - E) ln(d / E) / ln(max_distance / E))).

    Args:
        distances: [...] key position - query position, whole or fractional (a distance divided by s, say).
        bidirectional: whether keys ahead of the query have n = B / 2 buckets of their own, after those of the keys
            behind it; if not, n = B and keys ahead share bucket 0 with the query itself.
        buckets: B, even in bidirectional attention.
        max_distance: tokens from which on all distances share the last bucket.

    Returns:
        [...] int64. Logarithms are taken in float32 as in T5's own code, so that no distance changes its bucket.

    Raises:
        TypeError, ValueError: a bad value; sizes from which no buckets follow.

    Source: T5 (arXiv 1910.10683), sec. 2.1, and its published code.
    """
    sides = 2 if check_flag("bidirectional", bidirectional) else 1
    side, left = divmod(check_whole("buckets", buckets, 2 * sides), sides)
    if left:
        raise ValueError(f"`buckets` must be even in bidirectional attention, got {buckets}. Take {buckets + 1}.")
    near = side // 2
    if check_whole("max_distance", max_distance) <= near:
        raise ValueError(
            f"`max_distance` must be more than {near} tokens, which {buckets} buckets hold one by one, got "
            f"{max_distance}. Raise it or take fewer buckets."
        )
    signed = check_precision("distances", distances).float()
    reach = signed.abs() if bidirectional else (-signed).clamp(min=0)
    growth = torch.log(reach.clamp(min=near) / near) / math.log(max_distance / near) * (side - near)
    places = torch.where(reach < near, reach, (near + growth.floor()).clamp(max=side - 1)).long()
    return places + side * (signed > 0) if bidirectional else places
