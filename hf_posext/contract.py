"""Plain data that methods and mechanisms share: where a position encoding lives, what it reads as, how it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

MECHANISMS = ("rotary", "learned", "sinusoidal", "alibi", "relative_bias", "grid", "attention")


@dataclass(frozen=True)
class Site:
    """One module of one model in which a mechanism lives.

    Attributes:
        mechanism: one of `MECHANISMS`.
        name: dotted path of the module in the model.
        module: the module itself.
        config: the config of the sub-model that owns the module.
        label: layer type that the site serves ("full_attention", ...), empty where all layers share it.
        field: name of the buffer or parameter that holds the encoding.
    """

    mechanism: str
    name: str
    module: nn.Module
    config: PreTrainedConfig
    label: str
    field: str

    @property
    def is_local(self) -> bool:
        """Whether the site serves layers that see only a window (sliding or chunked attention)."""
        return self.label.startswith(("sliding", "chunked", "local", "window"))

    def __str__(self) -> str:
        """Path of the module, with the layer type where there is one."""
        return f"{self.name}[{self.label}]" if self.label else self.name


@dataclass(frozen=True)
class Spectrum:
    """What a rotary site reads as.

    Attributes:
        inv_freq: [F] float64 on CPU, radians per token, in the order of the module.
        attention_scaling: what cos and sin are multiplied by.
        trained_length: N in tokens, of the model as given.
        base: theta of the geometric spectrum that the checkpoint was built from.
    """

    inv_freq: Tensor
    attention_scaling: float
    trained_length: int
    base: float

    @property
    def rotated_width(self) -> int:
        """R = 2F, channels of a head that rotate."""
        return 2 * self.inv_freq.numel()


@dataclass(frozen=True)
class RotaryChange:
    """What a method makes of a spectrum.

    Attributes:
        inv_freq: [F] (or [B, F] for a factor per row) float64, radians per token.
        attention_scaling: multiplier of cos and sin.
        logit_scale: multiplier of the whole attention logit, for a temperature that reaches channels without rotation.
    """

    inv_freq: Tensor
    attention_scaling: float | Tensor
    logit_scale: float | Tensor = 1.0

    def is_identity(self, spectrum: Spectrum) -> bool:
        """Whether nothing would change, to the last bit of the float32 frequencies."""
        return (
            torch.equal(self.inv_freq.float(), spectrum.inv_freq.float())
            and float(self.attention_scaling) == spectrum.attention_scaling
            and float(self.logit_scale) == 1.0
        )


@dataclass(frozen=True)
class PositionTable:
    """What a site of learned or sinusoidal rows reads as.

    Attributes:
        rows: [N, W] float64 on CPU, one for each position; rows that stand for no position are left out.
        reserved: how many of those there are, in front.
        target_length: rows that the table is to have for positions, 0 where only its present ones are asked for.
        at: what the table says at any positions, [P] float64 -> [P, W] float64; None where only its rows are known.
    """

    rows: Tensor
    reserved: int
    target_length: int = 0
    at: Callable[[Tensor], Tensor] | None = None

    @property
    def trained_length(self) -> int:
        """N in tokens, of this table."""
        return len(self.rows)


@dataclass(frozen=True)
class Host:
    """What the attention of a model reads as, where a method acts on it alone.

    Attributes:
        trained_length: N in tokens, of the model as given.
    """

    trained_length: int


@dataclass(frozen=True)
class GridTable:
    """What the table of a vision model reads as, which has a row for each patch of a square image.

    Attributes:
        rows: [R, W] float64 on CPU, those of patches last, line by line.
        trained_length: N in pixels per side of an image.
        patch: pixels per side of a patch.
        at: T in pixels per side -> [R', W] float64, what the model's own code makes of the table for such images.
    """

    rows: Tensor
    trained_length: int
    patch: int
    at: Callable[[int], Tensor]


Reading = Spectrum | PositionTable | Host | GridTable


@dataclass(frozen=True)
class TableChange:
    """What a method makes of a table of positions.

    Attributes:
        rows: [T, W] float64, one for each position.
        old: [T] int64, the old row that each new one is to the last bit, -1 where it is another.
        keeps_short: whether text that the old table had rows for is read as before.
        is_scaled: whether old rows stand at positions times a factor.
        is_fixed: whether the rows are a formula rather than weights, and are never trained.
        freezes_old: whether training leaves rows alone that are old ones.
    """

    rows: Tensor
    old: Tensor
    keeps_short: bool = False
    is_scaled: bool = False
    is_fixed: bool = False
    freezes_old: bool = False


@dataclass(frozen=True)
class GridChange:
    """What a method makes of the table of a vision model.

    Attributes:
        rows: [R', W] float64, the whole table.
        image: T in pixels per side of an image.
    """

    rows: Tensor
    image: int


@dataclass(frozen=True)
class BucketedBias(TableChange):
    """The table becomes longer, and the logits get a bias that is learned for each head and bucket of distances.

    Attributes:
        buckets: of distances, half of them for keys behind the query in bidirectional attention.
        max_distance: in tokens, from which on all distances share a bucket.
    """

    buckets: int = 32
    max_distance: int = 128


@dataclass(frozen=True)
class DistanceChange:
    """Distances are divided before a bias is made of them: slopes of a linear bias by s, buckets of d / s.

    Attributes:
        divisor: s, a number or [B] or [B, L] for one per row or token.
    """

    divisor: float | Tensor


@dataclass(frozen=True)
class NoPosition:
    """The site says nothing about positions: no rotation, or rows of zeros."""


@dataclass(frozen=True)
class LinearBias(NoPosition):
    """The site says nothing, and the logits that it served get -slope x distance instead.

    Attributes:
        slopes: number of heads H -> slope of each, [H] float64 >= 0.
        after: the same for keys behind the query, in bidirectional attention.
        learned: whether the slopes are parameters of the attention modules, to be trained.
    """

    slopes: Callable[[int], Tensor]
    after: Callable[[int], Tensor]
    learned: bool = False


@dataclass(frozen=True)
class Remap:
    """Distances of at least `window` tokens are read as other ones; nearer ones stay as they are.

    A query at p meets a key at p' as if they stood at f(p) + window - f(window) and f(p'), mirrored behind the query.

    Attributes:
        window: W in tokens.
        group: tokens that share a place, f(p) = floor(p / group); 0 for no grouping.
        rate: f(p) = rate x p, without grouping.
        trained_length: N in tokens.
        follows: whether the group is the smallest with which the text up to each query fits into N.
        logn: whether logits are multiplied by max(1, ln(p + 1) / ln N) at query p.
    """

    window: int
    group: int
    rate: float
    trained_length: int
    follows: bool = False
    logn: bool = False


@dataclass(frozen=True)
class Window:
    """Keys at a distance of `width` tokens or more are not seen, but for the first `sinks` of a text."""

    width: int
    sinks: int


Change = RotaryChange | TableChange | GridChange | DistanceChange | NoPosition | Remap | Window


@dataclass(frozen=True)
class MethodInfo:
    """One row of `list_methods`: what a method is called, where it has a meaning, and where it comes from."""

    name: str
    aliases: tuple[str, ...]
    mechanisms: tuple[str, ...]
    summary: str
    paper: str
    options: dict[str, Any]
