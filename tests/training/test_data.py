"""Rows hold the text of one document in order, as long as they should be, the same each time and however it is read."""

import copy
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader

from hf_posext.training.config import DataConfig
from hf_posext.training.data import Rows, training_rows
from tests.evaluation.masked_stubs import CLS, MASK, SEP, masking_tokenizer
from tests.evaluation.masked_stubs import documents as masked_documents
from tests.evaluation.stubs import BOS, documents, text_of, word_tokenizer

N, T = 8, 32
DOCUMENTS = documents(100, 3, 40, 70, 20)
TEXTS = [text_of(ids) for ids in DOCUMENTS]
STREAM = {"text": TEXTS}


def rows_of(given: Any = TEXTS, tokenizer: Any = "bos", *, first_position: int = 0, **config: Any) -> Rows:
    """Rows for a causal LM with N = 8 and T = 32, by default of text behind a BOS."""
    tokenizer = word_tokenizer(adds_bos=True) if tokenizer == "bos" else tokenizer
    lengths = {"trained_length": N, "target_length": T, "first_position": first_position}
    return training_rows(given, tokenizer, DataConfig(**config), **lengths, is_masked=False)


def masked_rows(given: Any, **config: Any) -> Rows:
    """Rows for a masked LM with N = 8 and T = 32."""
    lengths = {"trained_length": N, "target_length": T}
    return training_rows(given, masking_tokenizer(), DataConfig(**config), **lengths, is_masked=True)


def all_rows(rows: Rows) -> list[dict[str, list[int]]]:
    """Every row in order."""
    if isinstance(rows.dataset, torch.utils.data.IterableDataset):
        return list(rows.dataset)
    return [rows.dataset[index] for index in range(rows.windows)]


def place_of(body: list[int], source: list[torch.Tensor]) -> tuple[int, int]:
    """The only document that holds a piece of text, and where."""
    found = [
        (index, start)
        for index, ids in enumerate(source)
        for start in range(len(ids) - len(body) + 1)
        if ids[start : start + len(body)].tolist() == body
    ]
    assert len(found) == 1
    return found[0]


CONFIGS: dict[str, dict[str, Any]] = {
    "full": {},
    "full of a length": {"length": 20},
    "short": {"short_fraction": 0.5},
    "packing": {"packing": True},
    "packing and short": {"packing": True, "short_fraction": 0.5},
    "pose": {"positions": "pose"},
    "pose of three": {"positions": "pose", "chunks": 3, "length": 12, "short_fraction": 0.5},
    "randomized": {"positions": "randomized"},
    "random_length": {"positions": "random_length"},
    "random_length and short": {"positions": "random_length", "shortest": 4, "length": 16, "short_fraction": 0.5},
}


def pieces_of(row: dict[str, list[int]]) -> list[list[int]]:
    """The texts of a row behind a BOS."""
    starts = [place for place, token in enumerate(row["input_ids"]) if token == BOS]
    return [row["input_ids"][a + 1 : b] for a, b in zip(starts, [*starts[1:], None], strict=True)]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_row_begins_with_the_bos_and_scores_all_but_the_first_tokens(config: dict[str, Any]) -> None:
    for_rows = all_rows(rows_of(**config))
    ids, labels = (np.concatenate([row[name] for row in for_rows]) for name in ("input_ids", "labels"))
    assert all(row["input_ids"][0] == BOS for row in for_rows)
    assert ((labels == -100) == (ids == BOS)).all()
    assert (labels[ids != BOS] == ids[ids != BOS]).all()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_piece_of_text_crosses_documents_and_none_is_read_twice(config: dict[str, Any]) -> None:
    pieces = [piece for row in all_rows(rows_of(**config)) for piece in pieces_of(row)]
    places = [(*place_of(piece, DOCUMENTS), len(piece)) for piece in pieces if len(piece) > 2]
    read = [(document, token) for document, start, size in places for token in range(start, start + size)]
    assert len(set(read)) == len(read)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_counts_are_those_of_the_rows(config: dict[str, Any]) -> None:
    rows = rows_of(**config)
    found = all_rows(rows)
    text = sum(len(piece) for row in found for piece in pieces_of(row))
    assert rows.documents == 5
    assert rows.windows == len(rows.dataset) == len(found)
    assert rows.tokens == sum(len(row["input_ids"]) for row in found)
    assert rows.dropped_tokens == 233 - text


