"""FinetuneConfig: all that a run is made of, from Python, a YAML file or `key=value` words, checked before it begins.

The sections `lora` and `training` are handed to `peft.LoraConfig` and `transformers.TrainingArguments`, which know
their own keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from hf_posext.arguments import check_choice, check_flag, check_length
from hf_posext.training.sections import build, check_share, override, parse

POSITIONS = ("full", "pose", "random_length", "randomized")
TRAINED = ("lora", "new_rows", "full")


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how it is cut into rows.

    Attributes:
        path: a text, JSON or parquet file, several of them, a folder, or a hub id, or `demo:training` for the books
            of the package; None where documents are given.
        name: configuration of a hub data set.
        split: of the data set.
        text_column: where a row holds its text.
        streaming: read while training, so that nothing has to fit on the disk; needs `training.max_steps`.
        workers: processes that tokenise; None for one.
        max_documents: read as many documents at most.
        length: tokens of a row; None for T, with `pose` and `randomized` for N.
        positions: `full` windows; `pose` skips positions between `chunks` pieces of a row so that N tokens reach up to
            T (arXiv 2309.10400); `random_length` draws the length of each row from `shortest` to `length`
            (arXiv 2405.13226 trains on varied lengths); `randomized` draws sorted positions below T (arXiv 2305.16843).
        chunks: pieces of a row with `pose`.
        shortest: tokens of the shortest row with `random_length`; None for N.
        packing: put several short documents into one row; positions begin anew at each and none sees another.
        short_fraction: share of the rows that hold text of N tokens only, the guard of short contexts; `full` rows of
            a causal model hold several of them, packed.
        mask_share: of a masked LM: share of the tokens that are asked for.
        seed: of every draw.
    """

    path: str | list[str] | None = None
    name: str | None = None
    split: str = "train"
    text_column: str = "text"
    streaming: bool = False
    workers: int | None = None
    max_documents: int | None = None
    length: int | None = None
    positions: str = "full"
    chunks: int = 2
    shortest: int | None = None
    packing: bool = False
    short_fraction: float = 0.0
    mask_share: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuses what cannot be meant.

        Raises:
            TypeError, ValueError: names the key, what came and what is allowed.
        """
        check_choice("data.positions", self.positions, POSITIONS)
        for name in ("workers", "max_documents", "length", "chunks", "shortest"):
            if getattr(self, name) is not None:
                check_length(f"data.{name}", getattr(self, name))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"`data.seed` must be a whole number from 0 on, got {self.seed!r}.")
        for name in ("streaming", "packing"):
            check_flag(f"data.{name}", getattr(self, name))
        check_share("data.short_fraction", self.short_fraction)
        check_share("data.mask_share", self.mask_share)
        if self.mask_share == 0:
            raise ValueError("`data.mask_share` must be above 0, got 0: a masked LM would be asked for nothing.")
        if self.positions == "pose" and self.chunks < 2:
            raise ValueError(f"`data.chunks` must be at least 2 with positions: pose, got {self.chunks}.")
        if self.packing and self.positions != "full":
            raise ValueError(f"`data.packing` goes with positions: full only, got {self.positions!r}. Leave one out.")
        if self.shortest is not None and self.length is not None and self.shortest > self.length:
            raise ValueError(f"`data.shortest` must be at most `data.length` {self.length}, got {self.shortest}.")


@dataclass(frozen=True)
class AdapterConfig:
    """What is trained, and what becomes of it.

    Attributes:
        train: `lora` for an adapter, `new_rows` for the rows that a patch has added to a learned table, `full` for
            every weight.
        lora: keyword arguments of `peft.LoraConfig`; `target_modules` may also be `attention` (the default) or
            `all-linear`.
        norms: train the norms whole as well; None for True from factor 4 (arXiv 2309.12307 table 2).
        embeddings: train the embedding of tokens whole as well; None as `norms`.
        only_beyond_trained_length: patch and adapter are off for text of at most N tokens; None for True where the
            patch is dynamic.
        merge: write a plain checkpoint with the adapter merged into the weights.
    """

    train: str = "lora"
    lora: dict[str, Any] = field(default_factory=dict)
    norms: bool | None = None
    embeddings: bool | None = None
    only_beyond_trained_length: bool | None = None
    merge: bool = False

    def __post_init__(self) -> None:
        """Refuses what cannot be meant.

        Raises:
            TypeError, ValueError: names the key, what came and what is allowed.
        """
        check_choice("adapter.train", self.train, TRAINED)
        for name in ("norms", "embeddings", "only_beyond_trained_length"):
            if getattr(self, name) is not None:
                check_flag(f"adapter.{name}", getattr(self, name))
        check_flag("adapter.merge", self.merge)
        if self.train != "lora":
            adapters = ("lora", "norms", "embeddings", "only_beyond_trained_length", "merge")
            given = [name for name in adapters if getattr(self, name)]
            if given:
                raise ValueError(
                    f"`adapter.{given[0]}` goes with train: lora only, got train: {self.train!r}. Leave one out."
                )
        if self.merge and self.only_beyond_trained_length:
            raise ValueError(
                "`adapter.merge` cannot go with only_beyond_trained_length: what is merged into the weights cannot be "
                "off for short text. Leave one out."
            )


@dataclass(frozen=True)
class EvaluationConfig:
    """What is measured before and after, and while it trains.

    Attributes:
        path: held-out text, as `DataConfig.path`; None where documents are given to `finetune`, or for no evaluation.
        context_lengths: in tokens; None for N/2, N, 2N, ... up to T.
        name: configuration of a hub data set.
        split: of the data set.
        text_column: where a row holds its text.
        targets: tokens scored at each endpoint; None for the default of `perplexity` or `pseudo_perplexity`.
        endpoints_per_document: places in each document where targets end.
        max_documents: read as many documents at most.
        every: steps between two measurements while it trains, of T tokens; None for none.
    """

    path: str | list[str] | None = None
    context_lengths: list[int] | None = None
    name: str | None = None
    split: str = "train"
    text_column: str = "text"
    targets: int | None = None
    endpoints_per_document: int = 1
    max_documents: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        """Refuses what cannot be meant.

        Raises:
            TypeError, ValueError: names the key, what came and what is allowed.
        """
        for name in ("targets", "endpoints_per_document", "max_documents", "every"):
            if getattr(self, name) is not None:
                check_length(f"evaluation.{name}", getattr(self, name))
        if not isinstance(self.context_lengths, list | tuple | None):
            raise TypeError(f"`evaluation.context_lengths` must be a list of lengths, got {self.context_lengths!r}.")
        for length in self.context_lengths or []:
            check_length("evaluation.context_lengths", length)


@dataclass(frozen=True)
class FinetuneConfig:
    """A fine-tuning run.

    Attributes:
        model: what the command line and the recipe load: a folder, a hub id, or `demo:llama`.
        output_dir: folder of the checkpoints, the adapter and the report.
        patch: arguments of `patch_model`, options of the method among them; None where the model is patched already.
        control_length: T in tokens of a control, a model that is trained without a patch; None demands a patch.
        data: see `DataConfig`.
        adapter: see `AdapterConfig`.
        evaluation: see `EvaluationConfig`.
        training: keyword arguments of `transformers.TrainingArguments`.
        resume: go on from the newest complete checkpoint in `output_dir`, if there is one.
        chunk: rows of hidden states that the head sees at a time.
    """

    model: str | None = None
    output_dir: str = "posext_finetuned"
    patch: dict[str, Any] | None = None
    control_length: int | None = None
    data: DataConfig = field(default_factory=DataConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    training: dict[str, Any] = field(default_factory=dict)
    resume: bool = True
    chunk: int = 1024

    def __post_init__(self) -> None:
        """Refuses what cannot be meant.

        Raises:
            TypeError, ValueError: names the key, what came and what is allowed.
        """
        check_flag("resume", self.resume)
        check_length("chunk", self.chunk)
        if self.control_length is not None:
            check_length("control_length", self.control_length)
            if self.patch is not None:
                raise ValueError("`control_length` is for a run without a `patch`, and both are given. Leave one out.")
        if self.patch is not None and "method" not in self.patch:
            raise ValueError(f"`patch` needs a `method`, got {self.patch!r}. For example {{method: pi, factor: 4}}.")
        if "output_dir" in self.training:
            raise ValueError("`training.output_dir` is `output_dir` at the top of the file. Move it there.")

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Self:
        """A config from a YAML file and words that override it.

        Args:
            path: the file.
            overrides: `key=value` with a dotted key, the value in YAML: `training.max_steps=50`, `patch.factor=8`.

        Raises:
            FileNotFoundError: there is no such file.
            TypeError, ValueError: an unknown key, or a value that is not allowed.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"There is no file {str(path)!r}. CONFIG is a YAML file of a fine-tuning run.")
        data = parse(Path(path).read_text(encoding="utf-8"), str(path))
        if not isinstance(data, dict):
            raise ValueError(f"{str(path)!r} must hold keys and values, got {type(data).__name__}.")
        for word in overrides:
            override(data, word)
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """A config from plain data, as `to_dict` gives it.

        Raises:
            TypeError, ValueError: an unknown key, or a value that is not allowed.
        """
        return build(cls, data)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)
