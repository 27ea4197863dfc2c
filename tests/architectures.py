"""One row per model family: what tiny model stands for it in the tests, and what is known about it.

Every row gives a random float32 model in evaluation mode with N = 32, head width 16 (unless the family fixes it) and a
vocabulary of 99, small enough to build and run in milliseconds and, through `initializer_range` 0.3, with logits that
depend on position. To add a family, add a row; nothing else names a family.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

TRAINED_LENGTH = 32
VOCABULARY = 99
FIRST_TEXT_TOKEN = 5
"""Token ids below this one are left to padding, begin, end, mask and image tokens."""

DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": TRAINED_LENGTH,
    "initializer_range": 0.3,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Settings in the words of most decoders; `_decoder` drops what a family does not know and changes the rest."""

ENCODER = {key: DECODER[key] for key in DECODER if key not in ("num_key_value_heads", "head_dim", "attention_dropout")}
SLIDING = ["sliding_attention", "full_attention"]
RAMP_LISTS = {"short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.0 + 0.5 * i for i in range(8)]}


@dataclass(frozen=True)
class Architecture:
    """One tiny model of one family, as data."""

    id: str
    """Name in test ids."""
    model_type: str
    """Key of `transformers.CONFIG_MAPPING`."""
    settings: Mapping[str, Any]
    """Keyword arguments of the configuration class."""
    auto_class: str = "AutoModelForCausalLM"
    """Name of the auto class that picks the model class."""
    mechanisms: tuple[str, ...] = ("rotary",)
    """How the family encodes position, in the words of DESIGN section 2."""
    trained_length: int = TRAINED_LENGTH
    """N: the very first trained length, in tokens."""
    native_factor: float = 1.0
    """How far the checkpoint as given is already stretched."""
    takes_position_ids: bool = True
    """Whether `forward` accepts `position_ids`."""
    causal: bool = True
    """Whether a token sees only earlier ones."""
    rotated_share: float = 1.0
    """Share of the head width (of its rotary part under MLA) that is rotated."""
    layer_kinds: tuple[str, ...] = ("full_attention",)
    """Kinds of attention layer that occur."""
    table_rows: int | None = None
    """Rows of a finite sin/cos table that bounds the input length; None where any position can be computed."""
    notes: str = ""
    """What is special about the family and why its row is there."""
    limits: tuple[str, ...] = field(default=())
    """What a test may not ask of this family: names such as `no_cache`."""


def _decoder(*drop: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**DECODER, **changes}.items() if key not in drop}


def _rope(rope_type: str, *, theta: float = 10000.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta, **parameters}


def _scaled(factor: int, rope_type: str, **parameters: Any) -> dict[str, Any]:
    """Length and rope fields of a checkpoint that was stretched by `factor` from the trained length."""
    return {
        "max_position_embeddings": factor * TRAINED_LENGTH,
        "rope_parameters": _rope(rope_type, factor=float(factor), **parameters),
    }


