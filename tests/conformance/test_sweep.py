"""The two invariants hold for nearly every rotary architecture that the installed transformers can make."""

import logging
from collections.abc import Iterator

import pytest
import transformers

from recipes.coverage import DOCUMENT, Coverage, render, run

SHARE = 0.95
SMALLEST_SWEEP = 240
"""So many architectures at least can be built: a sweep that lost its models would prove nothing."""

pytestmark = [
    pytest.mark.transformers_logs("what transformers says of its own default configurations"),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def coverage() -> Iterator[Coverage]:
    library = logging.getLogger("transformers")
    level = library.level
    library.setLevel(logging.ERROR)
    yield run()
    library.setLevel(level)


def test_the_sweep_is_large(coverage: Coverage) -> None:
    assert len(coverage.findings) >= SMALLEST_SWEEP


def test_invariants_hold_for_nearly_every_architecture(coverage: Coverage) -> None:
    assert coverage.share >= SHARE, [(each.architecture, each.problems) for each in coverage.failing]


def test_every_model_comes_back_bit_for_bit(coverage: Coverage) -> None:
    restored = [
        problem for each in coverage.findings for problem in each.problems if problem.startswith("not restored")
    ]
    assert restored == []


def test_document_is_what_the_sweep_gives(coverage: Coverage) -> None:
    written = DOCUMENT.read_text(encoding="utf-8")
    if f"With transformers {transformers.__version__} " not in written:
        pytest.skip("docs/coverage.md was written with another version of transformers")
    assert written == render(coverage)
