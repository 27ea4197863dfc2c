# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_posext"]
# ///
"""What each untuned method gives long text and costs short text: the whole result set for one model, with figures.

    python recipes/evaluate_long_context.py --model demo:llama --out runs/results --threads 1
    python recipes/evaluate_long_context.py --model demo:gpt_neox --out runs/results --threads 1
    python recipes/evaluate_long_context.py --model DIR --text BOOKS.jsonl --out runs/results

Three measurements: NLL of the last 128 tokens before an endpoint of each document, with 1 to 16 times the trained
length N as context, beside the unpatched model, truncating and a sliding window; the pairs of arms whose order papers
predict (`recipes/long_context_pairs.py`, written down before they were measured), each with its paired interval over
documents, the Holm-corrected p and the share of resamples in which the order holds; and copying of random strings over
the whole context, which only a model that copies within N can be asked.

Into the folder OUT go, with the model's name in front: comparison.json and copy.json (what is there is not measured
anew), results.json and results.md (all tables), and tail, tradeoff and copy as .png and .svg. The tables are printed.
Models are never pooled: one checkpoint is one seed. Eight minutes of one core for each embedded model, and about half
as much again with `--endpoints 2`; docs/results.md is what they say.
"""

from __future__ import annotations

import argparse
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import long_context_copy as copying
import long_context_pairs as pairs
import matplotlib
import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_posext import ComparisonReport, PasskeyReport, compare, inspect_model
from hf_posext.demo import load_demo
from hf_posext.evaluation.plots import save_figure

TIMES = (1, 2, 4, 8, 16)
ONCE = "ntk (once)"
METHODS: tuple[Any, ...] = (
    "pi",
    "ntk",
    {"method": "ntk", "name": ONCE, "per_length": False},  # with headroom at all but the longest context
    "ntk_by_parts",
    "yarn",
    {"method": "yarn", "beta_fast": "auto"},
    {"method": "yarn", "dynamic": True},
    "llama3",
    "dynamic_ntk",
    "self_extend",
    "rerope",
    "leaky_rerope",
    "alibi",
    "nope",
)
DRAWN = ("none", "truncate", "window", "pi", "ntk", "ntk_by_parts", "yarn", "self_extend", "rerope")
DEMO = "demo:"


def load(name: str, texts: list[Path]) -> tuple[Any, Any, list[Any] | None]:
    """Model, tokenizer and documents; those of an embedded model if no text is given."""
    given = [document for path in texts for document in read(path)]
    if name.startswith(DEMO):
        model, tokenizer, documents = load_demo(name.removeprefix(DEMO))
        return model, tokenizer, given or documents
    return AutoModelForCausalLM.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name), given


def read(path: Path) -> list[Any]:
    """One document of a .txt file, or one per line of a .jsonl or .jsonl.gz file."""
    if path.suffix == ".txt":
        return [path.read_text(encoding="utf-8")]
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def measure(arguments: argparse.Namespace) -> tuple[ComparisonReport, list[PasskeyReport]]:
    """Both measurements, from the disk as far as they were made before."""
    first, second = (Path(f"{arguments.prefix}-{kind}.json") for kind in ("comparison", "copy"))
    if not (first.is_file() and second.is_file()):
        model, tokenizer, documents = load(arguments.model, arguments.text)
        trained = inspect_model(model).trained_length
        if trained is None:
            raise SystemExit(f"{arguments.model} does not say the length that it was trained at.")
    if not first.is_file():
        lengths = [times * trained for times in TIMES]
        settings = {"context_lengths": lengths, "endpoints_per_document": arguments.endpoints}
        compare(model, tokenizer, documents, methods=METHODS, **settings).to_json(first)
    if not second.is_file():
        reports = copying.measure(model, tokenizer, documents, trained, arguments.trials)
        second.write_text(json.dumps([report.to_dict() for report in reports], indent=2), encoding="utf-8")
    copies = json.loads(second.read_text(encoding="utf-8"))
    comparison = ComparisonReport.from_dict(json.loads(first.read_text(encoding="utf-8")))
    return comparison, [PasskeyReport.from_dict(data) for data in copies]


def pair_table(rows: list[dict[str, Any]], role: str) -> str:
    """The declared pairs of one role in Markdown: a line for each order, a column for each length."""
    own = [row for row in rows if row["role"] == role]
    places = sorted({row["times"] for row in own})
    heads = [f"{times}N" if times > 1 else f"N, patched for {TIMES[-1]}N" for times in places]
    orders = dict.fromkeys((row["claim"], row["better"], row["worse"], row["source"]) for row in own)
    lines = [f"| order | {' | '.join(heads)} | source |", "|---" * (len(heads) + 2) + "|"]
    for key, better, worse, source in orders:
        found = {
            row["times"]: row for row in own if (row["claim"], row["better"], row["worse"]) == (key, better, worse)
        }
        cells = [pair_cell(found[times]) if times in found else "" for times in places]
        lines.append(f"| {key}: `{better}` < `{worse}` | {' | '.join(cells)} | {source} |")
    return "\n".join(lines)