@pytest.mark.parametrize(("config", "skipped"), [({}, (1, 4)), ({"length": 20}, (1,)), ({"packing": True}, ())])
def test_documents_that_are_too_short_are_named(config: dict[str, Any], skipped: tuple[int, ...]) -> None:
    assert rows_of(**config).skipped == skipped


def test_full_windows_are_of_the_target_length_and_next_to_each_other() -> None:
    rows = all_rows(rows_of())
    places = [place_of(piece, DOCUMENTS) for row in rows for piece in pieces_of(row)]
    assert [document for document, _ in places] == [0, 0, 0, 2, 3, 3]
    assert {len(row["input_ids"]) for row in rows} == {T}
    assert [places[1][1] - places[0][1], places[2][1] - places[1][1], places[5][1] - places[4][1]] == [31, 31, 31]


def test_what_is_left_of_a_document_is_at_either_end_or_both() -> None:
    same = [DOCUMENTS[2]] * 200  # 40 tokens, 31 of which make the row: 9 are left
    starts = [place_of(pieces_of(row)[0], DOCUMENTS)[1] for row in all_rows(rows_of(same))]
    assert set(starts) == set(range(10))


def test_without_a_bos_the_first_token_is_not_scored() -> None:
    rows = all_rows(rows_of(DOCUMENTS, None))
    assert {len(row["input_ids"]) for row in rows} == {T}
    assert all(row["labels"] == [-100, *row["input_ids"][1:]] for row in rows)


def test_a_document_that_begins_with_the_bos_gets_no_second_one() -> None:
    with_bos = [torch.tensor([BOS, *ids.tolist()]) for ids in DOCUMENTS]
    assert all_rows(rows_of(with_bos)) == all_rows(rows_of(DOCUMENTS))


def test_packed_rows_hold_all_text_in_order_but_for_the_end() -> None:
    rows = all_rows(rows_of(packing=True))
    text = [token for row in rows for piece in pieces_of(row) for token in piece]
    whole = torch.cat(DOCUMENTS).tolist()
    assert {len(row["input_ids"]) for row in rows} == {T}
    assert text == whole[: len(text)]
    assert len(whole) - len(text) < T


@pytest.mark.parametrize("config", [{"packing": True}, {"short_fraction": 1.0}])
def test_positions_begin_anew_at_each_piece(config: dict[str, Any]) -> None:
    rows = [row for row in all_rows(rows_of(**config)) if "position_ids" in row]
    assert rows
    assert all(
        row["position_ids"] == [place for piece in pieces_of(row) for place in range(len(piece) + 1)] for row in rows
    )


def test_one_token_that_is_left_in_a_packed_row_is_a_bos_alone() -> None:
    (row,) = all_rows(rows_of(documents(30, 20), packing=True))
    assert [len(piece) for piece in pieces_of(row)] == [30, 0]
    assert row["position_ids"][-1] == 0
    assert row["labels"][-1] == -100


def test_a_bos_alone_stays_in_a_short_row() -> None:
    (row,) = all_rows(rows_of(documents(7, 7, 7, 6, 20), packing=True, short_fraction=1.0))
    assert [len(piece) for piece in pieces_of(row)] == [7, 7, 7, 6, 0]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("config", [{}, {"packing": True}])
def test_the_share_of_rows_that_hold_short_text_is_exact(config: dict[str, Any], share: float) -> None:
    rows = all_rows(rows_of(documents(1000), **config, short_fraction=share))
    longest = [max(row.get("position_ids", range(len(row["input_ids"])))) for row in rows]
    assert sum(place < N for place in longest) == round(share * len(rows))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("positions", ["pose", "randomized"])
