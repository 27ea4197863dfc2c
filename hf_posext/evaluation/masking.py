"""Which tokens of a document are masked, and the windows in which a masked LM is asked for them: no model, no text.

Masks belong to a document, not to a window: whatever is measured, with whatever model and context length, a token is
masked in the same draw. **Context length T is the number of tokens fed to the model at most**, special tokens included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_posext.evaluation.windows import endpoints

NEEDS_MASK = (
    "A masked LM needs a tokenizer with a mask token, {what}. Give the tokenizer of this model, which must be a "
    "masked LM."
)
FINE = 2.0**-53  # of the 64 bits of a hash the upper 53 make a float in [0, 1)


@dataclass(frozen=True)
class Frame:
    """What a tokenizer puts around a text, and in place of a masked token.

    Attributes:
        prefix: ids in front of a text.
        suffix: ids after it.
        mask: id of the mask token.
        special: ids that are never masked, the unknown token among them.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    mask: int
    special: tuple[int, ...]

    @property
    def size(self) -> int:
        """Special tokens in each window."""
        return len(self.prefix) + len(self.suffix)

    def strip(self, ids: Tensor) -> Tensor:
        """A document without the special tokens around it, which each window gets again."""
        before, after = len(self.prefix), len(ids) - len(self.suffix)
        if tuple(ids[:before].tolist()) == self.prefix:
            ids, after = ids[before:], after - before
        return ids[:after] if self.suffix and tuple(ids[max(0, after) :].tolist()) == self.suffix else ids

    def around(self, body: Tensor) -> Tensor:
        """The body of a window with its special tokens."""
        return torch.cat([body.new_tensor(self.prefix), body, body.new_tensor(self.suffix)])


@dataclass(frozen=True, eq=False)
class MaskedWindow:
    """One pass of a masked LM.

    Attributes:
        document: index of the document that the window was cut from.
        fed: token ids with mask tokens among them, int64 [<= T], special tokens included.
        rows: indices into `fed` of the masked tokens that are scored, int64 [targets], ascending.
        targets: the ids that stood there, int64 [targets].
    """

    document: int
    fed: Tensor
    rows: Tensor
    targets: Tensor


MaskedPlan = dict[int, list[MaskedWindow]]  # context length -> windows


def frame_of(tokenizer: Any) -> Frame:
    """Mask token and special tokens of a tokenizer; those around a text are found by encoding one.

    Raises:
        ValueError: no tokenizer, or one without a mask token.
    """
    if tokenizer is None:
        raise ValueError(NEEDS_MASK.format(what="also where documents are token ids; got None"))
    if getattr(tokenizer, "mask_token_id", None) is None:
        raise ValueError(NEEDS_MASK.format(what=f"and {type(tokenizer).__name__} has none"))
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    start = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    prefix, suffix = whole[:start], whole[start + len(bare) :]
    return Frame(tuple(prefix), tuple(suffix), int(tokenizer.mask_token_id), tuple(tokenizer.all_special_ids))


def draws_of(ids: Tensor, *, seed: int, mask_share: float, draws: int, special: Sequence[int] = ()) -> Tensor:
    """The draw in which each token is masked, int64 [tokens]; -1 for none.

    A hash of seed and document gives each position a number in [0, 1): those below `mask_share` are masked in draw 0,
    those from there to twice that in draw 1, and so on. So no token is masked twice, and fewer draws are the first of
    more.

    Args:
        ids: the document, int64 [tokens].
        seed: another one gives other masks.
        mask_share: share of the tokens that one draw masks, at most 1 / `draws`.
        draws: how many.
        special: ids that are never masked.
    """
    state = hashlib.shake_256(f"{seed}:".encode() + ids.numpy().astype("<i8").tobytes())
    uniform = (np.frombuffer(state.digest(8 * len(ids)), "<u8") >> np.uint64(11)) * FINE
    found = torch.from_numpy((uniform / mask_share).astype(np.int64))
    never = torch.isin(ids, ids.new_tensor(special)) | (found >= draws)
    return torch.where(never, -1, found)


