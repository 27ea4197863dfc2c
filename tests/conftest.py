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

from tests.host_logs import Lines, listening

torch.set_num_threads(1)

ALLOWED_WARNINGS: tuple[tuple[str, str], ...] = (
    ("`is_gradient_checkpointing` is deprecated", "peft 0.21 still asks transformers 5.24 under the old name"),
)
"""Start of a warning, and why a correct use may cause it; every other warning is an error."""


def pytest_configure(config: pytest.Config) -> None:
    """Declares the marker for tests whose subject is what transformers logs, and the allowed warnings."""
    config.addinivalue_line("markers", "transformers_logs(reason): log lines of transformers do not fail this test")
    for start, _ in ALLOWED_WARNINGS:
        config.addinivalue_line("filterwarnings", f"ignore:{start}")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def host_logs(request: pytest.FixtureRequest) -> Iterator[Lines]:
    """Fails a test in which transformers logged a warning that is not allowed."""
    with listening() as lines:
        yield lines
    if lines.complaints() and request.node.get_closest_marker("transformers_logs") is None:
        pytest.fail("transformers logged:\n" + "\n".join(lines.complaints()), pytrace=False)


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before; and pytest does not collect the compiler's own trace, which takes most of the time."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