ORIGINAL = {"original_max_position_embeddings": TRAINED_LENGTH}
GEMMA_3 = _decoder(num_key_value_heads=1, query_pre_attn_scalar=16, sliding_window=8, layer_types=SLIDING)
DEEPSEEK = _decoder(
    "head_dim",
    num_key_value_heads=4,
    moe_intermediate_size=32,
    n_routed_experts=4,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
    num_mtp_layers=0,
)
QWEN2_VISION = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 64,
    "num_heads": 2,
    "mlp_ratio": 1,
    "patch_size": 4,
    "initializer_range": 0.3,
}
QWEN2_TEXT = _decoder("head_dim", rope_parameters=_rope("default", mrope_section=[2, 3, 3]))

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", "llama", DECODER, notes="the plain case"),
    Architecture("mistral", "mistral", _decoder(sliding_window=None)),
    Architecture(
        "mistral_sliding",
        "mistral",
        _decoder(sliding_window=8),
        layer_kinds=("sliding_attention",),
        notes="every layer slides, one rotary table",
    ),
    Architecture("qwen2", "qwen2", _decoder("head_dim")),
    Architecture("qwen3", "qwen3", DECODER, notes="norms on queries and keys before the rotation"),
    Architecture(
        "gemma2",
        "gemma2",
        _decoder(query_pre_attn_scalar=16, sliding_window=8),
        layer_kinds=("sliding_attention", "full_attention"),
        notes="sliding and full layers share one rotary table; logits are soft-capped",
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        GEMMA_3,
        layer_kinds=("sliding_attention", "full_attention"),
        notes="one spectrum per layer type: theta 1e6 on full layers, 1e4 on sliding ones",
    ),
    Architecture("phi", "phi", _decoder("head_dim"), rotated_share=0.5),
    Architecture("phi3", "phi3", _decoder("head_dim", **ORIGINAL, sliding_window=None), notes="fused projections"),
    Architecture(
        "gpt_neox",
        "gpt_neox",
        _decoder("head_dim", "num_key_value_heads", rope_parameters=_rope("default", partial_rotary_factor=0.25)),
        rotated_share=0.25,
        notes="four of sixteen channels rotate, so cos and sin miss most of the logit",
    ),
    Architecture("stablelm", "stablelm", _decoder("head_dim"), rotated_share=0.25),
    Architecture("olmo2", "olmo2", _decoder("head_dim")),
    Architecture("cohere", "cohere", _decoder("head_dim", logit_scale=1.0), notes="interleaved channel pairs"),
    Architecture("granite", "granite", _decoder("head_dim"), notes="multipliers on embeddings, attention and logits"),
    Architecture(
        "gptj",
        "gptj",
        {
            "vocab_size": VOCABULARY,
            "n_positions": TRAINED_LENGTH,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 64,
            "rotary_dim": 8,
            "initializer_range": 0.3,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        rotated_share=0.5,
        table_rows=TRAINED_LENGTH,
        notes="a finite sin/cos table, interleaved pairs; one width for all heads",
    ),
    Architecture(
        "modernbert",
        "modernbert",
        {**ENCODER, "local_attention": 8, "layer_types": SLIDING[::-1], "cls_token_id": 1, "sep_token_id": 2},
        auto_class="AutoModelForMaskedLM",
        causal=False,
        layer_kinds=("full_attention", "sliding_attention"),
        notes="bidirectional; one spectrum per layer type",
        limits=("no_cache",),
    ),
    Architecture(
        "roformer",
        "roformer",
        {**ENCODER, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        auto_class="AutoModelForMaskedLM",
        takes_position_ids=False,
        causal=False,
        table_rows=TRAINED_LENGTH,
        notes="the rotation comes from a frozen nn.Embedding whose rows are sin and cos, part of the state dict",
        limits=("no_cache", "no_position_ids"),
    ),
    Architecture(
        "qwen2_vl",
        "qwen2_vl",
        {
            "text_config": QWEN2_TEXT,
            "vision_config": QWEN2_VISION,
            "image_token_id": 3,
            "video_token_id": 4,
            "vision_start_token_id": 3,
            "vision_end_token_id": 4,
        },
        auto_class="AutoModelForImageTextToText",
        notes="three position axes share one spectrum by mrope_section; the vision tower rotates too",
    ),
    Architecture("deepseek_v3", "deepseek_v3", DEEPSEEK, notes="MLA: one shared rotary key beside unrotated channels"),
    Architecture("llama_linear", "llama", {**DECODER, **_scaled(2, "linear")}, native_factor=2.0),
    Architecture(
        "llama_llama3",
        "llama",
        {**DECODER, **_scaled(4, "llama3", **ORIGINAL, low_freq_factor=1.0, high_freq_factor=4.0)},
        native_factor=4.0,
    ),
    Architecture("llama_yarn", "llama", {**DECODER, **_scaled(4, "yarn", **ORIGINAL)}, native_factor=4.0),
    Architecture(
        "llama_longrope",
        "llama",
        {**DECODER, **_scaled(4, "longrope", **ORIGINAL, **RAMP_LISTS)},
        native_factor=4.0,
        notes="the module swaps short for long frequencies past N",
    ),
    Architecture(
        "llama_dynamic",
        "llama",
        {**DECODER, "rope_parameters": _rope("dynamic", factor=2.0)},
        notes="the module overwrites its frequencies in forward past N; up to N nothing is stretched",
    ),
    Architecture(
        "phi3_longrope",
        "phi3",
        _decoder("head_dim", **_scaled(4, "longrope", **RAMP_LISTS), **ORIGINAL, sliding_window=None),
        native_factor=4.0,
        notes="the trained length stands beside the rope fields, in the config itself",
    ),
    Architecture(
        "gemma3_linear",
        "gemma3_text",
        {
            **GEMMA_3,
            "max_position_embeddings": 8 * TRAINED_LENGTH,
            "rope_parameters": {
                "sliding_attention": _rope("default"),
                "full_attention": _rope("linear", theta=1e6, factor=8.0),
            },
        },
        native_factor=8.0,
        layer_kinds=("sliding_attention", "full_attention"),
        notes="as the published 4B and larger: only the full layers are stretched",
    ),
    Architecture(
        "deepseek_v3_yarn",
        "deepseek_v3",
        {**DEEPSEEK, **_scaled(4, "yarn", **ORIGINAL, mscale=1.0, mscale_all_dim=1.0)},
        native_factor=4.0,
        notes="the temperature is in the softmax scale, cos and sin keep 1",
    ),
)

ARCHITECTURE = {row.id: row for row in ARCHITECTURES}


def tiny_config(name: str) -> Any:
    """A fresh configuration of the row called `name`."""
    from transformers import AutoConfig

    row = ARCHITECTURE[name]
    return AutoConfig.for_model(row.model_type, **_copied(row.settings))


def tiny_model(name: str, seed: int = 0) -> Any:
    """A random model of the row called `name`: float32, in evaluation mode, the same for the same seed."""
    import transformers

    auto_class = getattr(transformers, ARCHITECTURE[name].auto_class)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return auto_class.from_config(tiny_config(name), dtype=torch.float32).eval()


def tiny_inputs(length: int = 16, *, batch: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random text tokens, right for every row: `input_ids` [B, L], int64, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(FIRST_TEXT_TOKEN, VOCABULARY, (batch, length), generator=generator)}


def _copied(value: Any) -> Any:
    """A deep copy of plain settings, since configuration classes write into the dicts that they are given."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
