"""Importing the package, and asking the command line for help, loads none of the heavy libraries."""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "peft", "datasets", "accelerate", "matplotlib", "numpy", "huggingface_hub"}
CLI = "from hf_posext.cli import main; main({words!r})"


def heavy_after(statement: str) -> set[str]:
    """Heavy libraries that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport json, sys\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return HEAVY & set(json.loads(ended.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "statement",
    [
        "import hf_posext",
        "import hf_posext; dir(hf_posext); hf_posext.__version__; hf_posext.PatchError",
        "import hf_posext.demo; hf_posext.demo.demo_names()",
        "import hf_posext.cli",
        CLI.format(words=["--help"]),
        CLI.format(words=["--version"]),
        CLI.format(words=["eval", "--help"]),
        CLI.format(words=["demo", "-h"]),
        CLI.format(words=["patch", "demo:llama"]),
    ],
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    assert heavy_after(statement) == set()


def test_the_check_can_fail() -> None:
    assert {"torch", "transformers"} <= heavy_after("import hf_posext; hf_posext.patch_model")