def test_the_share_of_rows_with_plain_positions_is_exact(positions: str, share: float) -> None:
    rows = all_rows(rows_of(documents(1000), positions=positions, short_fraction=share))
    assert sum("position_ids" not in row for row in rows) == round(share * len(rows))


@pytest.mark.parametrize("config", [{"short_fraction": 1.0}, {"short_fraction": 1.0, "packing": True}])
def test_short_rows_are_as_long_as_the_others_and_hold_pieces_of_the_trained_length(config: dict[str, Any]) -> None:
    rows = all_rows(rows_of(**config))
    assert {len(row["input_ids"]) for row in rows} == {T}
    assert max(len(piece) for row in rows for piece in pieces_of(row)) == N - 1


def test_a_target_that_is_no_multiple_of_the_trained_length_leaves_no_gap() -> None:
    rows = all_rows(rows_of(length=21, short_fraction=1.0))
    assert {tuple(len(piece) + 1 for piece in pieces_of(row)) for row in rows} == {(8, 8, 5)}


@pytest.mark.parametrize("positions", ["pose", "randomized", "random_length"])
def test_short_rows_among_others_are_one_plain_piece_of_the_trained_length(positions: str) -> None:
    rows = all_rows(rows_of(positions=positions, length=20, short_fraction=1.0))
    assert {len(row["input_ids"]) for row in rows} == {N}
    assert not any("position_ids" in row for row in rows)


@pytest.mark.parametrize("positions", ["pose", "randomized"])
def test_rows_with_spread_positions_are_of_the_trained_length_and_stay_below_the_target(positions: str) -> None:
    rows = all_rows(rows_of(documents(5000), positions=positions))
    assert {len(row["input_ids"]) for row in rows} == {N}
    assert {place for row in rows for place in row["position_ids"]} == set(range(T))


def test_random_lengths_are_between_the_shortest_and_the_length() -> None:
    rows = all_rows(rows_of(documents(5000), positions="random_length", shortest=5, length=12))
    assert {len(row["input_ids"]) for row in rows} == set(range(5, 13))
    assert not any("position_ids" in row for row in rows)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_another_seed_draws_otherwise(config: dict[str, Any]) -> None:
    config = {name: value for name, value in config.items() if name != "packing"}
    assert all_rows(rows_of(**config)) != all_rows(rows_of(**config, seed=1))


# Kinds of documents, streams, workers, cache

KINDS: dict[str, Any] = {
    "ids": DOCUMENTS,
    "encodings": [{"input_ids": ids.tolist()} for ids in DOCUMENTS],
    "dataset": Dataset.from_dict(STREAM | {"title": [1] * 5}),
    "torch dataset": Dataset.from_dict({"input_ids": [ids.tolist() for ids in DOCUMENTS]}).with_format("torch"),
    "shuffled dataset": Dataset.from_dict({"text": TEXTS[::-1]}).select([4, 3, 2, 1, 0]),
    "generator": (text for text in TEXTS),
}


@pytest.mark.parametrize("given", KINDS.values(), ids=KINDS)
def test_every_kind_of_documents_gives_the_same_rows(given: Any) -> None:
    assert all_rows(rows_of(given)) == all_rows(rows_of(TEXTS))


@pytest.mark.parametrize("config", [each for each in CONFIGS.values() if "short_fraction" not in each])
def test_a_stream_gives_the_same_rows(config: dict[str, Any]) -> None:
    stream = IterableDataset.from_generator(lambda: ({"text": text} for text in TEXTS))
    rows = rows_of(stream, **config)
    assert all_rows(rows) == all_rows(rows_of(**config))
    assert all_rows(rows) == all_rows(rows)
    assert (rows.documents, rows.skipped, rows.windows, rows.tokens, rows.dropped_tokens) == (None,) * 5


def test_a_stream_has_about_the_share_of_short_rows() -> None:
    long = documents(N * 500)
    stream = IterableDataset.from_generator(lambda: ({"input_ids": ids.tolist()} for ids in long))
    rows = all_rows(rows_of(stream, positions="pose", short_fraction=0.25))
    short = sum("position_ids" not in row for row in rows)
    assert abs(short - 0.25 * len(rows)) < 5 * (0.25 * 0.75 * len(rows)) ** 0.5


