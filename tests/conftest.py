"""What holds for every test: one thread, fixed seeds, no network, and nothing logged by transformers goes unseen."""

import logging
import os
import random
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from transformers.utils import logging as transformers_logging

torch.set_num_threads(1)

ALLOWED_LOGS: dict[str, str] = {}
"""Start of a log line -> why a correct use may cause it."""


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marker for tests whose subject is what transformers logs."""
    config.addinivalue_line("markers", "transformers_logs(reason): log lines of transformers do not fail this test")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


class Recorder(logging.Handler):
    """Keeps the warnings that are logged."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line, whatever its level."""
        self.lines.append(record.getMessage())


@pytest.fixture(autouse=True)
def transformers_logs(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Fails a test in which transformers logged a warning (deprecations are logged, not raised) that is not allowed."""
    recorder, library = Recorder(), logging.getLogger("transformers")
    transformers_logging.warning_once.cache_clear()  # each line would otherwise be seen once in the whole run
    library.addHandler(recorder)
    yield recorder.lines
    library.removeHandler(recorder)
    bad = [line for line in recorder.lines if not line.startswith(tuple(ALLOWED_LOGS))]
    if bad and request.node.get_closest_marker("transformers_logs") is None:
        pytest.fail("transformers logged:\n" + "\n".join(bad), pytrace=False)
