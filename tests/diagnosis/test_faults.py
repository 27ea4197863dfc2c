"""Each planted fault is found by the check that is meant for it, and by none before it is planted."""

from types import SimpleNamespace
from typing import Any

import pytest

from hf_posext.diagnosis import diagnose
from tests.diagnosis.faults import FAULTS

NAMES = list(FAULTS)
GENEROUS = SimpleNamespace(model_max_length=10**30)


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_is_found_and_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    model = fault.healthy()
    given = fault.plant(model, monkeypatch)
    tokenizer = given if isinstance(given, SimpleNamespace) else None
    report = diagnose(model, tokenizer)
    assert not report.is_healthy
    assert report[fault.check].status == "wrong", str(report)
    assert report[fault.check].meaning.endswith(".")
    assert report[fault.check].action.endswith(".")
    assert report[fault.check].action != "Nothing to do."


@pytest.mark.parametrize("name", NAMES)
def test_the_check_is_silent_before_the_fault_is_planted(name: str) -> None:
    fault = FAULTS[name]
    found = diagnose(fault.healthy(), GENEROUS)
    assert found.wrong == []
    assert found[fault.check].status != "wrong"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("frequencies in bf16", "bfloat16"),
        ("frequencies rounded in place", "float16"),
        ("rotated twice", "twice"),
        ("not rotated", "without rotation"),
        ("positions cut at N", "at position 32"),
        ("positions repeated after N", "at position 32"),
        ("table of zeros", "`transformer.wpe`"),
        ("table shorter than the config", "24 rows"),
        ("tokenizer cuts", "at 16 tokens"),
        ("config edited to yarn", "`model.rotary_emb`"),
        ("recorded, not in force", "self_extend"),
        ("module replaced after the patch", "`model.rotary_emb`"),
    ],
)
def test_a_finding_says_what_and_where(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    model = fault.healthy()
    given: Any = fault.plant(model, monkeypatch)
    tokenizer = given if isinstance(given, SimpleNamespace) else None
    assert says in diagnose(model, tokenizer)[fault.check].meaning
