"""The settings of an evaluation, validated, and the windows that each protocol cuts for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import ClassVar

from torch import Tensor

from hf_posext.arguments import check_choice, check_length, check_positive
from hf_posext.errors import unknown
from hf_posext.evaluation.windows import (
    Window,
    disjoint_windows,
    full_windows,
    sliding_windows,
    tail_windows,
    without_prefix,
)

PROTOCOLS = ("tail", "full", "sliding", "disjoint")
HONEST = ("truncate", "window")  # bars that a useful extension beats; anything beats `none` on long text
BARS = (*HONEST, "none")
MASKED = "masked"  # the protocol of masked LMs
STRIDE = 256  # tokens; the "S=256" of the papers

Plan = dict[int, list[Window]]  # context length -> windows


@dataclass(frozen=True, kw_only=True)
class Common:
    """Settings of every evaluation over context lengths; checked and completed when they are made.

    Attributes:
        protocol: says what is scored.
        context_lengths: in tokens, ascending.
        bars: names among those that the evaluation knows.
        text_column: where a row holds its text.
        max_documents: documents read at most; None reads all.
        batch_size: windows per forward pass.
        chunk: rows of hidden states that the head sees at a time.
        prefill_chunk_size: tokens fed at a time, with a cache of those before; None feeds all at once.
        seed: of the bootstrap.
        resamples: of the bootstrap.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of range.
    """

    known_bars: ClassVar[tuple[str, ...]] = BARS

    protocol: str
    context_lengths: Sequence[int]
    bars: Sequence[str]
    text_column: str
    max_documents: int | None
    batch_size: int
    chunk: int
    prefill_chunk_size: int | None = None
    seed: int
    resamples: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "chunk", "resamples"):
            self._set(name, check_count(name, getattr(self, name)))
        for name in ("max_documents", "prefill_chunk_size"):
            if getattr(self, name) is not None:
                self._set(name, check_count(name, getattr(self, name)))
        self._set("context_lengths", _lengths(self.context_lengths))
        self._set("bars", self._checked_bars())

    @property
    def longest(self) -> int:
        """The longest context length in tokens."""
        return self.context_lengths[-1]

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _checked_bars(self) -> list[str]:
        if isinstance(self.bars, str):
            raise TypeError(f"`bars` must be a list of names, got {self.bars!r}. Write bars=[{self.bars!r}].")
        for bar in self.bars:
            if bar not in self.known_bars:
                raise ValueError(unknown("bar", bar, self.known_bars))
        return list(dict.fromkeys(self.bars))


@dataclass(frozen=True, kw_only=True)
class Settings(Common):
    """Everything that says what is measured of a causal model, and how.

    Attributes:
        protocol: one of `PROTOCOLS`.
        targets: tokens scored at each endpoint; None but for `tail`.
        endpoints_per_document: endpoints in each document; None but for `tail`.
        stride: tokens by which a window moves, before the cap at the context length; None but for `sliding`.
        bos: `auto`, `none` or `every`.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of range, or without a meaning for the protocol.
    """

    targets: int | None
    endpoints_per_document: int | None
    stride: int | None
    bos: str

    def __post_init__(self) -> None:
        check_choice("protocol", self.protocol, PROTOCOLS)
        super().__post_init__()
        for name in ("targets", "endpoints_per_document"):
            count = check_count(name, getattr(self, name))
            self._set(name, count if self.protocol == "tail" else None)
        self._set("stride", self._checked_stride())
        if "truncate" in self.bars and self.protocol != "tail":
            raise ValueError(
                "The bar `truncate` has a meaning for the protocol `tail` only (all lengths have the same targets); "
                f"got `{self.protocol}`. Use protocol='tail', or bars=['window', 'none']."
            )

    def _checked_stride(self) -> int | None:
        if self.protocol == "sliding":
            return STRIDE if self.stride is None else check_length("stride", self.stride)
        if self.stride is not None:
            raise ValueError(
                f"`stride` has a meaning for the protocol `sliding` only, got {self.stride!r} for `{self.protocol}`."
            )
        return None


@dataclass(frozen=True, kw_only=True)
class MaskedSettings(Common):
    """Everything that says what is measured of a masked LM, and how.

    Attributes:
        protocol: `masked`.
        targets: tokens before each endpoint among which the masked ones are scored; None: as the longest context has.
        endpoints_per_document: endpoints in each document.
        mask_share: share of the tokens that are masked at a time.
        draws: passes over the same text, each with other tokens masked.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value out of range, or so many draws that tokens would be masked twice.
    """

    known_bars: ClassVar[tuple[str, ...]] = ("truncate", "none")

    protocol: str = MASKED
    targets: int | None
    endpoints_per_document: int
    mask_share: float
    draws: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("targets", "endpoints_per_document", "draws"):
            if not (self.targets is None and name == "targets"):
                self._set(name, check_count(name, getattr(self, name)))
        self._set("mask_share", check_positive("mask_share", self.mask_share))
        if self.mask_share >= 1:
            raise ValueError(f"`mask_share` must be below 1, got {self.mask_share!r}. BERT was trained with 0.15.")
        most = int(1 / self.mask_share + 1e-9)
        if self.draws > most:
            raise ValueError(
                f"`draws` must be at most {most} for a `mask_share` of {self.mask_share:g}, so that no token is masked "
                f"twice; got {self.draws}."
            )


def default_bars(protocol: str) -> list[str]:
    """Both honest bars where every length has the same targets; elsewhere none unless they are asked for."""
    return [*HONEST] if protocol == "tail" else []


def cut(
    settings: Settings,
    documents: Sequence[Tensor],
    bos: tuple[int | None, int | None],
    more_lengths: Iterable[int] = (),
) -> tuple[Plan, list[int]]:
    """Windows for each context length (for `full` the longest only), and the indices of documents that are too short.

    Args:
        settings: what to cut.
        documents: token ids, each int64 [tokens].
        bos: id in front of the first window of a document and of each later one.
        more_lengths: protocol `tail`: further context lengths for the same targets, none above the longest.

    Raises:
        ValueError: no document is as long as the longest context.
    """
    first, later = bos
    lengths = settings.context_lengths
    if settings.protocol == "tail":
        plan, skipped = tail_windows(
            documents,
            lengths,
            targets=settings.targets or 0,
            endpoints_per_document=settings.endpoints_per_document or 0,
            bos=first,
            more_lengths=more_lengths,
        )
        needed = settings.longest + (first is None)
    else:
        plan = {}
        for length in lengths[-1:] if settings.protocol == "full" else lengths:
            if settings.protocol == "full":
                plan[length], skipped = full_windows(documents, length, bos=first)
            elif settings.protocol == "disjoint":
                plan[length], skipped = disjoint_windows(documents, length, prefix=first, bos=later)
            else:
                plan[length], skipped = sliding_windows(
                    documents, length, min(settings.stride or length, length), bos=first
                )
        needed = settings.longest
    deepest = max(len(without_prefix(document, first)) for document in documents)
    if deepest < needed:
        raise ValueError(
            f"The longest context length is {settings.longest}, for which a document needs {needed} tokens; the "
            f"longest document has {deepest}. Lower `context_lengths` or give longer documents."
        )
    return plan, skipped


def _lengths(context_lengths: object) -> list[int]:
    """Positive whole numbers, sorted, each once."""
    if isinstance(context_lengths, str | Integral) or not isinstance(context_lengths, Iterable):
        raise TypeError(f"`context_lengths` must be a list of numbers such as [1024, 4096], got {context_lengths!r}.")
    found = sorted({check_length("context_lengths", length) for length in context_lengths})
    if not found:
        raise ValueError("`context_lengths` is empty. Give at least one length in tokens.")
    return found


def check_count(name: str, value: object) -> int:
    """A whole number >= 1 as int.

    Raises:
        TypeError: not a whole number (bool included).
        ValueError: below 1.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"`{name}` must be a whole number, got {value!r} of type {type(value).__name__}.")
    if value < 1:
        raise ValueError(f"`{name}` must be at least 1, got {value!r}.")
    return int(value)
