"""What transformers logs, and what it may: it logs complaints about configs and some deprecations, and raises none."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

ALLOWED_LOGS: dict[str, str] = {
    r"Unrecognized keys in `rope_parameters` for .*'longrope': \{'(short|long)_mscale', '(short|long)_mscale'\}": (
        "PhiMoE reads these keys in its own forward, and its published checkpoints log the same"
    ),
    r"Unrecognized keys in `rope_parameters` for .*'longrope': \{'mscale(_all_dim)?', 'mscale(_all_dim)?'\}": (
        "DeepSeek-V3 takes the temperature of its softmax from these keys under any scaling type"
    ),
    r"The explicitly set RoPE scaling factor .*'factor'\] = 4\.0\) does not match .* = 16\.0\)": (
        "no config can say a factor that follows the length: 4x over a checkpoint with YaRN 4x has lengths of 16x"
    ),
    "mtime may not be reliable on this filesystem": "two checkpoints of a tiny run are less than a second apart",
}
"""Pattern of a log line, and why a correct use may cause it."""


class Lines(logging.Handler):
    """Keeps the warnings that are logged."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line."""
        self.lines.append(record.getMessage())

    def complaints(self) -> list[str]:
        """The lines that are not allowed."""
        return [line for line in self.lines if not any(re.match(pattern, line) for pattern in ALLOWED_LOGS)]


@contextmanager
def listening() -> Iterator[Lines]:
    """Collects what transformers logs in the with-block; a line that it logs once per process is seen each time."""
    lines, library = Lines(), logging.getLogger("transformers")
    transformers_logging.warning_once.cache_clear()
    library.addHandler(lines)
    try:
        yield lines
    finally:
        library.removeHandler(lines)
