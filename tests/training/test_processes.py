"""Two processes on one machine (gloo): the loss curve and the weights are those of one process with the same rows."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "training" / "process.py"


def found(folder: Path, mode: str, processes: int, method: str, dynamic: bool) -> dict[str, Any]:
    """What a run with so many processes writes; each step has four rows in all."""
    folder.mkdir()
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    arguments = [mode, str(folder), str(4 // processes), method, str(dynamic)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize(
    ("mode", "method", "dynamic"),
    [
        ("run", "yarn", True),
        ("stream", "pi", False),
        ("stop", "pi", False),
        ("shard", "pi", False),
        ("shard", "yarn", True),
    ],
)
def test_two_processes_learn_what_one_learns(mode: str, method: str, dynamic: bool, tmp_path: Path) -> None:
    """`run`, `stream` and `stop` are the whole recipe under DDP: rows of unequal lengths, documents that are read
    meanwhile, and SIGTERM to one process of both; `shard` is FSDP2 in a plain loop.
    """
    one, two = (found(tmp_path / str(count), mode, count, method, dynamic) for count in (1, 2))
    torch.testing.assert_close(two["losses"], one["losses"], rtol=1e-5, atol=0)
    assert one["losses"][-1] != one["losses"][0]
    assert two["weights"].keys() == one["weights"].keys()
    for name, value in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], value, rtol=1e-3, atol=1e-4, msg=name)
    if mode == "run":
        torch.testing.assert_close(two["tuned"], one["tuned"], rtol=1e-4, atol=0)
