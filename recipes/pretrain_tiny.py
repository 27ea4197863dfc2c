# /// script
# requires-python = ">=3.11"
# dependencies = ["hf_posext"]
# ///
"""Makes the demo models: a tokenizer and a tiny transformer trained at 256 tokens, so that 512 to 4096 is long for it.

    CONFIG=recipes/configs/llama_pretrain_256.yaml
    python recipes/pretrain_tiny.py $CONFIG --out runs/llama
    python recipes/pretrain_tiny.py $CONFIG --out runs/llama --export hf_posext/demo/llama

The first command trains (about an hour on one core; run it again to resume), the second writes the bf16 weights, the
tokenizer and `training_log.json`. `gpt_neox_pretrain_256.yaml` and `bert_pretrain_256.yaml` make the other two.

A part of the causal models' sequences are copy, repeat and passkey tasks with distances over the whole window: without
them a model of this size cannot copy at all and every retrieval probe on it would be vacuous. Mixed in from the start
they taught Llama nothing (accuracy at chance for 2500 steps); a short stage of nothing but repeated random tokens does,
and the mixture then keeps it. A config with `data.mask` trains a masked language model.

`start: neighbours` begins with heads that look at the tokens beside each one. Without them the masked model's loss was
that of word frequencies (5.3 nats) for all 1100 steps tried, and GPT-NeoX, of which few channels rotate, learned no
copying in 500 steps of repeated tokens.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from datasets import Dataset
from neighbour_heads import STARTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_posext.evaluation.probes import ProbeSequence, copy_sequence, passkey_sequence, repeat_sequence

CORPUS = Path(__file__).parent / "data" / "kjv.jsonl.gz"
IGNORED = -100


def read_books(path: Path) -> dict[str, str]:
    """Title -> text."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return {book["title"]: book["text"] for book in map(json.loads, lines)}


def train_tokenizer(texts: list[str], vocabulary: int, length: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE that adds a BOS; digits are single tokens, so that a pass key has as many tokens as digits."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>", model_max_length=length
    )


