"""Synthetic sequences that can only be continued by looking far back: copy at a distance, repeat, passkey.

Perplexity on prose hardly needs distant text, so an extension is also judged by tasks that do. The same generators make
the synthetic part of the demo models' training data, which is what gives such small models any copying to measure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PASSKEY_STATEMENT = "The pass key is {key}. Remember it. {key} is the pass key.\n"
PASSKEY_QUESTION = "What is the pass key? The pass key is "
UNSCORED_LEAD = 4  # tokens of the second copy that a reader needs before it can know what is being repeated


@dataclass(frozen=True)
class ProbeSequence:
    """One sequence and the positions whose prediction counts.

    Attributes:
        tokens: T token ids.
        scored: ascending positions in [1, T) that can be predicted from far context alone.
        random: ascending positions that nothing can predict (the first copy of a random string, the digits of a key).
    """

    tokens: list[int]
    scored: list[int]
    random: list[int]


def copy_sequence(
    rng: random.Random, filler: Sequence[int], vocabulary: Sequence[int], *, payload: int, distance: int, lead: int
) -> ProbeSequence:
    """Random string, filler, the same string again: `lead` filler tokens, string, filler, string.

    Args:
        rng: source of the random string.
        filler: at least lead + distance - payload token ids of ordinary text.
        vocabulary: token ids that the string is drawn from, uniformly and with replacement.
        payload: length of the string in tokens.
        distance: tokens between a token of the string and its copy, >= payload.
        lead: filler tokens before the first copy.

    Returns:
        A sequence of lead + distance + payload tokens; scored is the second copy without its first four tokens.

    Source: copy at a distance as in the HySPE and NoPE length-generalisation studies; Zoology (arXiv 2312.04927).
    """
    if distance < payload:
        raise ValueError(f"`distance` must be at least `payload` ({payload}), or the copies overlap; got {distance}.")
    string = rng.choices(vocabulary, k=payload)
    gap = distance - payload
    tokens = [*filler[:lead], *string, *filler[lead : lead + gap], *string]
    if len(tokens) != lead + distance + payload:
        raise ValueError(f"`filler` has {len(filler)} tokens, {lead + gap} are needed.")
    return ProbeSequence(
        tokens, list(range(lead + distance + UNSCORED_LEAD, len(tokens))), list(range(lead, lead + payload))
    )


def repeat_sequence(passage: Sequence[int], length: int) -> ProbeSequence:
    """A passage of P tokens tiled up to `length` tokens; scored is everything after the first tile.

    Source: J. Su, kexue.fm/archives/9708 ("repeated text"): a cheap probe of copying over P tokens.
    """
    period = len(passage)
    if not 0 < period < length:
        raise ValueError(f"`passage` must be shorter than `length` ({length}) and not empty, got {period} tokens.")
    tokens = [passage[position % period] for position in range(length)]
    return ProbeSequence(tokens, list(range(period + UNSCORED_LEAD, length)), [])


def passkey_sequence(
    rng: random.Random,
    encode: Callable[[str], list[int]],
    filler: Sequence[int],
    length: int,
    *,
    depth: float,
    digits: int = 5,
) -> ProbeSequence:
    """A key of `digits` digits at relative `depth` (0 start, 1 end) in filler text, and the question for it at the end.

    The statement, the filler and the question fill exactly `length` tokens; scored are the tokens of the answer.

    Args:
        rng: source of the key.
        encode: text -> token ids, without special tokens.
        filler: token ids of ordinary text, long enough for `length`.
        length: tokens in all.
        depth: where the statement stands, in [0, 1].
        digits: digits of the key.

    Source: Mohtashami and Jaggi 2023 (arXiv 2305.16300), as used by PI, YaRN and LongRoPE.
    """
    key = "".join(rng.choices("0123456789", k=digits))
    statement = encode(PASSKEY_STATEMENT.format(key=key))
    question = encode(PASSKEY_QUESTION)
    answer = encode(PASSKEY_QUESTION + key)[len(question) :]
    room = length - len(statement) - len(question) - len(answer)
    if not 0 <= room <= len(filler):
        raise ValueError(
            f"`length` must be {length - room} to {length - room + len(filler)} tokens here, got {length}."
        )
    before = round(depth * room)
    tokens = [*filler[:before], *statement, *filler[before:room], *question, *answer]
    first = encode(PASSKEY_STATEMENT[: PASSKEY_STATEMENT.index("{key}")])
    start = before + len(first)
    return ProbeSequence(tokens, list(range(length - len(answer), length)), list(range(start, start + len(answer))))
