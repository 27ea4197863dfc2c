"""Runs command lines in this process and gives what they wrote."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hf_posext.cli import main


@dataclass(frozen=True)
class Outcome:
    """What a command line came to."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)


@pytest.fixture
def posext(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs `posext` with the given words."""

    def run(*words: object) -> Outcome:
        code = main([str(word) for word in words])
        return Outcome(code, *capsys.readouterr())

    return run