class SequenceMaker:
    """Draws training sequences: prose, or one of the synthetic tasks; the kinds are the names of its methods."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int, seed: int) -> None:
        self.tokenizer, self.length, self.rng = tokenizer, length, random.Random(seed)
        self.books = [self.encode(text) for text in texts]
        self.weights = [len(book) for book in self.books]
        self.vocabulary = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def prose(self, length: int) -> list[int]:
        """A window of `length` tokens from a book, books weighted by their length."""
        book = self.rng.choices(self.books, self.weights)[0]
        start = self.rng.randrange(len(book) - length)
        return book[start : start + length]

    def random_repeat(self, room: int) -> ProbeSequence:
        """At least eight times the same few random tokens: what copying is first learned from."""
        passage = self.rng.choices(self.vocabulary, k=self.period(4, room // 8))
        return replace(repeat_sequence(passage, room), random=list(range(len(passage))))

    def repeat(self, room: int) -> ProbeSequence:
        """A passage of prose over and over, as in the repeat probe."""
        return repeat_sequence(self.prose(self.period(16, room // 2)), room)

    def period(self, shortest: int, longest: int) -> int:
        """Tokens of a passage, log-uniform."""
        return round(shortest * (longest / shortest) ** self.rng.random())

    def copy(self, room: int) -> ProbeSequence:
        """A random string and its copy at a distance that is uniform over what fits."""
        payload = self.rng.randint(12, 80)
        return self.copy_at(room, payload, self.rng.randint(payload, room - payload))

    def copy_gate(self, room: int) -> ProbeSequence:
        """The in-window copy probe: 32 random tokens, distances uniform over the window."""
        return self.copy_at(room, 32, self.rng.randint(32, room - 32))

    def copy_at(self, room: int, payload: int, distance: int) -> ProbeSequence:
        """A copy task of exactly `room` tokens."""
        lead = room - distance - payload
        return copy_sequence(self.rng, self.prose(room), self.vocabulary, payload=payload, distance=distance, lead=lead)

    def passkey(self, room: int) -> ProbeSequence:
        """A key of five digits at any depth."""
        return passkey_sequence(self.rng, self.encode, self.prose(room), room, depth=self.rng.random())

    def row(self, kind: str) -> dict[str, list[int]]:
        """One example with BOS: prose learns all tokens, a task all but the random ones, `copy_gate` the copy only."""
        room, bos = self.length - 1, self.tokenizer.bos_token_id
        if kind == "prose":
            tokens = [bos, *self.prose(room)]
            return {"input_ids": tokens, "labels": tokens}
        task: ProbeSequence = getattr(self, kind)(room)
        learned = task.scored if kind == "copy_gate" else sorted({*range(room)} - {*task.random})
        labels = [IGNORED] * room
        for position in learned:
            labels[position] = task.tokens[position]
        return {"input_ids": [bos, *task.tokens], "labels": [IGNORED, *labels]}

    def dataset(self, kinds: list[str]) -> Dataset:
        """One row for each entry of `kinds`."""
        return Dataset.from_list([self.row(kind) for kind in kinds])


def accuracy(prediction: Any, shift: int) -> dict[str, float]:
    """Share of labelled tokens whose arg max is right, `shift` places before them."""
    guesses, labels = prediction.predictions, prediction.label_ids
    guesses, labels = guesses[:, : guesses.shape[1] - shift], labels[:, shift:]
    return {"accuracy": float((guesses == labels)[labels != IGNORED].mean())}


def as_they_are(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch of rows of one length."""
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def build(config: dict[str, Any], out: Path) -> Trainer:
    """Tokenizer, data, model and Trainer from the YAML sections."""
    data, books = config["data"], read_books(CORPUS)
    apart = {*data["validation"], *data["held_out"]}
    if unknown := apart - books.keys():
        raise ValueError(f"Not in {CORPUS.name}: {sorted(unknown)}. Known: {sorted(books)}.")
    training_texts = [text for title, text in books.items() if title not in apart]
    tokenizer = train_tokenizer(training_texts, data["vocabulary"], data["length"])
    long_enough = [text for text in training_texts if len(text) > 8 * data["length"]]
    maker = SequenceMaker(tokenizer, long_enough, data["length"], data["seed"])
    batch = config["training"]["per_device_train_batch_size"]
    kinds = [
        kind
        for stage in data["stages"]
        for kind in maker.rng.choices(list(stage["mix"]), list(stage["mix"].values()), k=stage["steps"] * batch)
    ]
    validation = SequenceMaker(tokenizer, [books[t] for t in data["validation"]], data["length"], data["seed"] + 1)
    set_seed(config["training"]["seed"])
    masked = data.get("mask")
    if masked:  # the tokenizer is the causal models' with one more token
        tokenizer.add_special_tokens({"mask_token": "<mask>"})
    model_class = getattr(transformers, config["architecture"])
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    model = model_class(model_class.config_class(**tokens, **config["model"]))
    if config.get("start") == "neighbours":
        STARTS[config["architecture"]](model)
    arguments = TrainingArguments(
        output_dir=str(out),
        report_to="none",
        use_cpu=True,
        max_steps=sum(stage["steps"] for stage in data["stages"]),
        train_sampling_strategy="sequential",  # the rows are random draws already, and the stages have an order
        **config["training"],
    )
    return Trainer(
        model,
        arguments,
        train_dataset=maker.dataset(kinds),
        eval_dataset={name: validation.dataset([kind] * 128) for name, kind in data["judged"].items()},
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=masked) if masked else as_they_are,
        compute_metrics=partial(accuracy, shift=0 if masked else 1),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )


def override(config: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """Applies `section.key=value` settings; an unknown section is an error, keys are checked by their consumer."""
    for setting in settings:
        path, _, value = setting.partition("=")
        section, _, key = path.partition(".")
        if section not in config or not key or not value:
            raise ValueError(f"`--set` takes section.key=value with a section of {sorted(config)}, got {setting!r}.")
        config[section][key] = yaml.safe_load(value)
    return config


def export(trainer: Trainer, out: Path, directory: Path) -> None:
    """The newest checkpoint as bf16 safetensors, with tokenizer and the loss curve."""
    checkpoint = get_last_checkpoint(str(out))
    if checkpoint is None:
        raise FileNotFoundError(f"No checkpoint in {out}: train first, without `--export`.")
    model = type(trainer.model).from_pretrained(checkpoint, dtype=torch.bfloat16)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = True  # training switched it off
    model.save_pretrained(directory)
    trainer.processing_class.save_pretrained(directory)
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text())
    log = [{key: entry[key] for key in entry if key in LOGGED} for entry in state["log_history"]]
    (directory / "training_log.json").write_text(
        json.dumps([entry for entry in log if len(entry) > 1], indent=0) + "\n"
    )
    (directory / "model.safetensors").chmod(0o644)  # it is written for its owner alone


LOGGED = ("step", "loss", "eval_prose_loss", "eval_prose_accuracy", "eval_copy_accuracy")


def main() -> None:
    """Trains, or with `--export` writes the shipped files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="checkpoints; training resumes from the newest")
    parser.add_argument("--export", type=Path, help="write model and tokenizer here instead of training")
    parser.add_argument("--threads", type=int, default=1, help="one is often faster than two on a busy machine")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    trainer = build(override(yaml.safe_load(arguments.config.read_text()), arguments.set), arguments.out)
    if arguments.export:
        export(trainer, arguments.out, arguments.export)
        return
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(arguments.out)) if arguments.out.exists() else None)
    print(f"{time.perf_counter() - started:.0f} seconds, {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
