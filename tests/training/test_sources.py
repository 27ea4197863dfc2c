"""What `path` may name is opened, and what cannot be says what to do."""

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from hf_posext.training.config import DataConfig, EvaluationConfig
from hf_posext.training.sources import load_documents

TEXTS = ["one\n\ntwo", "three"]


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def written(folder: Path, name: str, text: str) -> Path:
    """A file with some text, compressed where its name says so."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
FILES = {
    "a.jsonl": LINES,
    "b.jsonl.gz": LINES,
    "c.json": json.dumps([{"text": text} for text in TEXTS]),
    "d.json.gz": LINES,
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_a_json_file_has_a_document_per_row(tmp_path: Path, name: str, streaming: bool) -> None:
    path = written(tmp_path, name, FILES[name])
    found = load_documents(DataConfig(path=str(path), streaming=streaming))
    assert isinstance(found, datasets.IterableDataset if streaming else datasets.Dataset)
    assert [row["text"] for row in found] == TEXTS


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str, streaming: bool) -> None:
    path = written(tmp_path, name, TEXTS[0])
    found = load_documents(DataConfig(path=str(path), streaming=streaming))
    assert [row["text"] for row in found] == TEXTS[:1]


def test_a_parquet_file_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(tmp_path / "a.parquet")
    assert load_documents(DataConfig(path=str(tmp_path / "a.parquet")))["text"][:] == TEXTS


def test_several_files_are_read_in_their_order(tmp_path: Path) -> None:
    paths = [str(written(tmp_path, name, text)) for name, text in zip(("z.txt", "a.txt"), TEXTS, strict=True)]
    assert load_documents(DataConfig(path=paths))["text"][:] == TEXTS


def test_a_folder_is_read_whole_and_other_files_are_left_out(tmp_path: Path) -> None:
    names = [f"{name}/a.txt" for name in "caebd"] + [f"{name}.txt" for name in "wzvyx"]
    assert [written(tmp_path, name, name).is_file() for name in [*names, "README.md"]] == [True] * 11
    assert load_documents(DataConfig(path=str(tmp_path)))["text"][:] == sorted(names)


def test_held_out_text_is_found_in_the_same_way(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", TEXTS[0])
    assert load_documents(EvaluationConfig(path=str(path)))["text"][:] == TEXTS[:1]


def test_a_part_of_a_file_can_be_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", LINES)
    assert load_documents(DataConfig(path=str(path), split="train[1:]"))["text"][:] == TEXTS[1:]


def test_a_hub_id_is_handed_to_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: seen.append((args, options)))
    load_documents(DataConfig(path="owner/name", name="part", split="test", streaming=True))
    assert seen == [(("owner/name", "part"), {"split": "test", "streaming": True})]


@pytest.mark.parametrize(
    ("paths", "error", "message"),
    [
        (None, ValueError, "There is nothing to read. Set `path`"),
        ([], ValueError, "There is nothing to read. Set `path`"),
        (["no.jsonl"], FileNotFoundError, r"There is no file or folder '.*no\.jsonl'\. Check `path`"),
        (["a.txt", "no.txt"], FileNotFoundError, r"There is no file or folder '.*no\.txt'"),
        (
            ["a.md"],
            ValueError,
            r"'.*a\.md' has none of the suffixes `\.txt`, `\.json`, `\.jsonl`, `\.parquet`, each also",
        ),
        (["a.md.gz"], ValueError, "has none of the suffixes"),
        (["a.txt", "a.jsonl"], ValueError, r"'.*a\.txt' and '.*a\.jsonl' are of different kinds"),
        (["empty"], FileNotFoundError, "The folder '.*empty' holds no file with one of the suffixes"),
    ],
)
def test_what_cannot_be_read_says_so(
    tmp_path: Path, paths: list[str] | None, error: type[Exception], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("a.txt", "a.jsonl", "a.md", "a.md.gz"):
        written(tmp_path, name, LINES)
    given = paths and [str(tmp_path / name) for name in paths]
    with pytest.raises(error, match=message):
        load_documents(DataConfig(path=given))


def test_a_name_that_is_neither_file_nor_data_set_says_so() -> None:
    with pytest.raises(FileNotFoundError, match="no file or folder 'owner/no-such-data', and no hub data set"):
        load_documents(DataConfig(path="owner/no-such-data"))
