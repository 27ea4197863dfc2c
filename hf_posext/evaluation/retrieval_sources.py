"""What the trials of a probe are made of: which filler, which random tokens, and in which words a key is hidden."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from hf_posext.demo import held_out_documents
from hf_posext.errors import quoted
from hf_posext.evaluation.arms import vocabulary
from hf_posext.evaluation.documents import check_vocabulary, read_documents, resolve_bos
from hf_posext.evaluation.forwards import causal_lm
from hf_posext.evaluation.probes import PASSKEY_QUESTION
from hf_posext.evaluation.retrieval import LANDMARK_FILLER, Source

WORDLESS = ("copy", "repeat")  # probes that can be made of token ids alone
WORDINGS = ("auto", "plain", "landmark")
GIVEN, PROSE, SENTENCES, RANDOM = "documents", "embedded prose", "sentences of the Landmark paper", "random tokens"
ENOUGH = 2**16  # random tokens of filler before they come again
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")


def resolve_wording(wording: str, tokenizer: Any) -> str:
    """How a passkey is put: `plain` for base models whose tokenizer keeps digits apart, else `landmark`.

    Raises:
        ValueError: `plain` with a tokenizer that joins the end of the question with the key.
    """
    if wording == "landmark":
        return wording
    question = encode(tokenizer, PASSKEY_QUESTION)
    is_apart = encode(tokenizer, PASSKEY_QUESTION + "12345")[: len(question)] == question
    if wording == "plain" and not is_apart:
        raise ValueError(
            "`wording='plain'` needs a tokenizer that keeps a key apart from the space before it, and this one joins "
            "them. Use wording='landmark'."
        )
    is_chat = bool(getattr(tokenizer, "chat_template", None))
    return "plain" if wording == "plain" or (is_apart and not is_chat) else "landmark"


def check_text(probe: str, tokenizer: Any) -> None:
    """Refuses a probe in words without a tokenizer.

    Raises:
        ValueError: with the probes that need none.
    """
    if tokenizer is None and probe not in WORDLESS:
        raise ValueError(
            f"The probe `{probe}` is in words, which needs a `tokenizer`; got None. Without one take "
            f"{quoted(WORDLESS)}."
        )


def source_of(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[Any] | None,
    *,
    wording: str | None,
    bos: str,
    text_column: str,
    seed: int,
) -> tuple[Source, str]:
    """Where trials get their tokens from, and the name of their filler.

    Args:
        model: says which ids there are, where there is no tokenizer.
        tokenizer: may be None where a probe needs no text.
        documents: filler, as `read_documents` takes it; None for one that fits the probe.
        wording: of a passkey, resolved; None for the other probes.
        bos: `auto`, `none` or `every`.
        text_column: of the documents.
        seed: of random filler.

    Raises:
        TypeError, ValueError: documents that cannot be read or are empty, ids outside the vocabulary, or a model
            without a tokenizer that does not say which ids it reads.
    """
    words = ordinary_ids(model, tokenizer)
    bos_id, _ = resolve_bos(bos, "tail", tokenizer)
    if documents is not None:
        name, texts = GIVEN, read_documents(documents, tokenizer, text_column=text_column)
    elif tokenizer is None:
        name, texts = RANDOM, read_documents([random.Random(seed).choices(words, k=ENOUGH)])
    elif wording == "landmark":
        name, texts = SENTENCES, read_documents([LANDMARK_FILLER], tokenizer)
    else:
        name, texts = PROSE, read_documents(held_out_documents(), tokenizer)
    if name == GIVEN:
        check_vocabulary(texts, vocabulary(model))
    filler = [token for ids in texts for token in ids.tolist()]
    if not filler:
        raise ValueError("`documents` hold no token. Give text to hide the answer in.")
    return Source(partial(encode, tokenizer), filler, words, bos_id), name


def ordinary_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """Ids that random strings may be drawn from: all that model and tokenizer both have, special ones left out.

    Raises:
        ValueError: neither says which there are.
    """
    sizes = [vocabulary(model), None if tokenizer is None else len(tokenizer)]
    known = [size for size in sizes if size is not None]
    if not known:
        raise ValueError(f"{type(causal_lm(model)).__name__} does not say which token ids it reads. Give a tokenizer.")
    config = getattr(causal_lm(model), "config", None)
    stated = [getattr(config, name, None) for name in SPECIAL]
    special = {token for ids in stated for token in (ids if isinstance(ids, list) else [ids])}
    special |= set() if tokenizer is None else {*tokenizer.all_special_ids}
    return [token for token in range(min(known)) if token not in special]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids without special tokens."""
    return [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