def test_a_stream_is_read_no_further_than_its_rows_are_wanted() -> None:
    drawn = []

    def endless() -> Any:
        while True:
            drawn.append(1)
            yield {"text": TEXTS[0]}

    rows = iter(rows_of(IterableDataset.from_generator(endless)).dataset)
    found = [next(rows) for _ in range(7)]
    assert len(found) == 7
    assert len(drawn) == 3  # each document has three rows


@pytest.mark.parametrize(("packing", "most"), [(False, 1), (True, 3)])
def test_a_stream_holds_no_more_documents_than_a_row_needs(packing: bool, most: int) -> None:
    texts = documents(*[15] * 100, 40)
    stream = IterableDataset.from_generator(lambda: ({"input_ids": ids.tolist()} for ids in texts))
    rows: Any = iter(rows_of(stream, packing=packing).dataset)
    assert max(len(rows.gi_frame.f_locals["held"]) for _ in rows) <= most


def test_workers_share_the_rows_of_a_stream() -> None:
    stream = IterableDataset.from_generator(lambda: ({"text": text} for text in TEXTS))
    rows = rows_of(stream)
    loader = DataLoader(rows.dataset, batch_size=None, num_workers=2)
    assert sorted(row["input_ids"] for row in loader) == sorted(row["input_ids"] for row in all_rows(rows_of()))


def test_rows_read_in_any_order_are_the_same() -> None:
    rows = rows_of(positions="pose")
    forwards = all_rows(rows)
    assert [rows.dataset[index] for index in reversed(range(rows.windows))] == forwards[::-1]


@pytest.mark.parametrize("streaming", [False, True])
def test_no_more_documents_are_read_than_asked(streaming: bool) -> None:
    data = Dataset.from_dict(STREAM)
    given = data.to_iterable_dataset() if streaming else data
    assert all_rows(rows_of(given, max_documents=3)) == all_rows(rows_of(TEXTS[:3]))
    assert all_rows(rows_of(TEXTS, max_documents=3)) == all_rows(rows_of(TEXTS[:3]))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 says it of any pool of processes
def test_tokenising_in_parallel_gives_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert all_rows(rows_of(Dataset.from_dict(STREAM), workers=2)) == all_rows(rows_of())


def test_text_longer_than_the_tokenizers_maximum_is_read_silently(caplog: pytest.LogCaptureFixture) -> None:
    host = logging.getLogger("transformers")
    host.addHandler(caplog.handler)
    rows_of(Dataset.from_dict(STREAM))
    host.removeHandler(caplog.handler)
    assert caplog.messages == []


PROGRAM = """
import datasets, hashlib, sys
from hf_posext.training.config import DataConfig
from hf_posext.training.data import load_documents, training_rows
from tests.evaluation.stubs import word_tokenizer
config = DataConfig(path=sys.argv[1], positions="pose", short_fraction=0.5)
rows = training_rows(
    load_documents(config), word_tokenizer(adds_bos=True), config, trained_length=8, target_length=32, is_masked=False
)
print([rows.dataset[index] for index in range(rows.windows)])
"""


def test_another_process_takes_the_tokens_from_the_cache_and_writes_the_same_rows(tmp_path: Path) -> None:
    data, cache = tmp_path / "data.jsonl", tmp_path / "cache"
    Dataset.from_dict(STREAM).to_json(data)
    settings = os.environ | {"HF_DATASETS_CACHE": str(cache), "PYTHONPATH": "."}
    run = [sys.executable, "-W", "error", "-c", PROGRAM, str(data)]
    options: dict[str, Any] = {"env": settings, "capture_output": True, "text": True, "check": True, "timeout": 100}
    first = subprocess.run(run, **options).stdout
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow")}
    assert len(written) == 2  # the documents, and their tokens
    assert (
        subprocess.run(run, **options).stdout == first == f"{all_rows(rows_of(positions='pose', short_fraction=0.5))}\n"
    )
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.arrow")} == written


