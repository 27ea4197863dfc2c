"""Tiny models of every kind of relative bias, with tables loud enough to be heard, and text for them."""

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hf_posext.contract import DistanceChange, Site
from hf_posext.mechanisms import relative_bias
from hf_posext.mechanisms._scope import scoped_modules
from tests import sweep
from tests.architectures import FIRST_TEXT_TOKEN, VOCABULARY

CLOSE = {"rtol": 0, "atol": 5e-5}
"""Logits of up to 30 after two layers in float32."""
CONVOLVES = pytest.mark.transformers_logs("says that a faster convolution is not installed")
BUCKETS, REACH = 16, 30
"""Buckets of a table, and the distance from which on all share the last; 30 puts no bound on a whole number."""
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": BUCKETS,
    "relative_attention_max_distance": REACH,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "initializer_range": 0.3,
    "pad_token_id": 1,
}
DEBERTA = {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
LAYOUT = {
    "max_2d_position_embeddings": 64,
    "coordinate_size": 11,
    "shape_size": 10,
    "rel_pos_bins": BUCKETS,
    "max_rel_pos": REACH,
    "rel_2d_pos_bins": BUCKETS,
    "max_rel_2d_pos": 2 * REACH,
    "input_size": 16,
    "patch_size": 8,
}
XLNET = {"vocab_size": VOCABULARY, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 64, "initializer_range": 0.3}
UDOP = {
    **T5,
    "relative_attention_num_buckets": 32,
    "max_2d_position_embeddings": 64,
    "image_size": 16,
    "patch_size": 8,
}
PIX2STRUCT = {
    **{name: T5[name] for name in T5 if name not in ("d_model", "decoder_start_token_id")},
    "hidden_size": 64,
    "is_decoder": True,
    "initializer_range": 0.3,
}
CPMANT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "dim_head": 16,
    "dim_ff": 64,
    "num_hidden_layers": 2,
    "position_bias_num_buckets": BUCKETS,
    "position_bias_max_distance": REACH,
    "prompt_types": 4,
    "prompt_length": 2,
    "segment_types": 3,
}
SEQ2SEQ = "ForConditionalGeneration"
GLOBAL = {"encoder_attention_type": "transient-global", "local_radius": 3, "global_block_size": 2}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": (f"T5{SEQ2SEQ}", T5),
    "mt5": (f"MT5{SEQ2SEQ}", T5),
    "umt5": (f"UMT5{SEQ2SEQ}", T5),
    "switch": (f"SwitchTransformers{SEQ2SEQ}", {**T5, "num_sparse_encoder_layers": 0, "num_sparse_decoder_layers": 0}),
    "udop": (f"Udop{SEQ2SEQ}", UDOP),
    "longt5": (f"LongT5{SEQ2SEQ}", {**T5, "local_radius": 3}),
    "longt5_global": (f"LongT5{SEQ2SEQ}", {**T5, **GLOBAL}),
    "pop2piano": (f"Pop2Piano{SEQ2SEQ}", {**T5, "composer_vocab_size": 5}),
    "pix2struct": ("Pix2StructTextModel", PIX2STRUCT),
    "mpnet": ("MPNetForMaskedLM", {**BERT, "relative_attention_num_buckets": 32}),
    "layoutlmv3": ("LayoutLMv3Model", {**BERT, **LAYOUT}),
    "deberta": ("DebertaForMaskedLM", DEBERTA),
    "deberta_v2": ("DebertaV2ForMaskedLM", {**DEBERTA, "position_buckets": 6, "max_relative_positions": REACH}),
    "xlnet": ("XLNetLMHeadModel", XLNET),
    "cpmant": ("CpmAntForCausalLM", CPMANT),
}
"""Name -> class of transformers and settings of its config."""
TABLES = r"relative_attention_bias|rel_pos_bias|rel_embeddings|rel_pos_[xy]_bias"


