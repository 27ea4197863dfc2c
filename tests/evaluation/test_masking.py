"""Which tokens are masked, and in which windows they are scored, counted token by token."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posext.evaluation.masking import (
    Frame,
    MaskedWindow,
    default_targets,
    digest_of,
    draws_of,
    frame_of,
    masked_windows,
)
from tests.evaluation.masked_stubs import CLS, MASK, PAD, SEP, UNK, documents, draw_of, masking_tokenizer
from tests.evaluation.stubs import word_tokenizer

FRAME = Frame((CLS,), (SEP,), MASK, (PAD, UNK, CLS, SEP, MASK))
BARE = Frame((), (), MASK, ())
SETTINGS: dict[str, Any] = {"mask_share": 0.15, "draws": 6, "seed": 0}


def numbered(length: int, index: int = 0) -> Tensor:
    """A document in which token i is 10_000 (index + 1) + i, so that a window says where it was cut."""
    return torch.arange(length) + 10_000 * (index + 1)


def cut(
    docs: list[Tensor], lengths: list[int], targets: int, **changes: Any
) -> tuple[dict[int, list[MaskedWindow]], list[int]]:
    """Windows at one endpoint, all six draws."""
    settings = {"frame": FRAME, "endpoints_per_document": 1, **SETTINGS, **changes}
    return masked_windows(docs, lengths, targets=targets, **settings)


def scored(windows: list[MaskedWindow]) -> list[int]:
    """All targets, in order."""
    return [int(token) for window in windows for token in window.targets]


def text_of(window: MaskedWindow, frame: Frame = FRAME) -> list[int | None]:
    """The tokens of a window between its special ones, None where one is masked."""
    body = window.fed[len(frame.prefix) : len(window.fed) - len(frame.suffix)]
    return [None if token == MASK else int(token) for token in body]


def test_a_token_is_masked_in_the_draw_that_its_hash_says() -> None:
    (document,) = documents(200)
    expected = [draw if (draw := draw_of(document.tolist(), place)) < 4 else -1 for place in range(200)]
    assert draws_of(document, seed=0, mask_share=0.15, draws=4).tolist() == expected


@pytest.mark.parametrize(("share", "draws"), [(0.15, 6), (0.3, 3), (0.05, 20), (0.5, 2)])
def test_each_draw_masks_its_share(share: float, draws: int) -> None:
    drawn = draws_of(numbered(40_000), seed=1, mask_share=share, draws=draws)
    counts = torch.bincount(drawn[drawn >= 0], minlength=draws) / 40_000
    assert counts.tolist() == pytest.approx([share] * draws, abs=0.01)


def test_fewer_draws_are_the_first_of_more_and_another_seed_gives_others() -> None:
    few, many, other = (
        draws_of(numbered(500), seed=seed, mask_share=0.15, draws=draws) for seed, draws in ((0, 2), (0, 6), (1, 6))
    )
    assert torch.equal(few, torch.where(many < 2, many, -1))
    assert not torch.equal(many, other)


def test_special_tokens_are_never_masked_and_move_no_other_mask() -> None:
    document = numbered(2000)
    special = [int(token) for token in document[::3]]
    drawn = draws_of(document, seed=0, mask_share=0.15, draws=6, special=special)
    free = draws_of(document, seed=0, mask_share=0.15, draws=6)
    assert (drawn[::3] == -1).all()
    assert (free[::3] >= 0).any()
    assert torch.equal(drawn[1::3], free[1::3])


CUTS = [(lengths, targets) for lengths in ([16, 32, 64], [9, 20, 47], [40]) for targets in (5, 14, 33, 56, 62, 130)]


@pytest.mark.parametrize(("lengths", "targets"), CUTS)
@pytest.mark.parametrize("frame", [FRAME, BARE])
def test_every_length_scores_each_masked_target_once_in_one_order(
    lengths: list[int], targets: int, frame: Frame
) -> None:
    docs = [numbered(length, index) for index, length in enumerate((150, 200))]
    windows, skipped = cut(docs, lengths, targets, frame=frame)
    expected = [
        int(document[place])
        for document in docs
        for draw in range(6)
        for place in range(len(document) - targets, len(document))
        if draw_of(document.tolist(), place) == draw
    ]
    assert skipped == []
    assert {length: scored(found) for length, found in windows.items()} == dict.fromkeys(lengths, expected)


@pytest.mark.parametrize(("lengths", "targets"), CUTS)
def test_windows_are_runs_of_the_document_behind_the_masks_of_one_draw(lengths: list[int], targets: int) -> None:
    document = numbered(150)
    draws = [draw_of(document.tolist(), place) for place in range(150)]
    windows, _ = cut([document], lengths, targets)
    for length, window in ((length, window) for length, found in windows.items() for window in found):
        assert (int(window.fed[0]), int(window.fed[-1]), len(window.fed)) == (CLS, SEP, length)
        text, begin = text_of(window), int(window.targets[0]) - 10_000 - int(window.rows[0]) + 1
        draw = draws[int(window.targets[0]) - 10_000]
        assert text == [None if draws[at] == draw else 10_000 + at for at in range(begin, begin + length - 2)]
        assert (window.targets - 10_000 - begin + 1).tolist() == window.rows.tolist()


def test_a_token_is_masked_alike_whatever_is_measured() -> None:
    docs = documents(150, 200, 170)
    windows, _ = cut(docs, [16, 64], 56)
    alone, _ = cut([docs[2]], [24], 56)
    last = [window for window in windows[64] if window.document == 2]
    assert scored(alone[24]) == scored(last)
    reversed_order, _ = cut(docs[::-1], [16, 64], 56)
    assert [w.fed.tolist() for w in reversed_order[64] if w.document == 0] == [w.fed.tolist() for w in last]


@pytest.mark.parametrize("lengths", [[16, 32, 64, 128], [16, 48, 96], [256, 512, 1024], [30, 60]])
def test_the_default_targets_are_covered_by_windows_inside_one_another(lengths: list[int]) -> None:
    targets = default_targets(lengths, None, FRAME)
    windows, _ = cut([numbered(1200)], lengths, targets)
    holding: dict[int, list[tuple[int, int]]] = {}  # masked token -> first and last token of its window at each length
    for length in lengths:
        for window in windows[length]:
            begin = int(window.targets[0]) - int(window.rows[0]) + 1
            for token in window.targets.tolist():
                holding.setdefault(token, []).append((begin, begin + length - 2))
    for length in lengths:
        assert len({spans[lengths.index(length)] for spans in holding.values()}) == lengths[-1] // length
    for spans in holding.values():
        assert all(outer[0] <= inner[0] and inner[1] <= outer[1] for inner, outer in pairwise(spans))


@pytest.mark.parametrize(
    ("lengths", "trained", "expected"),
    [([1024], 256, 4 * 254), ([256, 512, 1024], 256, 4 * 254), ([512, 1024], None, 2 * 510), ([64], 256, 62)],
)
def test_the_shortest_length_counts_and_the_trained_one(lengths: list[int], trained: int | None, expected: int) -> None:
    assert default_targets(lengths, trained, FRAME) == expected


def test_endpoints_are_spread_and_do_not_overlap() -> None:
    windows, _ = cut([numbered(200)], [64], 62, endpoints_per_document=5)
    places = [token - 10_000 for token in scored(windows[64])]
    assert len(places) == len(set(places))
    regions = [range(0, 62), range(69, 131), range(138, 200)]
    assert [sum(place in region for place in places) for region in regions] == [
        sum(draw_of(numbered(200).tolist(), place) < 6 for place in region) for region in regions
    ]


def test_the_fingerprint_is_that_of_the_tokens_and_not_of_the_windows() -> None:
    windows, _ = cut([numbered(200)], [16, 64], 56)
    other, _ = cut([numbered(200)], [16, 64], 56, seed=1)
    assert digest_of(windows[16]) == digest_of(windows[64])
    assert digest_of(windows[64]) != digest_of(other[64])


@pytest.mark.parametrize(("length", "skipped"), [(61, [0]), (62, [])])
def test_a_document_that_does_not_hold_the_longest_context_is_left_out(length: int, skipped: list[int]) -> None:
    assert cut([numbered(length), numbered(90, 1)], [16, 64], 14)[1] == skipped


def test_a_document_of_special_tokens_is_left_out() -> None:
    windows, skipped = cut([torch.full((90,), UNK), numbered(90, 1)], [16, 64], 56)
    assert skipped == [0]
    assert {window.document for window in windows[16]} == {1}


def test_a_length_of_special_tokens_only_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the 2 special tokens of each window, got 2"):
        cut([numbered(90)], [2, 64], 14)


def test_special_tokens_around_a_document_are_known() -> None:
    found = frame_of(masking_tokenizer())
    assert (found.prefix, found.suffix, found.mask) == ((CLS,), (SEP,), MASK)
    assert set(found.special) == {PAD, UNK, CLS, SEP, MASK}
    assert frame_of(masking_tokenizer(adds_special=False)).size == 0
    (document,) = documents(90)
    whole = torch.cat([torch.tensor([CLS]), document, torch.tensor([SEP])])
    for given in (document, whole, whole[1:], whole[:-1]):
        assert torch.equal(FRAME.strip(given), document)
    assert torch.equal(BARE.strip(whole), whole)


@pytest.mark.parametrize(("tokenizer", "message"), [(None, "got None"), (word_tokenizer(adds_bos=True), "has none")])
def test_a_tokenizer_without_a_mask_token_is_named(tokenizer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"needs a tokenizer with a mask token.*{message}"):
        frame_of(tokenizer)
