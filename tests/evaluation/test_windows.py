"""What is fed and what is scored, counted token by token."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posext.evaluation.windows import (
    Window,
    digest,
    disjoint_windows,
    full_windows,
    sliding_windows,
    tail_windows,
)

BOS = 999


def numbered(length: int) -> Tensor:
    """A document in which token i is 1000 + i, so that a window says where it was cut."""
    return torch.arange(1000, 1000 + length)


def scored(windows: list[Window]) -> Counter[tuple[int, int]]:
    """(document, position) of every scored token."""
    return Counter((window.document, int(token) - 1000) for window in windows for token in window.targets)


def spans(windows: list[Window]) -> list[tuple[list[int], list[int]]]:
    """(fed tokens, scored tokens) of each window."""
    return [(window.tokens[:-1].tolist(), window.targets.tolist()) for window in windows]


SHAPES = [
    (length, context, stride)
    for length in (2, 7, 16, 17, 33, 40)
    for context, stride in ((1, 1), (4, 1), (8, 3), (8, 8), (16, 5), (16, 16), (64, 10))
]


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize(("length", "context", "stride"), SHAPES)
def test_sliding_scores_each_token_once(length: int, context: int, stride: int, bos: int | None) -> None:
    documents = [numbered(length), numbered(length + 3)]
    windows, skipped = sliding_windows(documents, context, stride, bos=bos)
    start = 0 if bos is not None else 1
    assert scored(windows) == {(index, p): 1 for index in (0, 1) for p in range(start, len(documents[index]))}
    assert skipped == []


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize(("length", "context", "stride"), SHAPES)
def test_windows_feed_at_most_the_context_length_and_are_runs_of_the_document(
    length: int, context: int, stride: int, bos: int | None
) -> None:
    windows, _ = sliding_windows([numbered(length)], context, stride, bos=bos)
    bodies = [window.tokens[int(bos is not None) :] for window in windows]
    assert all(len(window.tokens) - 1 <= context and window.first >= 1 for window in windows)
    assert all(window.last == len(window.tokens) - 1 for window in windows)
    assert all(body.diff().eq(1).all() for body in bodies)


@pytest.mark.parametrize(("length", "context", "stride"), SHAPES)
def test_later_sliding_windows_are_full(length: int, context: int, stride: int) -> None:
    windows, _ = sliding_windows([numbered(length)], context, stride)
    assert all(len(window.tokens) == context + 1 for window in windows[1:])
    assert all(window.first >= context - stride + 1 for window in windows[1:])


def test_sliding_by_hand() -> None:
    windows, _ = sliding_windows([numbered(8)], 4, 2)
    assert spans(windows) == [
        ([1000, 1001, 1002, 1003], [1001, 1002, 1003, 1004]),
        ([1002, 1003, 1004, 1005], [1005, 1006]),
        ([1003, 1004, 1005, 1006], [1007]),
    ]


def test_stride_above_the_context_would_leave_tokens_out() -> None:
    with pytest.raises(ValueError, match="`stride` must be at most the context length 4, got 5"):
        sliding_windows([numbered(9)], 4, 5)


def rolling_by_definition(tokens: list[int], prefix: int, length: int) -> list[tuple[list[int], list[int]]]:
    """The rolling windows of lm-eval, from their published definition: (fed, predicted).

    The first feeds the prefix and the first `length` - 1 tokens and predicts `length`; each later one predicts the next
    `length`, or what is left, and feeds the `length` tokens before the last of them.
    """
    found = [([prefix, *tokens[: length - 1]][: min(length, len(tokens))], tokens[:length])]
    done = len(tokens[:length])
    while done < len(tokens):
        end = min(done + length, len(tokens))
        found.append((tokens[end - 1 - length : end - 1], tokens[done:end]))
        done = end
    return found


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 16, 17, 31])
@pytest.mark.parametrize("context", [1, 3, 8])
def test_disjoint_is_lm_evals_rolling(length: int, context: int) -> None:
    windows, _ = disjoint_windows([numbered(length)], context, prefix=BOS)
    assert spans(windows) == rolling_by_definition(numbered(length).tolist(), BOS, context)


@pytest.mark.parametrize(("prefix", "bos", "starts"), [(None, None, [0]), (BOS, None, [1, 0]), (BOS, BOS, [1, 1])])
def test_disjoint_scores_each_token_once_with_any_bos(prefix: int | None, bos: int | None, starts: list[int]) -> None:
    windows, _ = disjoint_windows([numbered(21)], 8, prefix=prefix, bos=bos)
    assert scored(windows) == {(0, position): 1 for position in range(0 if prefix else 1, 21)}
    assert [int((window.tokens == BOS).sum()) for window in windows] == [starts[0], *[starts[-1]] * (len(windows) - 1)]


def cut_tails(docs: list[Tensor]) -> list[Window]:
    """The tail windows of every length, one list."""
    plan, _ = tail_windows(docs, [8, 12], targets=4, endpoints_per_document=3, bos=BOS)
    return [window for windows in plan.values() for window in windows]


CUTTERS: dict[str, Callable[[list[Tensor]], list[Window]]] = {
    "tail": cut_tails,
    "full": lambda docs: full_windows(docs, 12, bos=BOS)[0],
    "sliding": lambda docs: sliding_windows(docs, 12, 5, bos=BOS)[0],
    "disjoint": lambda docs: disjoint_windows(docs, 12, prefix=BOS, bos=BOS)[0],
}  # fmt: skip


@pytest.mark.parametrize("cutter", CUTTERS.values(), ids=CUTTERS)
@pytest.mark.parametrize("given", [0, 1], ids=["without", "with"])
def test_each_window_has_one_bos_at_its_start_that_is_not_scored(
    cutter: Callable[[list[Tensor]], list[Window]], given: int
) -> None:
    document = torch.cat([torch.full((given,), BOS), numbered(30)])
    windows = cutter([document])
    assert all(int(window.tokens[0]) == BOS and int((window.tokens == BOS).sum()) == 1 for window in windows)
    assert spans(windows) == spans(cutter([numbered(30)]))


@pytest.mark.parametrize("bos", [None, BOS])
@pytest.mark.parametrize("length", [17, 18, 40, 100])
def test_tail_has_the_same_targets_at_every_length(length: int, bos: int | None) -> None:
    plan, skipped = tail_windows([numbered(length)], [16, 4, 8], targets=4, endpoints_per_document=3, bos=bos)
    assert len({digest(windows) for windows in plan.values()}) == 1
    assert skipped == []
    assert sorted(plan) == [4, 8, 16]
    assert all(len(window.tokens) == context + 1 for context, windows in plan.items() for window in windows)
    assert all(len(window.targets) == 4 for windows in plan.values() for window in windows)


@pytest.mark.parametrize(
    ("length", "ends"), [(17, [16]), (20, [19]), (21, [16, 20]), (26, [16, 20, 25]), (117, [16, 66, 116])]
)
def test_tail_endpoints_are_spread_evenly_and_never_overlap(length: int, ends: list[int]) -> None:
    plan, _ = tail_windows([numbered(length)], [16], targets=4, endpoints_per_document=3)
    assert [int(window.tokens[-1]) - 1000 for window in plan[16]] == ends
    assert max(scored(plan[16]).values()) == 1


def test_a_bos_takes_the_place_of_one_token_of_context() -> None:
    plan, skipped = tail_windows([numbered(16)], [16], targets=4, endpoints_per_document=1, bos=BOS)
    assert spans(plan[16]) == [([BOS, *range(1000, 1015)], [1012, 1013, 1014, 1015])]
    assert skipped == []
    assert tail_windows([numbered(16)], [16], targets=4, endpoints_per_document=1) == ({16: []}, [0])


def test_short_documents_are_named() -> None:
    documents = [numbered(40), numbered(16), numbered(17), numbered(0)]
    _, skipped = tail_windows(documents, [16], targets=4, endpoints_per_document=1)
    assert skipped == [1, 3]
    assert sliding_windows([numbered(1), numbered(2)], 4, 2)[1] == [0]
    assert full_windows([numbered(1), numbered(0)], 4, bos=BOS)[1] == [1]


def test_more_targets_than_context_is_an_error() -> None:
    with pytest.raises(ValueError, match="`targets` must be at most the shortest context length 8, got 9"):
        tail_windows([numbered(40)], [16, 8], targets=9, endpoints_per_document=1)


@pytest.mark.parametrize(("length", "fed"), [(5, 4), (16, 15), (17, 16), (90, 16)])
def test_full_is_one_pass_over_the_first_tokens(length: int, fed: int) -> None:
    windows, _ = full_windows([numbered(length)], 16)
    assert spans(windows) == [(list(range(1000, 1000 + fed)), list(range(1001, 1001 + fed)))]


def test_digest_tells_targets_apart() -> None:
    one, other = (sliding_windows([numbered(20) + shift], 8, 4)[0] for shift in (0, 1))
    assert digest(one) != digest(other)
    assert digest(one) != digest(one[:-1])


def ends_of(length: int, lengths: list[int], **settings: Any) -> list[int]:
    """Positions of the last targets in a document of some length."""
    plan, _ = tail_windows([numbered(length)], lengths, targets=4, endpoints_per_document=4, **settings)
    return [int(window.targets[-1]) - 1000 for window in plan[lengths[-1]]]


@pytest.mark.parametrize("bos", [None, BOS])
def test_ends_stand_on_the_grid_of_the_lengths_where_windows_can_begin_together(bos: int | None) -> None:
    first, *rest = ends_of(100, [16, 32, 48], bos=bos)
    assert first == 48 - (bos is not None)
    assert rest == [67, 83, 99]  # 17 tokens apart, if they were spread evenly


@pytest.mark.parametrize(
    ("length", "lengths"),
    [
        (400, [16, 32, 48]),  # 117 apart: further than any two lengths
        (60, [16, 32, 48]),  # 3 apart, less than a step of the grid
        (100, [48]),  # no two lengths
    ],
)
def test_ends_are_spread_evenly_where_no_windows_could_begin_together(length: int, lengths: list[int]) -> None:
    ends = ends_of(length, lengths)
    steps = {after - before for before, after in pairwise(ends)}
    assert max(steps) - min(steps) <= 1


def test_more_lengths_leave_the_targets_where_they_are() -> None:
    assert ends_of(100, [16, 32, 48], more_lengths=[20]) == ends_of(100, [16, 32, 48])
