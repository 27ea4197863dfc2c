"""The record of a patch: plain data that says all that is needed to redo it, in `config.posext` and `posext.json`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from hf_posext.errors import PatchError
from hf_posext.mechanisms import find_root
from hf_posext.reports import write_atomically

SCHEMA = 1
FILE_NAME = "posext.json"
OWN_WEIGHTS = "posext.safetensors"  # beside an adapter: what was trained of the patch itself
CONFIG_FIELD = "posext"
ONLY_BEYOND = "only_beyond_trained_length"
GATED = "_posext_gated"
"""Name in the `__dict__` of a layer of PEFT that acts on tokens beyond the trained length alone."""


@dataclass(frozen=True)
class PatchRecord:
    """One applied patch.

    Attributes:
        method: canonical name.
        options: options that were given.
        factor: s relative to the model as given.
        trained_length: N in tokens of the model as given.
        target_length: T in tokens.
        original_max_position_embeddings: the very first N, before any scaling that the checkpoint carried.
        total_factor: T over the very first N.
        layers: "full" or "all".
        dynamic: whether the factor follows the length of the text, up to `factor`.
        scale: "live", or "frozen" for the length of a call of `generate`.
        sites: paths of the changed modules.
        mechanisms: what encodes position at each of them.
        native: what lets plain transformers load it: a `rope_type`, "weights" (it is in the state dict), "unchanged",
            or None where only `load_pretrained` can.
        before: path of a sub-config -> its fields as they were before the patch (None: the field was not there).
        note: what a reader of the config should know where plain transformers cannot load the patch.
        own: last names of what the patch has added to the weights, which plain transformers does not know.
        previous: the records that this one was composed on, oldest first.
        schema: version of this layout.
        version: version of the package that wrote it.
    """

    method: str
    options: dict[str, Any]
    factor: float
    trained_length: int
    target_length: int
    original_max_position_embeddings: int
    total_factor: float
    layers: str
    sites: list[str]
    native: str | None
    before: dict[str, dict[str, Any]]
    mechanisms: list[str] = field(default_factory=list)
    previous: list[dict[str, Any]] = field(default_factory=list)
    dynamic: bool = False
    scale: str = "live"
    note: str = ""
    own: list[str] = field(default_factory=list)
    schema: int = SCHEMA
    version: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, nothing shared with the record."""
        return json.loads(json.dumps(asdict(self), default=plain))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PatchRecord:
        """The record behind `to_dict`.

        Raises:
            PatchError: written by a newer version, or not a record.
        """
        schema = data.get("schema")
        if schema != SCHEMA:
            raise PatchError(f"The patch record has schema {schema!r}, this version reads {SCHEMA}. Upgrade hf_posext.")
        names = {each.name for each in fields(cls)}
        try:
            return cls(**{name: value for name, value in data.items() if name in names})
        except TypeError as error:
            raise PatchError(f"The patch record is incomplete ({error}). Patch the model again.") from error

    def steps(self) -> list[PatchRecord]:
        """All patches that are in force, oldest first, this one last."""
        return [*(PatchRecord.from_dict(data) for data in self.previous), self]

    def mechanism_at(self, path: str) -> str | None:
        """What encodes position at the changed module of some path, None where it was not changed.

        In a model that was saved with a head and loaded without it, or the other way, paths have another beginning.
        """
        for name, mechanism in zip(self.sites, self.mechanisms, strict=True):
            if path == name or path.endswith(f".{name}") or name.endswith(f".{path}"):
                return mechanism
        return None

    def describe(self) -> str:
        """Method, factor and lengths in a few words."""
        word = f"{self.method} (dynamic)" if self.dynamic else self.method
        unit = "pixels per side" if "grid" in self.mechanisms else "tokens"
        return f"{word} x{self.factor:g} ({self.trained_length} -> {self.target_length} {unit})"


def plain(value: Any) -> Any:
    """Numbers of numpy and torch as those of Python.

    Raises:
        TypeError: anything else that is no plain data.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"An option must be plain data (numbers, strings, lists), got {value!r}.")


def record_of(model: nn.Module) -> PatchRecord | None:
    """The record of a patched model, in force or only written in its config; None without one."""
    root = find_root(model)
    data = getattr(root.config, CONFIG_FIELD, None) if root is not None else None
    return PatchRecord.from_dict(data) if data else None


def write_record(model: nn.Module, directory: str | os.PathLike[str]) -> Path:
    """Writes `posext.json` into a folder, such as that of a saved adapter, whose own files know nothing of positions.

    It also says whether the adapter is gated, so that it acts beyond the trained length alone.

    Raises:
        PatchError: the model is not patched.
    """
    record = record_of(model)
    if record is None:
        raise PatchError("The model is not patched, so there is no record to write. Call `patch_model` first.")
    gated = {ONLY_BEYOND: True} if is_gated(model) else {}
    path = Path(directory) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps({**record.to_dict(), **gated}, indent=2) + "\n")
    return path


def read_record(directory: str | os.PathLike[str]) -> PatchRecord | None:
    """The record in a folder's `posext.json`, None without the file."""
    path = Path(directory) / FILE_NAME
    return PatchRecord.from_dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def is_gated(model: nn.Module) -> bool:
    """Whether an adapter of a model acts beyond the trained length alone."""
    return any(GATED in vars(module) for module in model.modules())


def is_for_gated(directory: str | os.PathLike[str]) -> bool:
    """Whether a folder's `posext.json` says so of the adapter beside it."""
    path = Path(directory) / FILE_NAME
    return path.is_file() and bool(json.loads(path.read_text(encoding="utf-8")).get(ONLY_BEYOND))
