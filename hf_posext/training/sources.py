"""Opens what `path` names: files, folders and hub data sets, through the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from hf_posext.demo import held_out_documents, training_documents
from hf_posext.errors import quoted
from hf_posext.training.config import DataConfig, EvaluationConfig

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

DEMO = {"demo:training": training_documents, "demo:held_out": held_out_documents}
READERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
ALLOWED = f"{quoted(READERS)}, each also with `.gz`"


def load_documents(config: DataConfig | EvaluationConfig) -> Dataset | IterableDataset:
    """The data set that a config names.

    Args:
        config: where to look. A text file is one document; a JSON or parquet file has one per row. A folder is read
            with all that is in it, whatever has another suffix left out. `demo:training` and `demo:held_out` are the
            books of the package.

    Returns:
        A `datasets` data set, not yet tokenised; of `datasets.IterableDataset` with `streaming`.

    Raises:
        ValueError: no path, a file of another kind, or files of several kinds.
        FileNotFoundError: no such file or folder, nor a hub data set of that name.
    """
    import datasets

    source = config
    if not isinstance(source, DataConfig):
        is_part = source.max_documents is not None  # then a hub data set need not be fetched whole
        source = DataConfig(source.path, source.name, source.split, source.text_column, streaming=is_part)
    if isinstance(source.path, str) and source.path in DEMO:
        return datasets.Dataset.from_dict({source.text_column: DEMO[source.path]()})
    if not source.path:
        raise ValueError("There is nothing to read. Set `path` to a file, a folder or a hub id, or give documents.")
    names = [source.path] if isinstance(source.path, str) else source.path
    if isinstance(source.path, str) and is_hub_id(source.path):
        try:
            return datasets.load_dataset(source.path, source.name, split=source.split, streaming=source.streaming)
        except (datasets.exceptions.DatasetNotFoundError, ConnectionError) as error:
            raise FileNotFoundError(
                f"There is no file or folder {source.path!r}, and no hub data set of that name can be reached. Check "
                "`path`; it is relative to the folder that the run was started in."
            ) from error
    files = [file for name in names for file in files_of(Path(name))]
    reader = reader_of(files)
    options = {"sample_by": "document"} if reader == "text" else {}
    data_files = [str(file) for file in files]
    return datasets.load_dataset(
        reader, data_files=data_files, split=source.split, streaming=source.streaming, **options
    )


def is_hub_id(name: str) -> bool:
    """Whether a name that is no file or folder may be one of the hub: `name` or `owner/name`, with no known suffix."""
    path = Path(name)
    is_plain = not path.is_absolute() and len(path.parts) <= 2 and not name.startswith((".", "~"))
    return is_plain and not path.exists() and kind_of(path) not in READERS


def files_of(path: Path) -> list[Path]:
    """The file itself, or the files of known kinds in a folder, in the order of their names.

    Raises:
        FileNotFoundError: there is none.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no file or folder {str(path)!r}. Check `path`.")
    if path.is_file():
        return [path]
    found = sorted(each for each in path.rglob("*") if each.is_file() and kind_of(each) in READERS)
    if not found:
        raise FileNotFoundError(f"The folder {str(path)!r} holds no file with one of the suffixes {ALLOWED}.")
    return found


def reader_of(files: Iterable[Path]) -> str:
    """The builder of `datasets` that reads all of the files.

    Raises:
        ValueError: a kind that none reads, or files that need several.
    """
    kinds = {}
    for file in files:
        if kind_of(file) not in READERS:
            raise ValueError(f"{str(file)!r} has none of the suffixes {ALLOWED}. Convert it to one of these kinds.")
        kinds[READERS[kind_of(file)]] = file
    if len(kinds) > 1:
        one, other = list(kinds.values())[:2]
        raise ValueError(
            f"{str(one)!r} and {str(other)!r} are of different kinds. Convert one of them, or leave it out."
        )
    return next(iter(kinds))


def kind_of(path: Path) -> str:
    """The suffix of a file, without the `.gz` of a compressed one."""
    return (path.with_suffix("") if path.suffix == ".gz" else path).suffix
