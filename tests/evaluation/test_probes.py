"""The synthetic sequences are what they say: where the copy stands, what can be predicted, what cannot."""

import random

import pytest

from hf_posext.evaluation.probes import copy_sequence, passkey_sequence, repeat_sequence

FILLER = list(range(100, 400))


def encode(text):
    """One token for each character."""
    return [ord(character) for character in text]


@pytest.mark.parametrize(("payload", "distance", "lead"), [(8, 8, 0), (16, 40, 5), (12, 100, 30)])
def test_each_scored_token_of_a_copy_stands_again_at_the_distance(payload, distance, lead):
    task = copy_sequence(random.Random(0), FILLER, range(50), payload=payload, distance=distance, lead=lead)
    assert len(task.tokens) == lead + distance + payload
    assert [task.tokens[p] for p in task.scored] == [task.tokens[p - distance] for p in task.scored]
    assert task.scored == list(range(lead + distance + 4, len(task.tokens)))


def test_the_first_copy_is_what_nothing_can_predict():
    task = copy_sequence(random.Random(0), FILLER, range(50), payload=8, distance=20, lead=3)
    assert task.random == list(range(3, 11))
    assert {task.tokens[position] for position in task.random} <= set(range(50))


def test_a_copy_that_would_overlap_is_refused():
    with pytest.raises(ValueError, match=r"`distance` must be at least `payload` \(8\).*got 7"):
        copy_sequence(random.Random(0), FILLER, range(50), payload=8, distance=7, lead=0)


def test_too_little_filler_is_refused():
    with pytest.raises(ValueError, match="`filler` has 300 tokens, 392 are needed"):
        copy_sequence(random.Random(0), FILLER, range(50), payload=8, distance=400, lead=0)


def test_a_repeat_is_periodic():
    task = repeat_sequence(FILLER[:7], 40)
    assert [task.tokens[p] for p in task.scored] == [task.tokens[p - 7] for p in task.scored]
    assert task.scored[0] == 11


@pytest.mark.parametrize("passage", [[], FILLER])
def test_a_passage_that_does_not_fit_is_refused(passage):
    with pytest.raises(ValueError, match="must be shorter than `length`"):
        repeat_sequence(passage, 40)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_answer_of_a_passkey_is_the_key_in_its_statement(depth):
    task = passkey_sequence(random.Random(1), encode, FILLER, 260, depth=depth)
    key = [task.tokens[position] for position in task.random]
    assert len(task.tokens) == 260
    assert [task.tokens[position] for position in task.scored] == key
    assert all(chr(token).isdigit() for token in key)


def test_a_passkey_without_room_is_refused():
    with pytest.raises(ValueError, match="`length` must be"):
        passkey_sequence(random.Random(1), encode, FILLER, 20, depth=0.5)
