"""Peak memory with a vocabulary of 262,144 words, each measured in a process of its own (by the benchmark's code)."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from hf_posext.evaluation.scoring import LOGITS

ROOT = Path(__file__).parents[2]
BLOCK = 4 * LOGITS / 1e6  # megabytes of the logits that the head makes at a time, in fp32
LONGEST = 32_768


@cache
def megabytes(arm: str, length: int) -> dict[str, float]:
    """`peak_mb` of the whole process, and `step_mb` of it that came after the model was there."""
    words = ["--arm", arm, "--hidden", "64", "--length", str(length), "--threads", "1"]
    script = ROOT / "recipes" / "benchmarks" / "perplexity_memory.py"
    ended = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, check=True, timeout=300)
    return json.loads(ended.stdout)


def test_perplexity_at_32k_takes_little_more_memory_than_a_forward_without_logits() -> None:
    assert megabytes("tail", LONGEST)["peak_mb"] <= 1.2 * megabytes("forward", LONGEST)["peak_mb"]


@pytest.mark.parametrize(("arm", "length", "other"), [("tail", LONGEST, "forward"), ("full", 1024, None)])
def test_what_comes_on_top_is_a_block_of_logits_and_its_softmax(arm: str, length: int, other: str | None) -> None:
    """Of `full` all logits of 1024 tokens would be 1074 MB; the benchmark has it at 32k, where they would be 34 GB."""
    without_logits = megabytes(other, length)["step_mb"] if other else 0.0
    assert megabytes(arm, length)["step_mb"] - without_logits <= 2.5 * BLOCK
