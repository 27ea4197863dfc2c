"""The tiny model of `compare_encodings.py`, the six ways in which it learns where a token stands, and its training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.trainer_callback import PrinterCallback

from hf_posext import PerplexityReport, patch_model, perplexity
from hf_posext.demo import demo_path, held_out_documents, training_documents
from hf_posext.functional import apply_rotary, rotary_angles

ROTARY = "rotary_sdpa"


@dataclass(frozen=True)
class Settings:
    """What all models have in common.

    Attributes:
        length: N, tokens of a training window with its BOS.
        stretch: lengths to read at, in multiples of N.
        width: of a token's state.
        layers: of the model.
        heads: of each layer.
        steps: of training.
        batch: windows of a step.
        learning_rate: at its highest, after a tenth of the steps; then it falls to zero.
        evaluations: of the validation loss, evenly over the steps.
        windows: of each held-out book for the validation loss, evenly over the book.
        endpoints: of each held-out book for the perplexity at each length.
    """

    length: int = 128
    stretch: tuple[int, ...] = (1, 2, 4)
    width: int = 128
    layers: int = 3
    heads: int = 4
    steps: int = 430
    batch: int = 16
    learning_rate: float = 3e-3
    evaluations: int = 10
    windows: int = 16
    endpoints: int = 8

    @property
    def lengths(self) -> list[int]:
        """Tokens to read at."""
        return [self.length * factor for factor in self.stretch]

    def short(self) -> Settings:
        """The same within two minutes: too few steps for more than a first look."""
        return replace(self, steps=50, evaluations=5, windows=4, endpoints=2)


def rotating_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention of `sdpa` after queries and keys [B, H, L, D] were turned by their positions; whole windows only.

    Raises:
        ValueError: keys of an earlier call, whose positions are not known here.
    """
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(f"{query.shape[-2]} queries came for {key.shape[-2]} keys. Call the model without a cache.")
    angles = rotary_angles(query.shape[-2], query.shape[-1]).to(query.device)
    turned = apply_rotary(query, angles), apply_rotary(key, angles)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, *turned, value, attention_mask, **options)


