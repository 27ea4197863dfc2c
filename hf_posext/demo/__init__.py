"""The embedded tiny models, books of their training text, and held-out books that none of them was trained on."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING

from hf_posext.errors import unknown

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

HERE = Path(__file__).parent
HELD_OUT = HERE / "text" / "held_out.jsonl.gz"
TRAINING = HERE / "text" / "training.jsonl.gz"


def demo_names() -> list[str]:
    """Names of the embedded models, one folder each."""
    return sorted(config.parent.name for config in HERE.glob("*/config.json"))


def demo_path(name: str = "llama") -> Path:
    """The folder of an embedded model, as `from_pretrained` takes it.

    Raises:
        ValueError: unknown, with the names that there are.
    """
    names = demo_names()
    if name not in names:
        raise ValueError(unknown("demo model", name, names))
    return HERE / name


def held_out_documents() -> list[str]:
    """The text of each held-out book, in the order of the file."""
    return read_books(HELD_OUT)


def training_documents() -> list[str]:
    """The text of eight of the books that the models were pre-trained on, to tune them with."""
    return read_books(TRAINING)


def read_books(path: Path) -> list[str]:
    """The text of each book in a file, in its order."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def load_demo(name: str = "llama") -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str]]:
    """An embedded model, its tokenizer and the held-out documents, without any network.

    Args:
        name: one of `demo_names()`.

    Returns:
        The model in float32 on the CPU and in evaluation mode, its tokenizer, and one string per document.

    Raises:
        ValueError: unknown, with the names that there are.
    """
    import torch
    import transformers

    path = demo_path(name)
    config = transformers.AutoConfig.from_pretrained(path)
    if hasattr(config, "use_cache"):
        config.use_cache = True
    model_class = getattr(transformers, config.architectures[0])
    model = model_class.from_pretrained(path, config=config, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(path), held_out_documents()