def class_of(name: str) -> Any:
    """A class of transformers, some of whose older files script functions when they are imported, as torch regrets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(transformers, name)


@torch.no_grad()
def tiny(family: str, **more: Any) -> Any:
    """A random model in evaluation mode, the same each time, whose biases are of the size of its logits."""
    name, settings = FAMILIES[family]
    cls = class_of(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(cls.config_class(**settings, **more)).eval()
        for path, parameter in model.named_parameters():
            if re.search(TABLES, path):
                parameter.normal_()
    return model


def inkling(name: str) -> Any:
    """A model in which each query mixes its biases; its tables are random as they are."""
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this release of transformers")
    return sweep.build(name)


def sites(model: Any) -> list[Site]:
    """The relative biases of its text part."""
    return [site for scoped in scoped_modules(model) if scoped.is_text for site in relative_bias.find(scoped)]


def divided(model: Any, factor: float) -> Any:
    """The model with distances divided by one number."""
    for site in sites(model):
        relative_bias.write(site, DistanceChange(factor))
    return model


def text(length: int = 8, batch: int = 2) -> Tensor:
    """Random tokens, [B, L]."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(FIRST_TEXT_TOKEN, VOCABULARY, (batch, length), generator=generator)


def inputs(model: Any, tokens: Tensor, gap: int = 1, keeps_rows: bool = False) -> dict[str, Tensor]:
    """Text of which token i stands at `gap` i, since `gap` - 1 masked tokens follow each.

    Args:
        model: the model that is to read it.
        tokens: [B, L].
        gap: tokens from one to the next.
        keeps_rows: whether a learned table is asked for the rows of a gap of 1.
    """
    spread = tokens.repeat_interleave(gap, dim=1)
    slots = torch.arange(spread.shape[1])
    mask = (slots % gap == 0).long().expand_as(spread)
    given = {"input_ids": spread, "decoder_input_ids": spread, "attention_mask": mask, "decoder_attention_mask": mask}
    given["bbox"] = boxes(model, tokens).repeat_interleave(gap, dim=1)
    if keeps_rows and hasattr(model.config, "max_position_embeddings"):
        given["position_ids"] = (slots // gap + model.config.pad_token_id + 1).expand_as(spread)
    return {name: each for name, each in given.items() if name in inspect.signature(model.forward).parameters}


def boxes(model: Any, tokens: Tensor) -> Tensor:
    """A place on the page for each token, [B, L, 4]: whole numbers, or parts of it for models that want those."""
    places = torch.randint(0, 50, (*tokens.shape, 4), generator=torch.Generator().manual_seed(4)).sort(-1).values
    return places / 50 if hasattr(model.config, "relative_bias_args") else places


@torch.no_grad()
def answer(model: Any, tokens: Tensor, gap: int = 1, keeps_rows: bool = False) -> Tensor:
    """What the model says to a spread text at its tokens, [B, L, V]."""
    return model(**inputs(model, tokens, gap, keeps_rows))[0][:, ::gap]


LENGTH = 2 * REACH


def of_attention(module: Any) -> Tensor:
    """[..., L, L] what a module says of keys (last) at queries."""
    return module.compute_bias(LENGTH, LENGTH)


def of_boxes_or_tokens(module: Any) -> Tensor:
    """The same for a module of UDOP, whose encoder adds up several."""
    return of_attention(module) if hasattr(module, "compute_bias") else module(torch.ones(1, LENGTH))


def of_segments(module: Any) -> Tensor:
    """The same for a module of CPM-Ant, for text of one segment."""
    places = torch.arange(LENGTH)[None]
    return module(places, places, *[torch.ones_like(places)] * 2)


SAYS: dict[str, Callable[[Any], Tensor]] = {
    **dict.fromkeys(("t5", "mt5", "umt5", "switch", "pop2piano", "pix2struct"), of_attention),
    "udop": of_boxes_or_tokens,
    "mpnet": lambda module: module.compute_position_bias(torch.zeros(1, LENGTH, 1)),
    "layoutlmv3": lambda module: module._cal_1d_pos_emb(torch.arange(LENGTH)[None]),
    "deberta": lambda module: module.get_rel_pos(torch.zeros(1, LENGTH, 1)),
    "deberta_v2": lambda module: module.get_rel_pos(torch.zeros(1, LENGTH, 1)),
    "cpmant": of_segments,
}
"""Family -> what one of its modules says of all distances within LENGTH tokens, [..., L, L]."""