AttentionInterface.register(ROTARY, rotating_attention)
AttentionMaskInterface.register(ROTARY, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def learned(model: GPT2LMHeadModel, target: int) -> None:
    """GPT-2's own: a trained row for each position up to N, and none beyond."""


def sinusoidal(model: GPT2LMHeadModel, target: int) -> None:
    """A fixed table of sines and cosines, of the size that a learned table starts with."""
    patch_model(model, "sinusoidal", target_length=target)


def nope(model: GPT2LMHeadModel, target: int) -> None:
    """No encoding: the table is switched off."""
    patch_model(model, "nope", target_length=target)


def rope(model: GPT2LMHeadModel, target: int) -> None:
    """No table, and queries and keys that rotate, all channels with base 10,000."""
    patch_model(model, "nope", target_length=target)
    model.set_attn_implementation(ROTARY)


def alibi(model: GPT2LMHeadModel, target: int) -> None:
    """No table, and a fixed penalty on the logits, slope x distance."""
    patch_model(model, "alibi", target_length=target)


def relative_bias(model: GPT2LMHeadModel, target: int) -> None:
    """No table, and a trained bias of each head and layer for each of T5's 32 buckets of distances."""
    model.transformer.wpe.requires_grad_(False).weight.zero_()  # the method makes a longer table, of zeros then
    patch_model(model, "relative_bias", target_length=target)


ENCODINGS: dict[str, Callable[[GPT2LMHeadModel, int], None]] = {
    each.__name__: each for each in (sinusoidal, learned, relative_bias, rope, alibi, nope)
}


def build(encoding: str, settings: Settings, seed: int, vocabulary: int) -> GPT2LMHeadModel:
    """The model with one encoding; whatever is no encoding has the same initial values with each of them."""
    set_seed(seed)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=settings.length,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        activation_function="gelu",  # in one kernel, GPT-2's own is several
        bos_token_id=0,
        eos_token_id=1,
        use_cache=False,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # GPT-2's class has another name than those that it is known by
    ENCODINGS[encoding](model, settings.lengths[-1])
    return model


Windows = list[list[int]]


@dataclass(frozen=True)
class Books:
    """What all models read.

    Attributes:
        tokenizer: of the demo models.
        training: windows of the training books.
        validation: some windows of each held-out book.
        held_out: token ids of each held-out book.
    """

    tokenizer: PreTrainedTokenizerBase
    training: Windows
    validation: Windows
    held_out: list[list[int]]


@cache
def read_books(length: int, most: int) -> Books:
    """The demo's books, cut into windows of `length` tokens, at most `most` of each held-out book."""
    tokenizer = AutoTokenizer.from_pretrained(demo_path("llama"))
    training, held_out = (
        [tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        for texts in (training_documents(), held_out_documents())
    )
    cut = [[tokenizer.bos_token_id, *rest] for ids in training for rest in pieces(ids, length - 1)]
    some = [[tokenizer.bos_token_id, *rest] for ids in held_out for rest in evenly(pieces(ids, length - 1), most)]
    return Books(tokenizer, cut, some, held_out)


def pieces(ids: list[int], length: int) -> Windows:
    """One after the other; a rest at the end is left out."""
    return [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]


def evenly(items: Windows, most: int) -> Windows:
    """At most so many of them, at equal steps from the first one on."""
    return items[:: max(1, len(items) // most)][:most]


def batch_of(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Windows of one length, of which every token but the first is to be foretold."""
    tokens = torch.tensor(rows)
    return {"input_ids": tokens, "labels": tokens}


def train(model: GPT2LMHeadModel, books: Books, settings: Settings, seed: int, folder: Path) -> list[dict[str, float]]:
    """Trains, and gives the validation loss at fixed steps; the order of the data follows from the seed alone."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch,
        per_device_eval_batch_size=settings.batch,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.steps // 10,
        lr_scheduler_type="linear",
        eval_strategy="steps",
        eval_steps=max(1, settings.steps // settings.evaluations),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        seed=seed,
        data_seed=seed,
    )
    trainer = Trainer(
        model, arguments, train_dataset=books.training, eval_dataset=books.validation, data_collator=batch_of
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    return [{"step": entry["step"], "loss": entry["eval_loss"]} for entry in log]


def measure(model: GPT2LMHeadModel, books: Books, encoding: str, settings: Settings) -> PerplexityReport:
    """Perplexity of the same tokens with contexts of each length that the encoding can read."""
    if encoding == "learned":
        patch_model(model, "tile", target_length=settings.lengths[-1])  # room only: up to N it is read as before
    report = perplexity(
        model.eval(),
        books.tokenizer,
        books.held_out,
        context_lengths=settings.lengths,
        targets=settings.length // 2,
        endpoints_per_document=settings.endpoints,
        bars=(),
        arm=encoding,
    )
    readable = [each for each in report.measurements if encoding != "learned" or each.context_length == settings.length]
    return replace(report, measurements=readable)


def run_cell(encoding: str, settings: Settings, seed: int, out: Path) -> dict[str, Any]:
    """One encoding from one seed, from the disk where it was done before with the same settings."""
    path = out / f"{encoding}_{seed}.json"
    asked = json.loads(json.dumps({"encoding": encoding, "seed": seed, "settings": asdict(settings)}))
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
        if asked.items() <= found.items():
            return found
    books = read_books(settings.length, settings.windows)
    model = build(encoding, settings, seed, len(books.tokenizer))
    started = time.perf_counter()
    curve = train(model, books, settings, seed, out)
    cell = {
        **asked,
        "how": ENCODINGS[encoding].__doc__,
        "epochs": settings.steps * settings.batch / len(books.training),
        "curve": curve,
        "report": measure(model, books, encoding, settings).to_dict(),
        "seconds": round(time.perf_counter() - started, 1),
    }
    path.write_text(json.dumps(cell, indent=1) + "\n", encoding="utf-8")
    return cell
