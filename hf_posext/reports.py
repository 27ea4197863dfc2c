"""The base of every report object: one table for terminal and notebook, plain data, JSON written atomically."""

from __future__ import annotations

import io
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.jupyter import JupyterMixin

TEXT_WIDTH = 120  # columns of the plain-text form, where no terminal says how wide it is


class Report(ABC, JupyterMixin):
    """A result that prints as a table, in a terminal and in a notebook, and gives itself as plain data.

    A report over lengths also has `plot(path=None)`, which returns a matplotlib figure and writes it to the path.
    """

    @abstractmethod
    def table(self) -> RenderableType:
        """The report as a rich table, or a group of a table and its notes."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The report as plain data: dicts, lists, str, int, finite float, bool and None."""

    def named(self, *names: str) -> dict[str, Any]:
        """Some of its attributes as plain data."""
        return {name: plain(getattr(self, name)) for name in names}

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """The report as one JSON document.

        Args:
            path: file to write it to as well; an older one is replaced in one step, so a reader never sees half a file.
        """
        text = json.dumps(plain(self.to_dict()), indent=2, allow_nan=False, ensure_ascii=False)
        if path is not None:
            write_atomically(path, text + "\n")
        return text

    def __rich__(self) -> RenderableType:
        return self.table()

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=TEXT_WIDTH, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def __repr__(self) -> str:
        return str(self)


def plain(value: Any) -> Any:
    """A copy that JSON can carry: mappings and dataclasses to dicts, sequences to lists, all numbers to Python's own.

    JSON has no NaN and no infinity: both become None.

    Raises:
        TypeError: a value that is not plain data.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return plain(value.tolist())
    raise TypeError(f"A report holds plain data only, got {value!r} of type {type(value).__name__}.")


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Writes a UTF-8 text file beside its place and moves it there, so it is either the old or the new one, whole."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, target)  # noqa: PTH105 - the name says that it is atomic, on every system
    finally:
        draft.unlink(missing_ok=True)
