"""Where tokens stand and how long their rows are, against what a loop over one row at a time finds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posext.attention.present import Present, present

Rows = list[list[int]]
LONG = 24  # slots of every row
STEPS = list(zip(range(20, LONG), range(21, LONG + 1), strict=True))
CHUNKS = [(0, 3), (3, 8), (8, LONG)]
CALLS = [(0, LONG), (0, 20), *STEPS, *CHUNKS, *((at, at + 1) for at in (0, 4, 5, 11, 17))]
"""First and last slot of calls of a model: in one pass, a prompt and steps, chunks, and single tokens."""


@dataclass(frozen=True)
class Text:
    """For each row and slot of a batch: is there a token, where does it stand, and how long is its text by then."""

    used: Rows
    places: Rows
    lengths: Rows
    has_ids: bool
    has_mask: bool

    def mask(self) -> Tensor:
        return torch.tensor(self.used)

    def ids(self) -> Tensor:
        return torch.tensor(self.places)


def counts(used: list[int]) -> list[int]:
    """Tokens up to and with each slot."""
    return [sum(used[: slot + 1]) for slot in range(len(used))]


def by_slot(used: Rows, *, has_ids: bool = False, has_mask: bool = True) -> Text:
    """A model that numbers slots, padding included."""
    return Text(used, [list(range(len(row))) for row in used], [counts(row) for row in used], has_ids, has_mask)


def by_token(used: Rows, at_padding: int) -> Text:
    """Positions that count the tokens of a row, as `generate` makes them, with some number at padding."""
    places = [[count - 1 if use else at_padding for use, count in zip(row, counts(row), strict=True)] for row in used]
    return Text(used, places, [counts(row) for row in used], True, True)


def full(rows: int = 3) -> Rows:
    return [[1] * LONG for _ in range(rows)]


def left_padded() -> Rows:
    return [[0] * padding + [1] * (LONG - padding) for padding in (0, 5, 11)]


def with_hole() -> Rows:
    """Prompts padded on the right to 20, and four tokens behind."""
    return [[1] * 20 + [1] * 4, [1] * 9 + [0] * 11 + [1] * 4, [1] * 15 + [0] * 5 + [1] * 4]


TEXTS: dict[str, Text] = {
    "neither_ids_nor_mask": by_slot(full(), has_mask=False),
    "ids_alone": by_slot(full(), has_ids=True, has_mask=False),
    "mask_alone": by_slot(full()),
    "ids_and_mask": by_slot(full(), has_ids=True),
    "left_padded": by_slot(left_padded()),
    "left_padded_with_slots_as_ids": by_slot(left_padded(), has_ids=True),
    "left_padded_with_ids": by_token(left_padded(), 0),
    "left_padded_with_ids_1_at_padding": by_token(left_padded(), 1),
    "hole": by_slot(with_hole()),
    "hole_with_ids": by_token(with_hole(), 0),
    "hole_with_ids_1_at_padding": by_token(with_hole(), 1),
}


def causal(mask: Tensor, past: int) -> Tensor:
    """[B, 1, L, W] bool for the last W - past of W slots."""
    width = mask.shape[1]
    seen = torch.ones(width, width, dtype=torch.bool).tril()[past:]
    return seen[None, None] & mask.bool()[:, None, None]


def additive(seen: Tensor) -> Tensor:
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


MASKS: dict[str, Callable[[Tensor, int], Any]] = {
    "numbers": lambda mask, past: mask,
    "bool": lambda mask, past: mask.bool(),
    "float": lambda mask, past: mask.float(),
    "bool_4d": causal,
    "additive_4d": lambda mask, past: additive(causal(mask, past)),
    "infinite_4d": lambda mask, past: (
        additive(causal(mask, past)).clamp(min=-torch.inf).masked_fill(~causal(mask, past), -torch.inf)
    ),
    "bool_4d_of_an_allocation": lambda mask, past: torch.nn.functional.pad(causal(mask, past), (0, 9)),
    "dict": lambda mask, past: {
        "full_attention": causal(mask, past),
        "sliding_attention": causal(mask, past).triu(past - 2),
    },
}


def at_call(text: Text, begin: int, end: int, mask: str = "numbers", past: Any = None) -> Present:
    """`present` with what a model gets in the call for slots begin to end."""
    ids = text.ids()[:, begin:end] if text.has_ids else None
    given = MASKS[mask](text.mask()[:, :end], begin) if text.has_mask else None
    return present(ids, given, begin if past is None else past, torch.zeros(len(text.used), end - begin))


def assert_equal_where_used(
    found: Tensor, expected: Rows, text: Text, begin: int, end: int, new: int | None = None
) -> None:
    """Compares [B or 1, end - begin] with rows of numbers, at slots that hold a token.

    Rows without any token from slot `new` on are left out: nothing reads their keys.
    """
    found = found.expand(len(text.used), -1)
    assert found.shape[1] == end - begin
    for row, used in enumerate(text.used):
        is_read = new is None or any(used[new:end])
        for slot in range(begin, end):
            if used[slot] and is_read:
                assert int(found[row, slot - begin]) == expected[row][slot], (row, slot)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", TEXTS)
def test_lengths_and_positions_of_new_and_cached_tokens(name: str, mask: str) -> None:
    text = TEXTS[name]
    for begin, end in CALLS:
        now = at_call(text, begin, end, mask)
        assert (now.tokens, now.total) == (end - begin, end)
        assert_equal_where_used(now.token_lengths(), text.lengths, text, begin, end)
        assert_equal_where_used(now.key_positions(end)[0], text.places, text, 0, end, begin)


@pytest.mark.parametrize("window", [1, 4, 9])
@pytest.mark.parametrize("name", TEXTS)
def test_a_sliding_layer_returns_the_last_keys(name: str, window: int) -> None:
    text = TEXTS[name]
    for begin, end in CALLS:
        keys = min(end, end - begin + window - 1)
        found = at_call(text, begin, end).key_positions(keys)[0]
        assert_equal_where_used(found, text.places, text, end - keys, end, begin)


@pytest.mark.parametrize("name", TEXTS)
def test_a_static_cache_counts_in_a_tensor_and_returns_its_whole_allocation(name: str) -> None:
    text = TEXTS[name]
    for begin, end in CALLS:
        number, tensor = at_call(text, begin, end), at_call(text, begin, end, past=torch.tensor(begin))
        assert torch.equal(number.token_lengths(), tensor.token_lengths())
        assert torch.equal(number.row_lengths(), tensor.row_lengths())
        for now in (number, tensor):
            found = now.key_positions(LONG + 9)[0]
            assert found.shape[1] == LONG + 9
            assert_equal_where_used(found[:, :end], text.places, text, 0, end, begin)
        for keys in {end, max(1, end - 3)}:
            assert torch.equal(*torch.broadcast_tensors(number.key_positions(keys), tensor.key_positions(keys)))


@pytest.mark.parametrize("at_padding", [0, 1])
def test_a_call_may_begin_with_padding_behind_a_cached_prompt(at_padding: int) -> None:
    """A second turn, padded on the left behind prompts that were padded on the right, with ids that count tokens."""
    text = by_token([[1] * 9 + [0] * 7 + [1] * 8, [1] * 12 + [0] * 4 + [1] * 8, [1] * 24], at_padding)
    now = at_call(text, 12, LONG)
    assert_equal_where_used(now.token_lengths(), text.lengths, text, 12, LONG)
    assert_equal_where_used(now.key_positions(LONG)[0], text.places, text, 0, LONG)


@pytest.mark.parametrize("mask", ["none", "ones", "block_4d"])
@pytest.mark.parametrize("starts", [(0,), (0, 9), (0, 3, 4, 17)])
def test_packed_documents_are_as_long_as_each_of_them(starts: tuple[int, ...], mask: str) -> None:
    document = [sum(slot >= start for start in starts) for slot in range(LONG)]
    places = [slot - max(start for start in starts if start <= slot) for slot in range(LONG)]
    same = torch.tensor([[a == b for b in document] for a in document])
    masks = {"none": None, "ones": torch.ones(2, LONG), "block_4d": (same.tril())[None, None].expand(2, -1, -1, -1)}
    whole = list(range(LONG))  # the other row is one document
    now = present(torch.tensor([places, whole]), masks[mask], 0, torch.zeros(2, LONG))
    assert now.token_lengths().tolist() == [[place + 1 for place in places], [place + 1 for place in whole]]
    assert now.key_positions(LONG)[0].tolist() == [places, whole]
    assert now.row_lengths().tolist() == [max(places) + 1, LONG]


@pytest.mark.parametrize("mask", [None, torch.ones(2, LONG)], ids=["none", "ones"])
def test_gaps_between_positions_count(mask: Tensor | None) -> None:
    """Skip-wise training: a short row stands for a long one."""
    rows = [list(range(8)) + list(range(40, 56)), list(range(10)) + list(range(100, 114))]
    now = present(torch.tensor(rows), mask, 0, torch.zeros(2, LONG))
    assert now.token_lengths().tolist() == [[place + 1 for place in row] for row in rows]
    assert now.key_positions(LONG)[0].tolist() == rows


def test_a_text_that_begins_at_some_position_keeps_it_in_the_cache() -> None:
    ids = torch.arange(100, 100 + LONG)[None]
    for begin, end in [(0, 20), *STEPS]:
        now = present(ids[:, begin:end], None, begin, torch.zeros(1, end - begin))
        assert now.token_lengths().tolist() == [list(range(101 + begin, 101 + end))]
        assert now.key_positions(end)[0].tolist() == [list(range(100, 100 + end))]


def test_ids_given_once_stand_for_every_row() -> None:
    text = by_slot(left_padded())
    for begin, end in CHUNKS:
        states = torch.zeros(3, end - begin)
        now = present(torch.arange(begin, end)[None], text.mask()[:, :end], begin, states)
        assert_equal_where_used(now.token_lengths(), text.lengths, text, begin, end)
        assert_equal_where_used(now.key_positions(end)[0], text.places, text, 0, end, begin)


@pytest.mark.parametrize("with_text_axis", [False, True])
@pytest.mark.parametrize("name", ["ids_alone", "ids_and_mask", "left_padded_with_ids", "hole_with_ids"])
def test_every_axis_of_text_is_placed(name: str, with_text_axis: bool) -> None:
    text = TEXTS[name]
    for begin, end in CHUNKS:
        ids = text.ids()[None, :, begin:end].repeat(3, 1, 1)
        if with_text_axis:
            ids = torch.cat((torch.full_like(ids[:1], -1), ids))
        mask = text.mask()[:, :end] if text.has_mask else None
        now = present(ids, mask, begin, torch.zeros(3, end - begin))
        assert_equal_where_used(now.token_lengths(), text.lengths, text, begin, end)
        found = now.key_positions(end)
        assert len(found) == 3
        for axis in found:
            assert_equal_where_used(axis, text.places, text, 0, end, begin)


def test_axes_that_differ_are_kept_and_the_furthest_is_the_length() -> None:
    """An image of 2 x 3 patches between two tokens and two: t stands still, h and w run, and text goes on behind."""
    axes = [[0, 1, 2, 2, 2, 2, 2, 2, 5, 6], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]]
    now = present(torch.tensor(axes)[:, None], torch.ones(1, 10), 0, torch.zeros(1, 10))
    assert now.token_lengths().tolist() == [[max(places) + 1 for places in zip(*axes, strict=True)]]
    assert now.key_positions(10)[:, 0].tolist() == axes


ENCODED = {"right": [[1] * 24, [1] * 15 + [0] * 9, [1] * 3 + [0] * 21], "left": left_padded(), "none": full()}


@pytest.mark.parametrize("kind", ["numbers", "bidirectional_4d", "additive_4d"])
@pytest.mark.parametrize("ids", ["none", "slots", "tokens"])
@pytest.mark.parametrize("side", ENCODED)
def test_a_row_of_an_encoder_is_as_long_as_its_tokens(side: str, ids: str, kind: str) -> None:
    mask = torch.tensor(ENCODED[side])
    both = (mask[:, None, :, None] & mask[:, None, None, :]).bool()
    masks = {"numbers": mask, "bidirectional_4d": both, "additive_4d": additive(both)}
    given = {
        "none": None,
        "slots": torch.arange(LONG).expand(3, -1),
        "tokens": (mask.cumsum(1) - 1).clamp(min=0),
    }
    now = present(given[ids], masks[kind], 0, torch.zeros(3, LONG))
    assert now.row_lengths().expand(3).tolist() == [sum(row) for row in ENCODED[side]]


def test_without_a_mask_a_row_of_an_encoder_is_as_long_as_the_tensor() -> None:
    assert present(None, None, 0, torch.zeros(3, LONG)).row_lengths().expand(3).tolist() == [LONG] * 3


def test_masks_that_do_not_say_which_slots_hold_tokens_are_left_alone() -> None:
    for mask in (None, {"sliding_attention": torch.ones(1, 1, 4, 4, dtype=torch.bool)}, torch.ones(1, 4, 4), object()):
        now = present(None, mask, 0, torch.zeros(1, 4))
        assert now.token_lengths().tolist() == [[1, 2, 3, 4]]
