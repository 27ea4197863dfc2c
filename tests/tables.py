"""Tables of positions in the tests: which families have one, which methods change it, and how a model reads with it."""

import functools
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hf_posext import patch_model
from tests.architectures import ENCODER, TRAINED_LENGTH, VOCABULARY, tiny_inputs
from tests.special_models import GPT, build

FACTOR = 2
N, T = TRAINED_LENGTH, FACTOR * TRAINED_LENGTH
"""Tokens that an unpatched model reads, and a patched one."""

SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": N}
IDS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
BERT = {**ENCODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ROBERTA = {**BERT, "pad_token_id": 1, "bos_token_id": 0, "max_position_embeddings": N + 2}
SMALL = {**BERT, "embedding_size": 24}
OPT = {
    **SIZES,
    "hidden_size": 64,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 64,
    "init_std": 0.3,
    "dropout": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
PAIR = {
    **IDS,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": N,
    "init_std": 0.3,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "decoder_start_token_id": 2,
}
SEQ2SEQ = {**PAIR, "vocab_size": VOCABULARY}
DISTILBERT = {
    **SIZES,
    "dim": 64,
    "hidden_dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "initializer_range": 0.3,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
GPT2 = {**GPT, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
GPT_NEO = {
    **SIZES,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 8,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
XGLM = {
    **SIZES,
    **IDS,
    "d_model": 64,
    "ffn_dim": 64,
    "num_layers": 2,
    "attention_heads": 4,
    "init_std": 0.3,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
FSMT = {**PAIR, "langs": ["en", "de"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY}
BOTH_STACKS = ("model.encoder.embed_positions", "model.decoder.embed_positions")


@dataclass(frozen=True)
class Family:
    """One tiny model with a table, as data."""

    model_type: str
    """Key of `transformers.CONFIG_MAPPING`."""
    kind: str
    """`encoder`, `decoder` or `pair` of both."""
    settings: Mapping[str, Any]
    """Keyword arguments of the configuration class."""
    tables: tuple[str, ...]
    """Paths of the modules that hold the rows."""
    reserved: int = 0
    """Rows in front that stand for no position."""
    mechanism: str = "learned"
    """`learned` or `sinusoidal`."""
    from_mask: bool = False
    """Whether padding takes no position, so that a row padded on the left is read as alone."""

    @property
    def auto_class(self) -> Any:
        """The auto class that picks the model class."""
        names = {"encoder": "AutoModelForMaskedLM", "decoder": "AutoModelForCausalLM", "pair": "AutoModelForSeq2SeqLM"}
        return getattr(transformers, names[self.kind])


FAMILIES: dict[str, Family] = {
    "bert": Family("bert", "encoder", BERT, ("bert.embeddings.position_embeddings",)),
    "roberta": Family("roberta", "encoder", ROBERTA, ("roberta.embeddings.position_embeddings",), 2, from_mask=True),
    "xlm_roberta": Family("xlm-roberta", "encoder", ROBERTA, ("roberta.embeddings.position_embeddings",), 2),
    "distilbert": Family("distilbert", "encoder", DISTILBERT, ("distilbert.embeddings.position_embeddings",)),
    "albert": Family("albert", "encoder", SMALL, ("albert.embeddings.position_embeddings",)),
    "electra": Family("electra", "encoder", SMALL, ("electra.embeddings.position_embeddings",)),
    "mpnet": Family("mpnet", "encoder", ROBERTA, ("mpnet.embeddings.position_embeddings",), 2),
    "deberta": Family(
        "deberta", "encoder", {**BERT, "position_biased_input": True}, ("deberta.embeddings.position_embeddings",)
    ),
    "gpt2": Family("gpt2", "decoder", GPT2, ("transformer.wpe",)),
    "gpt_neo": Family("gpt_neo", "decoder", GPT_NEO, ("transformer.wpe",)),
    "opt": Family("opt", "decoder", OPT, ("model.decoder.embed_positions",), 2, from_mask=True),
    "bart": Family("bart", "pair", SEQ2SEQ, BOTH_STACKS, 2),
    "xglm": Family("xglm", "decoder", XGLM, ("model.embed_positions",), 2, "sinusoidal"),
    "marian": Family("marian", "pair", SEQ2SEQ, BOTH_STACKS, 0, "sinusoidal"),
    "pegasus": Family("pegasus", "pair", SEQ2SEQ, BOTH_STACKS, 0, "sinusoidal"),
    "m2m_100": Family("m2m_100", "pair", SEQ2SEQ, BOTH_STACKS, 2, "sinusoidal", from_mask=True),
    "fsmt": Family("fsmt", "pair", FSMT, BOTH_STACKS, 2, "sinusoidal", from_mask=True),
}
BY_TYPE = {family.model_type: family for family in FAMILIES.values()}
LEARNED = tuple(name for name, family in FAMILIES.items() if family.mechanism == "learned")
SINUSOIDAL = tuple(name for name in FAMILIES if name not in LEARNED)

KINDS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "pi": ("pi", {}),
    "pi_cubic": ("pi", {"mode": "cubic"}),
    "pi_corners": ("pi", {"align": "corners"}),
    "pi_frozen": ("pi", {"frozen_rows": True}),
    "pi_dynamic": ("pi", {"dynamic": True}),
    "tile": ("tile", {}),
    "tile_frozen": ("tile", {"frozen_rows": True}),
    "hierarchical": ("hierarchical", {}),
    "sinusoidal": ("sinusoidal", {}),
}
"""Name -> method and its options."""
ON_SINUSOIDS = ("pi", "pi_dynamic", "sinusoidal")
"""Kinds that have a meaning for a fixed table too."""

Pair = tuple[str, str]
METHODS = ("pi", "pi_dynamic", "tile", "hierarchical", "sinusoidal")
PLAIN_ROWS = ("bert", "roberta", "gpt2", "opt", "bart")
EVERY_PAIR: list[Pair] = [
    (row, kind)
    for row in FAMILIES
    for kind in (KINDS if row in PLAIN_ROWS else METHODS if row in LEARNED else ON_SINUSOIDS)
    if (row, kind) != ("mpnet", "pi_dynamic")  # its relative bias, which all rows of a batch share, is stretched too
]
"""Every method on every row, and its options on five of them."""
FEW_PAIRS: list[Pair] = [
    *(("bert", kind) for kind in KINDS),
    ("roberta", "pi_corners"),
    ("roberta", "pi_dynamic"),
    ("mpnet", "pi"),
    ("gpt2", "hierarchical"),
    ("gpt2", "pi_dynamic"),
    ("gpt_neo", "tile"),
    ("opt", "pi"),
    ("opt", "tile_frozen"),
    ("bart", "pi_cubic"),
    ("bart", "pi_dynamic"),
    ("bart", "sinusoidal"),
    ("xglm", "pi"),
    ("marian", "sinusoidal"),
    ("m2m_100", "pi"),
    ("m2m_100", "pi_dynamic"),
    ("pegasus", "pi"),
]
"""Every kind on the plain row and every row with a kind or two."""
CORE_PAIRS: list[Pair] = [
    ("bert", "pi"),
    ("bert", "sinusoidal"),
    ("roberta", "pi_dynamic"),
    ("gpt2", "hierarchical"),
    ("gpt2", "pi_dynamic"),
    ("gpt_neo", "tile"),
    ("opt", "tile_frozen"),
    ("bart", "pi_cubic"),
    ("bart", "pi_dynamic"),
    ("xglm", "pi"),
    ("m2m_100", "pi_dynamic"),
    ("pegasus", "pi"),
]
"""Every way in which a table is kept or changed about once, for what is slow."""


def named(pairs: Iterable[Pair]) -> list[Any]:
    """Pairs of a row and a kind as parameters named after both."""
    return [pytest.param(row, kind, id=f"{row}-{kind}") for row, kind in pairs]


EVERY_CASE, FEW, CORE = named(EVERY_PAIR), named(FEW_PAIRS), named(CORE_PAIRS)


def keeps_short(row: str, kind: str) -> bool:
    """Whether text of at most N tokens is read as before, to the last bit."""
    exact = ("tile", "tile_frozen", "hierarchical", "pi_dynamic")
    return kind in exact or (kind == "sinusoidal" and row in SINUSOIDAL)


def make(row: str, **changes: Any) -> Any:
    """The unpatched model of a row: float32, in evaluation mode, the same each time."""
    family = FAMILIES[row]
    with warnings.catch_warnings():  # DeBERTa of older transformers uses `torch.jit.script` as it is imported
        warnings.filterwarnings("ignore", message="`torch.jit.script` is deprecated", category=DeprecationWarning)
        return build(family.auto_class.__name__, family.model_type, {**family.settings, **changes})


@functools.cache
def shared_unpatched(row: str) -> Any:
    """An unpatched model for tests that only read with it."""
    return make(row)


def patch(model: Any, kind: str, factor: float = FACTOR, **changes: Any) -> Any:
    """The model with the patch of a kind."""
    method, options = KINDS[kind]
    return patch_model(model, method, factor, **{**options, **changes})


def patched_model(row: str, kind: str, **changes: Any) -> Any:
    """A fresh patched model."""
    return patch(make(row), kind, **changes)


@functools.cache
def shared_model(row: str, kind: str) -> Any:
    """A patched model for tests that only read with it."""
    return patched_model(row, kind)


def read(model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
    """Logits of one pass without a cache, [B, L, V]; the decoder of a pair reads the same tokens as its encoder."""
    return with_gradient(model, tokens, **inputs).detach()


def with_gradient(model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
    """As `read`, differentiable."""
    family = BY_TYPE[model.config.model_type]
    plain: dict[str, Any] = {"input_ids": tokens}
    if family.kind != "encoder":
        plain["use_cache"] = False
    if family.kind == "pair":
        plain["decoder_input_ids"] = tokens
        inputs |= {"decoder_attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
    return model(**plain, **inputs).logits


def loss_of(model: Any, length: int = T) -> Tensor:
    """A loss on a batch of text that reaches every position, differentiable."""
    tokens = tiny_inputs(length, batch=2)["input_ids"]
    return with_gradient(model, tokens).log_softmax(-1)[..., 0].mean().neg()


def generated(model: Any, tokens: Tensor, count: int = 8, **inputs: Any) -> Tensor:
    """The most likely new tokens, so many, [B, count]."""
    inputs = {"attention_mask": torch.ones_like(tokens), "pad_token_id": 1, **inputs}
    return model.generate(tokens, do_sample=False, max_new_tokens=count, min_new_tokens=count, **inputs)[:, -count:]


def tables_of(model: Any) -> list[Tensor]:
    """All tables of a model, reserved rows included, detached and cloned."""
    family = BY_TYPE[model.config.model_type]
    modules = [model.get_submodule(path) for path in family.tables]
    return [getattr(each, "weight" if hasattr(each, "weight") else "weights").detach().clone() for each in modules]


def padded(rows: list[Tensor], side: str, token: int) -> dict[str, Tensor]:
    """Texts [L_i] as one batch: `input_ids` and `attention_mask`, both [B, max L_i]."""
    width = max(map(len, rows))
    ends = [(width - len(row), 0) if side == "left" else (0, width - len(row)) for row in rows]
    fill = torch.nn.functional.pad
    return {
        "input_ids": torch.stack([fill(row, end, value=token) for row, end in zip(rows, ends, strict=True)]),
        "attention_mask": torch.stack(
            [fill(torch.ones_like(row), end) for row, end in zip(rows, ends, strict=True)]
        ),
    }  # fmt: skip
