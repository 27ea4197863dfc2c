"""Documents of every kind become the same ids, and what cannot be read says so."""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from torch import Tensor

from hf_posext.evaluation.documents import added_prefix, check_vocabulary, read_documents, resolve_bos
from tests.evaluation.stubs import BOS, documents, text_of, word_tokenizer

ONE, OTHER = documents(12, 7)
TEXTS = [text_of(ONE), text_of(OTHER)]
KINDS: dict[str, Any] = {
    "strings": TEXTS,
    "lists": [ONE.tolist(), OTHER.tolist()],
    "tensors": [ONE, OTHER.to(torch.int32)],
    "arrays": [ONE.numpy(), OTHER.numpy().astype(np.uint16)],
    "encodings": [{"input_ids": ONE.tolist()}, {"input_ids": OTHER[None]}],
    "rows": [{"text": TEXTS[0]}, {"text": TEXTS[1], "title": "other"}],
    "dataset": Dataset.from_dict({"text": TEXTS, "title": ["one", "other"]}),
    "tokenised dataset": Dataset.from_dict({"input_ids": [ONE.tolist(), OTHER.tolist()]}),
    "torch dataset": Dataset.from_dict({"input_ids": [ONE.tolist(), OTHER.tolist()]}).with_format("torch"),
    "stream": IterableDataset.from_generator(lambda: ({"text": text} for text in TEXTS)),
}


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Equal ids, all int64."""
    return [ids.tolist() for ids in found] == [ids.tolist() for ids in expected] and {i.dtype for i in found} == {
        torch.int64
    }


@pytest.mark.parametrize("given", KINDS.values(), ids=KINDS)
def test_every_kind_of_documents_gives_the_same_ids(given: Any) -> None:
    assert same(read_documents(given, word_tokenizer(adds_bos=True)), [ONE, OTHER])


def test_another_column_can_be_named() -> None:
    data = Dataset.from_dict({"content": TEXTS, "text": ["", ""]})
    assert same(read_documents(data, word_tokenizer(adds_bos=False), text_column="content"), [ONE, OTHER])


def test_a_stream_is_read_no_further_than_asked() -> None:
    drawn = []

    def endless() -> Iterator[dict[str, str]]:
        while True:
            drawn.append(1)
            yield {"text": TEXTS[0]}

    found = read_documents(IterableDataset.from_generator(endless), word_tokenizer(adds_bos=False), max_documents=3)
    assert len(found) == len(drawn) == 3


def test_text_longer_than_the_tokenizers_maximum_is_read_whole_and_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = logging.getLogger("transformers")  # hands nothing on to the root logger, so it is listened to directly
    host.addHandler(caplog.handler)
    (found,) = read_documents(TEXTS[:1], word_tokenizer(adds_bos=True))
    host.removeHandler(caplog.handler)
    assert len(found) == 12
    assert caplog.messages == []


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": ([], ValueError, "`documents` is empty"),
    "one string": ("w1 w2", TypeError, "got one str: put it in a list"),
    "splits": (DatasetDict(test=Dataset.from_dict({"text": TEXTS})), TypeError, "choose one of its parts: 'test'"),
    "a number": (3, TypeError, "got one int"),
    "unknown column": ([{"txt": "w1"}], ValueError, r"Unknown column 'text'. Did you mean `txt`\? Allowed: `txt`"),
    "one list of ids": ([1, 2, 3], TypeError, "document 0 is int"),
    "fractions": ([[0.5, 1.0]], TypeError, "document 0 is list"),
    "booleans": ([[True, False]], TypeError, "document 0 is list"),
    "two rows": ([torch.ones(2, 3, dtype=torch.long)], TypeError, "document 0 is Tensor"),
    "words": ([["w1", "w2"]], TypeError, "document 0 is list"),
    "no text": ([{"text": None}], TypeError, "document 0 is NoneType"),
}


@pytest.mark.parametrize(("given", "error", "message"), BAD.values(), ids=BAD)
def test_what_is_no_document_says_so(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_documents(given, word_tokenizer(adds_bos=False))


def test_text_without_a_tokenizer_says_so() -> None:
    with pytest.raises(ValueError, match="Document 1 is text, which needs a `tokenizer`"):
        read_documents([[1, 2], "w1 w2"], None)


@pytest.mark.parametrize(("token", "allowed"), [(50, "0 to 49"), (-1, "0 to 49")])
def test_ids_outside_the_vocabulary_are_named(token: int, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"Document 1 has the token id {token}, but the model's ids are {allowed}"):
        check_vocabulary([ONE, torch.tensor([3, token])], 50)


def test_ids_inside_the_vocabulary_pass() -> None:
    check_vocabulary([torch.tensor([0, 49]), torch.tensor([], dtype=torch.long)], 50)
    check_vocabulary([torch.tensor([10**6])], None)


def test_added_bos_is_found_by_encoding_whatever_the_tokenizer_names() -> None:
    assert added_prefix(word_tokenizer(adds_bos=True)) == BOS
    assert added_prefix(word_tokenizer(adds_bos=False, bos_token="<s>")) is None


CASES = [
    ("auto", "tail", {"adds_bos": True}, (BOS, BOS)),
    ("auto", "sliding", {"adds_bos": False, "bos_token": "<s>"}, (None, None)),
    ("auto", "disjoint", {"adds_bos": True, "bos_token": "<s>"}, (BOS, None)),
    ("auto", "disjoint", {"adds_bos": False, "bos_token": "<s>", "eos_token": "</s>"}, (BOS, None)),
    ("auto", "disjoint", {"adds_bos": False, "eos_token": "</s>"}, (44, None)),
    ("none", "disjoint", {"adds_bos": True, "bos_token": "<s>"}, (None, None)),
    ("every", "full", {"adds_bos": False, "bos_token": "<s>"}, (BOS, BOS)),
    ("every", "disjoint", {"adds_bos": True}, (BOS, BOS)),
]


@pytest.mark.parametrize(("bos", "protocol", "tokenizer", "expected"), CASES)
def test_bos_is_where_the_protocol_wants_it(
    bos: str, protocol: str, tokenizer: dict[str, Any], expected: tuple[int | None, int | None]
) -> None:
    assert resolve_bos(bos, protocol, word_tokenizer(**tokenizer)) == expected


def test_without_a_tokenizer_auto_adds_nothing() -> None:
    assert resolve_bos("auto", "tail", None) == (None, None)


@pytest.mark.parametrize("tokenizer", [None, word_tokenizer(adds_bos=False)])
def test_every_needs_a_bos(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="`bos='every'` needs a tokenizer with a BOS token and there is none"):
        resolve_bos("every", "tail", tokenizer)


def test_unknown_bos_is_corrected() -> None:
    with pytest.raises(ValueError, match="Did you mean `every`"):
        resolve_bos("everyy", "tail", None)