# Masked LMs


def test_a_masked_row_is_framed_and_asks_for_no_special_token() -> None:
    rows = all_rows(masked_rows(masked_documents(100, 40), mask_share=1.0))
    assert all((row["input_ids"][0], row["input_ids"][-1]) == (CLS, SEP) for row in rows)
    assert all((row["labels"][0], row["labels"][-1]) == (-100, -100) for row in rows)
    assert {len(row["input_ids"]) for row in rows} == {T}
    assert not any("position_ids" in row for row in rows)


@pytest.mark.parametrize("share", [0.15, 0.5])
def test_eight_of_ten_are_masked_one_is_another_token_and_one_is_kept(share: float) -> None:
    text = masked_documents(30_000)
    rows = all_rows(masked_rows(text, mask_share=share))
    fed, labels = (np.concatenate([row[name] for row in rows]) for name in ("input_ids", "labels"))
    asked = labels != -100
    count = share * len(rows) * (T - 2)
    assert abs(asked.sum() - count) < 5 * count**0.5
    parts = [(fed == MASK)[asked].mean(), (fed == labels)[asked].mean()]
    kept = 0.1 + 0.1 / 41  # another token may be the same by chance
    assert parts == pytest.approx([0.8, kept], abs=5 * (0.16 / count) ** 0.5)
    assert fed[asked & (fed != MASK)].min() >= 5


def test_what_is_not_asked_for_is_fed_as_it_stands_and_what_is_comes_back_whole() -> None:
    text = masked_documents(100)
    rows = all_rows(masked_rows(text))
    whole = [np.where(np.array(row["labels"]) == -100, row["input_ids"], row["labels"]).tolist() for row in rows]
    assert [place_of(row[1:-1], text)[0] for row in whole] == [0, 0, 0]


def test_masks_differ_from_row_to_row() -> None:
    same = [masked_documents(T - 2)[0]] * 2
    one, other = all_rows(masked_rows(same))
    assert [label != -100 for label in one["labels"]] != [label != -100 for label in other["labels"]]


def test_a_short_row_of_a_masked_lm_is_one_piece_that_the_batch_pads() -> None:
    rows = masked_rows(masked_documents(640), short_fraction=0.5)
    found = all_rows(rows)
    batch = rows.collate(found)
    lengths = torch.tensor([len(row["input_ids"]) for row in found])
    assert sorted(lengths.tolist()) == [N] * 10 + [T] * 11
    assert batch["attention_mask"].tolist() == (torch.arange(T) < lengths[:, None]).long().tolist()
    assert "position_ids" not in batch


# Batches


def test_a_batch_is_padded_on_the_right_and_padding_is_not_scored() -> None:
    rows = rows_of(tokenizer=word_tokenizer(adds_bos=True, pad_token="<unk>"), positions="random_length", shortest=4)
    found = all_rows(rows)[:6]
    batch = rows.collate(found)
    lengths = torch.tensor([len(row["input_ids"]) for row in found])
    padding = torch.arange(int(lengths.max())) >= lengths[:, None]
    assert padding.any()
    assert (batch["attention_mask"] == (~padding).long()).all()
    assert (batch["labels"][padding] == -100).all()
    assert (batch["input_ids"][padding] == 42).all()
    assert batch["input_ids"][~padding].tolist() == [token for row in found for token in row["input_ids"]]


