"""The two invariants hold for nearly every architecture with positions that the installed transformers can make."""

import logging
from collections.abc import Iterator

import pytest
import transformers

from recipes.coverage import DOCUMENT, REASONS, Coverage, render, run

SHARE = 0.95
SMALLEST_SWEEPS = {"rotary": 260, "others": 130}
"""So many architectures at least can be built: a sweep that lost its models would prove nothing."""
FEWEST = {"learned": 90, "sinusoidal": 18, "alibi": 3, "relative_bias": 16}
"""So many at least of each other mechanism hold."""

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


@pytest.mark.parametrize("part", SMALLEST_SWEEPS)
def test_the_sweep_is_large(coverage: Coverage, part: str) -> None:
    assert len(getattr(coverage, part).findings) >= SMALLEST_SWEEPS[part]


@pytest.mark.parametrize("mechanism", FEWEST)
def test_every_mechanism_is_in_the_sweep(coverage: Coverage, mechanism: str) -> None:
    assert coverage.others.count(mechanism) >= FEWEST[mechanism]


@pytest.mark.parametrize("part", SMALLEST_SWEEPS)
def test_invariants_hold_for_nearly_every_architecture(coverage: Coverage, part: str) -> None:
    found = getattr(coverage, part)
    assert found.share >= SHARE, [(each.architecture, each.problems) for each in found.failing]


def test_every_model_comes_back_bit_for_bit(coverage: Coverage) -> None:
    findings = [each for part in coverage.parts for each in part.findings]
    restored = [problem for each in findings for problem in each.problems if problem.startswith("not restored")]
    assert restored == []


def test_every_reason_is_that_of_a_failure(coverage: Coverage) -> None:
    assert set(REASONS) == {each.model_class for part in coverage.parts for each in part.failing}


def test_document_is_what_the_sweep_gives(coverage: Coverage) -> None:
    written = DOCUMENT.read_text(encoding="utf-8")
    if f"With transformers {transformers.__version__} " not in written:
        pytest.skip("docs/coverage.md was written with another version of transformers")
    assert written == render(coverage)