def pair_cell(row: dict[str, Any]) -> str:
    """Difference with its interval, p, share of resamples in this order, and the outcome if it does not hold."""
    number = f"{row['difference']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]"
    p = [] if row["p_holm"] is None else [f"p {row['p_holm']:.2g}"]
    outcome = [] if row["outcome"] == pairs.HOLDS else [row["outcome"]]
    return ", ".join([number, *p, f"{row['share']:.1%}", *outcome])


def tau_lines(taus: list[dict[str, Any]]) -> str:
    """Kendall's tau at each length, with both orders."""
    papers = " < ".join(" = ".join(f"`{arm}`" for arm in arms) for arms in pairs.PAPERS)
    return "\n".join(
        [f"Order of the papers: {papers}.", ""]
        + [
            f"- {each['times']}N: tau {each['tau']:.2f} [{each['low']:.2f}, {each['high']:.2f}]; here "
            + " < ".join(f"`{arm}`" for arm in each["order"])
            for each in taus
        ]
    )


def figures(comparison: ComparisonReport, copies: list[PasskeyReport]) -> dict[str, Figure]:
    """All figures by the last part of their names."""
    drawn = [one for arm in DRAWN for one in comparison.measurements if one.arm == arm]
    short = [one for one in comparison.short if one.arm != ONCE]  # at the longest context it is `ntk`
    return {
        "tail": replace(comparison, measurements=drawn).plot(),
        "tradeoff": replace(comparison, short=short).plot_tradeoff(),
        "copy": copying.plot(copies),
    }


def page(comparison: ComparisonReport, copies: list[PasskeyReport], results: dict[str, Any], name: str) -> str:
    """All tables in Markdown."""
    gate = copies[-1].gates["none"]
    exact = ", ".join(f"`{arm}`: {'yes' if is_equal else 'no'}" for arm, is_equal in results["exact"].items())
    parts = [
        f"## {name}",
        comparison.to_markdown().strip(),
        "**Declared pairs**: NLL of the first minus that of the second in nats per token [paired 95 %], p corrected by "
        "Holm for all in this table, and the share of resamples in this order",
        pair_table(results["pairs"], pairs.SAFE),
        "Claims of no gain, which hold unless the interval is above zero",
        pair_table(results["pairs"], pairs.NO_GAIN),
        "Descriptive: papers or scales disagree, so that nothing is claimed",
        pair_table(results["pairs"], pairs.DESCRIPTIVE),
        f"O2, the very sums of the unpatched model at N: {exact}.",
        "**Kendall's tau** over the pairs that the papers order",
        tau_lines(results["kendall"]),
        f"**Copies of a random string** (share of {gate['trials']} trials; gate at {gate['context_length']} tokens, "
        f"unpatched: {gate['accuracy']:.2f} [{gate['low']:.2f}, {gate['high']:.2f}])",
        copying.table(copies),
        "\n".join(f"- {note}" for note in dict.fromkeys(note for report in copies for note in report.notes)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def main() -> None:
    """Measures, draws, writes and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo:llama", help="demo:llama, demo:gpt_neox, a folder or a hub id")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help=".txt, .jsonl or .jsonl.gz files")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--endpoints", type=int, default=1, help="places in each document where scored tokens end")
    parser.add_argument("--trials", type=int, default=48, help="copies at each length")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = arguments.model.removeprefix(DEMO).rstrip("/").rpartition("/")[-1]
    arguments.prefix = arguments.out / name
    comparison, copies = measure(arguments)
    results = {
        "pairs": pairs.judge(comparison),
        "exact": pairs.exact(comparison),
        "kendall": [found for times in TIMES[2:] if (found := pairs.kendall(comparison, times)) is not None],
        "copies": copying.rows(copies),
    }
    text = page(comparison, copies, results, arguments.model)
    Path(f"{arguments.prefix}-results.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    Path(f"{arguments.prefix}-results.md").write_text(text, encoding="utf-8")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # words stay words, and the file small
        for kind, figure in figures(comparison, copies).items():
            for suffix in ("png", "svg"):
                save_figure(figure, f"{arguments.prefix}-{kind}.{suffix}")
    print(text)


if __name__ == "__main__":
    main()