@pytest.mark.parametrize(
    ("special", "padding"), [({}, 0), ({"eos_token": "</s>"}, 44), ({"eos_token": "</s>", "pad_token": "<unk>"}, 42)]
)
def test_padding_is_the_padding_token_else_the_eos(special: dict[str, str], padding: int) -> None:
    assert rows_of(tokenizer=word_tokenizer(adds_bos=True, **special)).collate.padding == padding


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, {"input_ids", "labels"}),
        ({"packing": True}, {"input_ids", "labels", "position_ids"}),
        ({"short_fraction": 0.5}, {"input_ids", "labels", "position_ids"}),
        ({"positions": "pose"}, {"input_ids", "labels", "position_ids", "attention_mask"}),
        ({"positions": "randomized"}, {"input_ids", "labels", "position_ids", "attention_mask"}),
        ({"positions": "random_length"}, {"input_ids", "labels", "attention_mask"}),
    ],
)
def test_a_batch_has_a_mask_unless_its_rows_may_be_packed(config: dict[str, Any], names: set[str]) -> None:
    rows = rows_of(**config)
    batch = rows.collate(all_rows(rows))
    assert set(batch) == names
    assert {each.dtype for each in batch.values()} == {torch.int64}
    assert len({each.shape for each in batch.values()}) == 1


def test_a_plain_row_beside_others_counts_from_the_first_position() -> None:
    rows = rows_of(documents(400), positions="pose", short_fraction=0.5, first_position=2)
    batch = rows.collate(all_rows(rows))
    short = (batch["position_ids"] == torch.arange(2, N + 2)).all(1)
    assert short.sum() == round(rows.windows / 2)
    assert batch["position_ids"][:, 0].tolist() == [2] * rows.windows


def test_rows_are_not_changed_by_the_batch() -> None:
    rows = rows_of(packing=True)
    found = all_rows(rows)
    kept = copy.deepcopy(found)
    rows.collate(found)
    assert found == kept


# Refusals

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "beyond the target": ({"length": 33}, "`data.length` must be at most the target length 32, got 33"),
    "pose without a gap": (
        {"length": 32, "positions": "pose"},
        "`data.length` must be less than the target length 32 with positions: pose, got 32",
    ),
    "shortest above the target": (
        {"positions": "random_length", "shortest": 33},
        "`data.shortest` must be at most the 32 tokens of a row, got 33",
    ),
    "N above the length": ({"positions": "random_length", "length": 5}, "`data.shortest` must be at most the 5 tokens"),
    "more chunks than tokens": (
        {"positions": "pose", "chunks": 9},
        "`data.chunks` must be at most the 8 tokens of a row",
    ),
    "a BOS only": ({"length": 1}, "A row must have more than its 1 special tokens, got 1"),
    "unknown column": (
        {"text_column": "txt"},
        r"Unknown column 'txt'. Did you mean `text`\? Allowed: `text`. Name it with `data.text_column`",
    ),
}


@pytest.mark.parametrize(("config", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_says_so(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rows_of(Dataset.from_dict(STREAM), **config)


def test_a_stream_without_the_column_says_so() -> None:
    stream = Dataset.from_dict(STREAM).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"Unknown column 'txt'. Did you mean `text`"):
        all_rows(rows_of(stream, text_column="txt"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("config", "message"), [({}, "longest has 20, .*set packing"), ({"packing": True}, "more text")]
)
def test_documents_that_make_no_row_say_so(config: dict[str, Any], message: str, streaming: bool) -> None:
    data = Dataset.from_dict({"text": [TEXTS[4], TEXTS[1]]})
    with pytest.raises(ValueError, match=f"The 2 documents make no row of 32 tokens: .*{message}"):
        all_rows(rows_of(data.to_iterable_dataset() if streaming else data, **config))


def test_packing_of_a_masked_lm_says_so() -> None:
    with pytest.raises(ValueError, match=r"`data.packing` goes with causal models only"):
        masked_rows(masked_documents(100), packing=True)


def test_a_row_without_text_says_which() -> None:
    data = Dataset.from_dict({"text": [*TEXTS, None]})
    with pytest.raises(TypeError, match=r"Counted from document 0: .*document 5 is NoneType"):
        rows_of(data)


@pytest.mark.parametrize("given", ["one text", datasets.DatasetDict(test=Dataset.from_dict(STREAM)), 3])
def test_what_is_no_list_of_documents_says_so(given: Any) -> None:
    with pytest.raises(TypeError, match="`documents` must be a list of documents or a dataset"):
        rows_of(given)
