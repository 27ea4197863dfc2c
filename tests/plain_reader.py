"""Loads saved models as somebody does who never heard of this package: `python -m tests.plain_reader JOBS RESULTS`.

Jobs are a JSON list of `{"folder", "auto_class"}`, results a list of `{"logits": {length: tensor}, "logged": [...]}`.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

from tests.host_logs import listening
from tests.snapshots import logits_of

LENGTHS = (16, 64)
"""Below N and at T of every row that is patched by 2, or beyond."""


def main(jobs: str, results: str) -> None:
    """Runs all jobs in one process, since importing transformers takes longer than all of them."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    found = []
    for job in json.loads(Path(jobs).read_text()):
        with listening() as lines:
            model = getattr(transformers, job["auto_class"]).from_pretrained(job["folder"]).eval()
            logits = {length: logits_of(model, length) for length in LENGTHS}
        found.append({"logits": logits, "logged": lines.complaints()})
    if "hf_posext" in sys.modules:
        raise SystemExit("hf_posext was imported: this reader would prove nothing")
    torch.save(found, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
