# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_posext"]
# ///
"""Which method learns what in 200 steps: methods x recipes on demo:llama, with the same tokens and the same seed.

    python recipes/compare_tuning.py --out runs/tuning --threads 1

Each cell tunes the model anew for 4 times its trained length, on 2,048 tokens a step: `lora` on the projections of
queries and keys, `lora_plus` with norms and embeddings as well, both on windows of 1,024 tokens, and `pose`, which is
`lora_plus` on windows of 256 tokens with skipped positions. A cell that is done is not done again. It prints tables in
Markdown: perplexity of the last 128 tokens before two endpoints of each of twelve held-out books, with 95 % intervals
over books, and paired differences. About three quarters of an hour on one core.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from hf_posext import FinetuneConfig, PerplexityReport, finetune
from hf_posext.demo import held_out_documents, load_demo, training_documents

TRAINED, TARGET = 256, 1024
METHODS = ("none", "pi", "ntk", "yarn", "self_extend", "alibi")
BARE = {"norms": False, "embeddings": False}
PLUS = {"norms": True, "embeddings": True}
WHOLE, SHORT = {"positions": "full", "length": TARGET}, {"positions": "pose", "length": TRAINED}
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": (BARE, WHOLE),
    "lora_plus": (PLUS, WHOLE),
    "pose": (PLUS, SHORT),
}
PREDICTED = {
    "none": "worst after tuning (PI paper)",
    "pi": "between yarn and ntk (YaRN table 5: 3.57)",
    "ntk": "worst of the three (YaRN table 5: 8.49); best on RULER (LCEG)",
    "yarn": "best (YaRN table 5: 2.77)",
    "self_extend": "needs no tuning",
    "alibi": "broken untuned, not good tuned (CLEX)",
}


def settings(method: str, recipe: str, folder: Path, steps: int) -> FinetuneConfig:
    """The config of one cell."""
    adapter, data = RECIPES[recipe]
    factor = None if method in ("alibi", "none") else TARGET / TRAINED
    target = {"target_length": TARGET} if factor is None else {"factor": factor}
    return FinetuneConfig.from_dict(
        {
            "output_dir": str(folder),
            "patch": None if method == "none" else {"method": method, **target},
            "control_length": TARGET if method == "none" else None,
            "data": {**data, "seed": 17},
            "adapter": {"lora": {"r": 32, "lora_alpha": 64, "target_modules": ["q_proj", "k_proj"]}, **adapter},
            "evaluation": {"context_lengths": [TRAINED, TARGET], "endpoints_per_document": 2},
            "training": {
                "per_device_train_batch_size": 2048 // data["length"],
                "learning_rate": 5e-3,
                "lr_scheduler_type": "linear",
                "warmup_steps": 20,
                "max_steps": steps,
                "save_strategy": "no",
                "seed": 17,
            },
        }
    )


def run_cell(method: str, recipe: str, out: Path, steps: int) -> dict[str, Any]:
    """One cell, from the disk where it was done before."""
    folder = out / f"{method}_{recipe}"
    if not (folder / "report.json").is_file():
        model, tokenizer, _ = load_demo("llama")
        config = settings(method, recipe, folder, steps)
        finetune(model, tokenizer, training_documents(), config, evaluation_documents=held_out_documents())
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def cell(found: dict[str, Any], arm: str, length: int) -> str:
    """A perplexity with its interval."""
    rows = PerplexityReport.from_dict(found).rows
    row = next(row for row in rows if (row["arm"], row["context_length"]) == (arm, length))
    return f"{row['perplexity']:.1f} [{row['low']:.1f}, {row['high']:.1f}]"


def table(cells: dict[tuple[str, str], dict[str, Any]], methods: list[str], recipes: list[str]) -> str:
    """Methods x recipes in Markdown: at T, below at N, and seconds a step."""
    lines = [
        f"| method | untuned | {' | '.join(recipes)} | the papers on tuned models |",
        "|---" * (len(recipes) + 3) + "|",
    ]
    for method in methods:
        first = cells[method, recipes[0]]
        untuned = f"{cell(first, method, TARGET)}<br>{cell(first, method, TRAINED)}"
        tuned = [
            f"{cell(found, f'{method}, tuned', TARGET)}<br>{cell(found, f'{method}, tuned', TRAINED)}<br>"
            f"{found['metrics']['seconds'] / found['metrics']['steps']:.2f} s"
            for found in (cells[method, recipe] for recipe in recipes)
        ]
        lines.append(f"| `{method}` | {untuned} | {' | '.join(tuned)} | {PREDICTED[method]} |")
    return "\n".join(lines)


def renamed(found: dict[str, Any], method: str, recipe: str) -> PerplexityReport:
    """What a cell measured after tuning, under the name of its recipe."""
    report = PerplexityReport.from_dict(found)
    tuned = [each for each in report.measurements if each.arm == f"{method}, tuned"]
    bar = [each for each in report.measurements if each.arm == "truncate"]
    return replace(report, measurements=[*(replace(each, arm=recipe) for each in tuned), *bar], records={})


def pairs(cells: dict[tuple[str, str], dict[str, Any]], methods: list[str], recipes: list[str]) -> str:
    """Paired differences at T in Markdown, nats per token: each recipe to truncating, and to the recipe before it."""
    steps = [("truncate", recipe) for recipe in recipes] + list(pairwise(recipes))
    lines = [f"| method | {' | '.join(f'{new} - {old}' for old, new in steps)} |", "|---" * (len(steps) + 1) + "|"]
    for method in methods:
        joined = PerplexityReport.join(renamed(cells[method, recipe], method, recipe) for recipe in recipes)
        found = [joined.difference(new, old, TARGET) for old, new in steps]
        numbers = [f"{each['difference']:+.3f} [{each['low']:+.3f}, {each['high']:+.3f}]" for each in found]
        lines.append(f"| `{method}` | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs all cells and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cells = {}
    for recipe in arguments.recipes:
        for method in arguments.methods:
            cells[method, recipe] = run_cell(method, recipe, arguments.out, arguments.steps)
            print(f"{method} {recipe}: {cell(cells[method, recipe], f'{method}, tuned', TARGET)}", flush=True)
    text = "\n\n".join(make(cells, arguments.methods, arguments.recipes) for make in (table, pairs))
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
