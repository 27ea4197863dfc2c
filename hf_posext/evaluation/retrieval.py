"""Trials of the retrieval probes: a prompt of a given length, and the answer, which stands at a given depth in it."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from hf_posext.evaluation.probes import UNSCORED_LEAD, copy_sequence, passkey_sequence, repeat_sequence

STRING = 32  # tokens of a copied string, of which the last are asked for; as many as the embedded models are judged by

LANDMARK_TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.\n"
)
LANDMARK_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
LANDMARK_STATEMENT = "\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
LANDMARK_QUESTION = "\nWhat is the pass key? The pass key is"
PAIRS_TASK = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"
PAIR = '"{key}": "{value}",\n '
PAIRS_QUESTION = '}}\n\nKey: "{key}"\nCorresponding value: "'
KEY_DIGITS = 6


@dataclass(frozen=True)
class Trial:
    """One question to a model.

    Attributes:
        context_length: tokens of prompt and answer at most.
        depth: where what is asked for stands in the prompt, 0 for its start and 1 for its end.
        prompt: token ids, a BOS included.
        answer: the token ids that must follow.
    """

    context_length: int
    depth: float
    prompt: list[int]
    answer: list[int]

    def last(self, length: int, bos: int | None) -> Trial:
        """The same question after the last tokens only: `length` of prompt and answer, a BOS in front included."""
        front = [] if bos is None else [bos]
        kept = length - len(self.answer) - len(front)
        if len(self.prompt) <= length - len(self.answer):
            return self
        return replace(self, prompt=[*front, *(self.prompt[-kept:] if kept > 0 else [])])


@dataclass(frozen=True)
class Source:
    """What trials are made of.

    Attributes:
        encode: text -> token ids without special tokens.
        filler: token ids of ordinary text, read round and round.
        vocabulary: token ids that random strings are drawn from.
        bos: id in front of every prompt; None for none.
    """

    encode: Callable[[str], list[int]]
    filler: Sequence[int]
    vocabulary: Sequence[int]
    bos: int | None

    def passage(self, rng: random.Random, length: int) -> list[int]:
        """So many tokens of filler from a random place on."""
        start = rng.randrange(len(self.filler))
        return [self.filler[(start + step) % len(self.filler)] for step in range(length)]

    def continued(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """Token ids of a question and of what follows it, as they stand in the encoded whole.

        A tokenizer may join the end of the question with the answer; what is joined is part of the answer.
        """
        alone, whole = self.encode(question), self.encode(question + answer)
        shared = next((i for i, pair in enumerate(zip(alone, whole, strict=False)) if pair[0] != pair[1]), len(alone))
        return whole[:shared], whole[shared:]


Parts = tuple[list[int], list[int]]  # prompt without BOS, and answer


def make_trials(
    maker: str,
    source: Source,
    *,
    context_length: int,
    depths: Iterable[float],
    trials: int,
    answer_length: int,
    seed: int,
) -> list[Trial]:
    """The trials of one context length; each depends on nothing but the seed, its own number, its length and its depth.

    Args:
        maker: a name among `MAKERS`.
        source: what they are made of.
        context_length: tokens of prompt and answer at most, a BOS included.
        depths: in [0, 1].
        trials: at each depth.
        answer_length: digits or tokens that are asked for.
        seed: of keys, random strings and filler.

    Raises:
        ValueError: the probe does not fit the length.
    """
    front = [] if source.bos is None else [source.bos]
    found = []
    for depth in depths:
        for number in range(trials):
            rng = random.Random(f"{seed}:{context_length}:{depth}:{number}")
            try:
                prompt, answer = MAKERS[maker](rng, source, context_length - len(front), depth, answer_length)
            except ValueError as error:
                raise ValueError(f"The context length {context_length} does not fit the probe: {error}") from error
            found.append(Trial(context_length, depth, [*front, *prompt], answer))
    return found


def plain_passkey(rng: random.Random, source: Source, room: int, depth: float, digits: int) -> Parts:
    """A key in ordinary text, as in the training data of the embedded models.

    Source: Mohtashami and Jaggi 2023 (arXiv 2305.16300), without their instructions.
    """
    task = passkey_sequence(rng, source.encode, source.passage(rng, room), room, depth=depth, digits=digits)
    return task.tokens[: task.scored[0]], task.tokens[task.scored[0] :]


def landmark_passkey(rng: random.Random, source: Source, room: int, depth: float, digits: int) -> Parts:
    """A key in filler between the instructions and the question of the papers.

    Source: Mohtashami and Jaggi 2023 (arXiv 2305.16300), as used by PI (arXiv 2306.15595, sec. 3.3).
    """
    key = _number(rng, digits)
    question, answer = source.continued(LANDMARK_QUESTION, f" {key}")
    task, statement = source.encode(LANDMARK_TASK), source.encode(LANDMARK_STATEMENT.format(key=key))
    spare = _spare(room, len(task) + len(statement) + len(question) + len(answer))
    filler, before = source.passage(rng, spare), round(depth * spare)
    return [*task, *filler[:before], *statement, *filler[before:], *question], answer


def copy(rng: random.Random, source: Source, room: int, depth: float, tokens: int) -> Parts:
    """A random string in ordinary text, and at the end all but its last tokens again: these must follow.

    Source: as `copy_sequence`.
    """
    payload = string_length(room, tokens)
    lead = round(depth * _spare(room, 2 * payload))
    task = copy_sequence(
        rng,
        source.passage(rng, room),
        source.vocabulary,
        payload=payload,
        distance=room - lead - payload,
        lead=lead,
    )
    return task.tokens[:-tokens], task.tokens[-tokens:]


def repeat(rng: random.Random, source: Source, room: int, depth: float, tokens: int) -> Parts:
    """A passage over and over, to be continued; what must follow stood last at the depth.

    At depth 0 the passage is so long that only a string's length of it fits a second time. It is of random tokens: text
    can be guessed without looking back (on tiled code a window scored 0.63 to 0.73).

    Source: as `repeat_sequence`.
    """
    shortest = string_length(room, tokens)
    period = shortest + round((1 - depth) * _spare(room, 2 * shortest))
    task = repeat_sequence(rng.choices(source.vocabulary, k=period), room)
    return task.tokens[:-tokens], task.tokens[-tokens:]


def key_value(rng: random.Random, source: Source, room: int, depth: float, digits: int) -> Parts:
    """As many pairs of numbers as fit, and the question for the value of one of them.

    Source: Liu et al. 2023 (arXiv 2307.03172), sec. 3.1, with numbers in place of UUIDs.
    """
    task = source.encode(PAIRS_TASK)
    pairs: list[tuple[str, str, list[int]]] = []
    used = len(task)
    known = set()
    while used < room:
        key, value = _number(rng, KEY_DIGITS), _number(rng, digits)
        if key not in known:
            known.add(key)
            pairs.append((key, value, source.encode(PAIR.format(key=key, value=value))))
            used += len(pairs[-1][2])
    while pairs:
        key, value, _ = pairs[round(depth * (len(pairs) - 1))]
        question, answer = source.continued(PAIRS_QUESTION.format(key=key), value)
        used = len(task) + sum(len(ids) for _, _, ids in pairs) + len(question) + len(answer)
        if used <= room:
            return [*task, *(token for _, _, ids in pairs for token in ids), *question], answer
        pairs.pop()
    raise ValueError(f"{room} tokens have no room for one pair and the question.")


Maker = Callable[[random.Random, Source, int, float, int], Parts]
MAKERS: dict[str, Maker] = {
    "plain": plain_passkey,
    "landmark": landmark_passkey,
    "copy": copy,
    "repeat": repeat,
    "key_value": key_value,
}


def digest_of(trials: Iterable[Trial]) -> str:
    """A fingerprint of what is asked: the ids of all prompts and answers, in order."""
    state = hashlib.sha256()
    for trial in trials:
        state.update(json.dumps([trial.prompt, trial.answer]).encode())
    return state.hexdigest()[:16]


def string_length(room: int, tokens: int) -> int:
    """Tokens of a string whose last ones are asked for: a quarter of a short context, enough to know what is meant."""
    return max(min(STRING, room // 4), UNSCORED_LEAD + tokens)


def _number(rng: random.Random, digits: int) -> str:
    """A number of so many digits, the first of which may be 0."""
    return "".join(rng.choices("0123456789", k=digits))


def _spare(room: int, needed: int) -> int:
    """Tokens that are left for filler.

    Raises:
        ValueError: fewer than none.
    """
    if room < needed:
        raise ValueError(f"it needs {needed} tokens besides a BOS, and {room} are there.")
    return room - needed
