"""Compares alternatives in one process: A B A B rounds, medians, fixed threads; JSON with the environment."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers


def compare(arms: dict[str, Callable[[], Any]], *, rounds: int = 15, warmup: int = 2) -> dict[str, float]:
    """Median seconds of each arm; all arms run once in every round, so that a slow minute hits all of them.

    Args:
        arms: name -> what is timed.
        rounds: timed rounds.
        warmup: rounds before these.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for index in range(warmup + rounds):
        for name, run in arms.items():
            start = time.perf_counter()
            run()
            if index >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def environment() -> dict[str, Any]:
    """What a reader needs to judge the numbers."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def arguments(description: str) -> argparse.Namespace:
    """`--threads` and `--out`, common to all benchmarks; the threads are set."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    return parsed


def report(name: str, rows: list[dict[str, Any]], out: Path | None) -> None:
    """Prints the rows and writes them with the environment."""
    for row in rows:
        print(
            "  ".join(
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
            )
        )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"benchmark": name, "environment": environment(), "rows": rows}, indent=2) + "\n")