def default_targets(context_lengths: Iterable[int], trained_length: int | None, frame: Frame) -> int:
    """Tokens that a window of the longest context has room for in whole windows of the shortest, N among them.

    So windows of each length that is a multiple of the shortest cover them without a rest, each inside a longer one.
    """
    lengths = [*context_lengths]
    shortest = min([*lengths, trained_length or max(lengths)])
    return max(lengths) // shortest * (shortest - frame.size)


def masked_windows(
    documents: Sequence[Tensor],
    context_lengths: Iterable[int],
    *,
    frame: Frame,
    targets: int,
    endpoints_per_document: int,
    mask_share: float,
    draws: int,
    seed: int,
) -> tuple[MaskedPlan, list[int]]:
    """The same masked tokens seen with contexts of each length: those among `targets` tokens before each endpoint.

    Args:
        documents: token ids, each int64 [tokens], with or without the special tokens around them.
        context_lengths: context lengths in tokens.
        frame: mask token and special tokens.
        targets: tokens before each endpoint among which the masked ones are scored.
        endpoints_per_document: places in a document where targets end, evenly spread from the first that is deep enough
            for the longest context to the last token; fewer where targets would overlap.
        mask_share: as in `draws_of`.
        draws: as in `draws_of`; each is a pass of its own.
        seed: as in `draws_of`.

    Returns:
        Context length -> windows, whose targets are the same in the same order for each length; and the indices of
        documents that are too short or have no masked token among their targets.

    Raises:
        ValueError: a context length that holds special tokens only.
    """
    lengths = sorted(set(context_lengths))
    if lengths[0] <= frame.size:
        raise ValueError(
            f"`context_lengths` must be more than the {frame.size} special tokens of each window, got {lengths[0]}."
        )
    deepest = max(targets, lengths[-1] - frame.size)
    windows: MaskedPlan = {length: [] for length in lengths}
    skipped = []
    for index, document in enumerate(documents):
        ids = frame.strip(document)
        drawn = draws_of(ids, seed=seed, mask_share=mask_share, draws=draws, special=frame.special)
        ends = endpoints(len(ids), deepest - 1, targets, endpoints_per_document)
        for length in lengths:
            windows[length] += [
                window
                for end in ends
                for draw in range(draws)
                for window in _cover(index, ids, drawn == draw, end + 1 - targets, end + 1, length, frame)
            ]
        if not windows[lengths[0]] or windows[lengths[0]][-1].document != index:
            skipped.append(index)
    return windows, skipped


def digest_of(windows: Iterable[MaskedWindow]) -> str:
    """A fingerprint of what is scored: documents and ids of all targets in order, in whatever windows they are."""
    rows = [torch.stack([torch.full_like(window.targets, window.document), window.targets], 1) for window in windows]
    return hashlib.sha256(torch.cat(rows).numpy().tobytes()).hexdigest()[:16]


def _cover(
    index: int, ids: Tensor, masked: Tensor, start: int, stop: int, length: int, frame: Frame
) -> Iterator[MaskedWindow]:
    """Windows of one length in which every masked token from `start` to `stop` is scored once.

    The tokens are split evenly into as few parts as the length allows. A window ends with its part; one that would
    begin before `start` is moved there, unless it holds all parts: then it begins as early as it can.
    """
    room = length - frame.size
    parts = -(-(stop - start) // room)
    edges = [start + part * (stop - start) // parts for part in range(parts + 1)]
    for first, after in pairwise(edges):
        begin = after - room if parts == 1 else max(start, after - room)
        body, hidden = ids[begin : begin + room], masked[begin : begin + room]
        places = torch.arange(begin, begin + room)
        rows = torch.nonzero(hidden & (places >= first) & (places < after)).flatten()
        if len(rows):
            fed = frame.around(torch.where(hidden, frame.mask, body))
            yield MaskedWindow(index, fed, rows + len(frame.prefix), body[rows])
