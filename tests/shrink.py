"""A tiny configuration of any architecture that the installed transformers knows, by rules on field names.

Nothing here knows an architecture: each dimension of the default configuration is given a tiny value by what its field
is called, in nested configurations too, and layers are thinned out so that each kind of layer stays. `OVERRIDES` holds
the few fields for which no rule on names can be right.
"""

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tests.architectures import TRAINED_LENGTH, VOCABULARY

WIDTH, HEADS, HEAD_WIDTH, EXPERTS, INITIALIZER_RANGE = 64, 4, 16, 4, 0.3
FIRST_TEXT_TOKEN = 60
"""Ids below this one are for special tokens, so that no text holds one."""

Rule = int | Callable[[int], int]


def at_most(limit: int) -> Rule:
    """A rule that keeps values which are small already."""
    return lambda value: min(value, limit)


def kept(value: int) -> int:
    """A rule for numbers that are no sizes."""
    return value


KEY_VALUE_HEADS = r"\w*num_(key_value|kv)_heads|num_query_groups|kv_n_heads"
RULES: tuple[tuple[str, Rule], ...] = (
    (r"\w*vocab_size\w*", at_most(VOCABULARY)),
    (r"max_2d_position_embeddings", TRAINED_LENGTH + HEAD_WIDTH),
    (r"n_positions|n_ctx|max_seq_len|model_max_length|\w*max_\w*(position_embeddings|positions)", TRAINED_LENGTH),
    (r"index_topk|index_topk_blocks|keep_window_size", 2 * TRAINED_LENGTH),
    (r"(attention_)?(sliding_window|window_size)(_size)?|attention_window|local_attention|attention_chunk_size", 8),
    (r"topk_group", at_most(1)),
    (r"\w*(experts_per_tok|topk|top_k|top_k_experts|moe_k)|n_group|n_groups|\w*ngroups", at_most(2)),
    (r"(n|num|moe|zero)\w*shared_experts|zero_expert_num", at_most(1)),
    (r"\w*(num|n_routed)(_local)?_experts", at_most(EXPERTS)),
    (r"num_kv_shared_layers|num_(mtp|nextn_predict)_layers|moe_layer_start_index", 0),
    (r"first_k_dense_replace|num_dense_layers|num_mem_blocks", at_most(1)),
    (r"moe_layer_end_index", -1),
    (r"linear_num_key_heads", HEADS // 2),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 2 * HEADS),
    (r"n_heads?|\w*num\w*_heads|\w*attention_heads|\w*n_heads", at_most(HEADS)),
    (r"index_head_dim|indexer_head_dim|qk_head_dim", 2 * HEAD_WIDTH),
    (r"\w*(head_dim|headdim|d_head|dim_head|head_width|head_size|kv_channels|d_kv|attn_scalar)", at_most(HEAD_WIDTH)),
    (r"rotary_dim", HEAD_WIDTH // 2),
    (r"\w*(_rank|d_state|state_size|lowrank)", at_most(HEAD_WIDTH)),
    (r"num_filters", at_most(4)),
    (r"depth|num_blocks|n_layers?|(\w+_)?layers", at_most(2)),
    (r"\w*(image|img|crop)_size|resolution", at_most(TRAINED_LENGTH)),
    (r"\w*_rate|\w*chunk\w*|seed|\w*temperature|\w*base|\w*num_buckets|\w*max_distance|\w*_index", kept),
    (r"\w+", at_most(WIDTH)),
)
"""Field name and its tiny value, first match wins; the last row bounds whatever has no rule of its own."""

MEANT_WHERE_NONE: Mapping[str, int] = {
    "vocab_size": VOCABULARY,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_WIDTH,
    "num_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": WIDTH,
}
"""Fields that some configurations leave at None although their models need them."""

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    # The default has no attention layer, no rotation, or no such field at all.
    "BambaConfig": {"attn_layer_indices": [1]},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "EsmConfig": {"position_embedding_type": "rotary", "mask_token_id": 3, "pad_token_id": 0},
    "GraniteMoeHybridConfig": {
        "position_embedding_type": "rope",
        "layer_types": ["linear_attention", "full_attention"],
    },
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "XGLMConfig": {"pad_token_id": 1},  # its first row of a position is 2 whatever it is
    "Zamba2Config": {"use_mem_rope": True},
    # The default configuration cannot build its own model.
    "Pix2StructTextConfig": {"initializer_range": INITIALIZER_RANGE},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 3}},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": DEFAULT_ROPE}},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "Emu3Config": {"vocabulary_map": {"<image>": 3, "<|extra_200|>": 4}},
    "Granite4VisionConfig": {"deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2"},
    "PaddleOCRTextConfig": {"rope_parameters": {**DEFAULT_ROPE, "mrope_section": [2, 3, 3]}},
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 5},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 5},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "Step3p7TextConfig": {"sliding_window": 8},
    # It would not run on text alone, or not on text of one channel.
    "LayoutLMv3Config": {
        "visual_embed": False,
        "coordinate_size": 12,
        "shape_size": 8,
        "max_position_embeddings": TRAINED_LENGTH + 2,
    },
    "MusicgenDecoderConfig": {"num_codebooks": 1},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 1},
    "XmodConfig": {"default_language": "en_XX"},
    # Two sizes would be the same by accident, or are the same in every checkpoint.
    "CanineConfig": {"num_hash_buckets": TRAINED_LENGTH},
    "GradiumPhononTTSConfig": {"num_speakers_vocab_size": 8},
    "PegasusXConfig": {"num_global_tokens": 8},
    # One field must be a function of others.
    "Apertus1p5Config": {"image_token_offset": 8, "audio_token_offset": 72},
    "DoryConfig": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        **dict.fromkeys(("n_input_layers", "n_recurrent_layers", "n_output_layers"), 1),
        "num_hidden_layers": 3,
    },
    "Dots3NoteTextConfig": {
        **{f"swa_{name}": HEADS for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": HEAD_WIDTH for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")},
        "swa_head_dim": 2 * HEAD_WIDTH,
        "head_dim": 2 * HEAD_WIDTH,
    },
    "GPTNeoConfig": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "LiltConfig": {"hidden_size": 6 * HEAD_WIDTH},
    "MPNetConfig": {"max_position_embeddings": TRAINED_LENGTH + 2},
    "NystromformerConfig": {"conv_kernel_size": 5},
    "ReformerConfig": {"axial_pos_embds_dim": [WIDTH // 2, WIDTH // 2], "axial_pos_shape": [4, TRAINED_LENGTH // 4]},
    "FalconH1Config": {"mamba_d_ssm": 2 * WIDTH, "mamba_d_head": HEAD_WIDTH},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": WIDTH // 4},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
}
"""Configuration class to fields: what no rule on names can know."""


def shrunken(config: Any, **settings: Any) -> Any:
    """A new configuration of the same class in which every dimension is tiny, and `settings` are as given."""
    keep = kept_layers(config)
    names = sorted(field.name for field in fields(config))
    changes = {name: _tiny_value(config, name, _value(config, name), keep) for name in names}
    changes = {name: value for name, value in changes.items() if value is not None}
    if isinstance(_value(config, "rope_parameters"), dict):
        width = changes.get("qk_rope_head_dim") or changes.get("head_dim") or HEAD_WIDTH
        has_axes = "mrope_section" in config.ignore_keys_at_rope_validation and config.rope_parameters
        axes = {"mrope_section": [1, 1, 1]} if has_axes else {}
        changes["rope_parameters"] = tiny_rope(axes | config.rope_parameters, width)
    return type(config)(**changes | copy.deepcopy(dict(OVERRIDES.get(type(config).__name__, {}))) | settings)


def _value(config: Any, name: str) -> Any:
    """The value of a field under whatever name it is kept; None where each layer has its own."""
    return vars(config).get(config.attribute_map.get(name, name))


def _tiny_value(config: Any, name: str, value: Any, keep: list[int]) -> Any:
    """The tiny value of one field, None where the default may stand."""
    if hasattr(value, "model_type"):
        return shrunken(value)
    if value is None:
        is_derived = name == "head_dim" and hasattr(config, "qk_rope_head_dim")
        return None if is_derived else MEANT_WHERE_NONE.get(name)
    if name.endswith(("_token_id", "_token_index", "_token_ids", "_start_id", "_end_id", "_pad_id")):
        return _token_id(name, value)
    if name == "initializer_range":
        return INITIALIZER_RANGE
    if name == config.attribute_map.get("num_hidden_layers", "num_hidden_layers"):
        return len(keep) or None
    if re.fullmatch(KEY_VALUE_HEADS, name):
        return _key_value_heads(value, _value(config, "num_attention_heads"))
    if isinstance(value, list | tuple) and value:
        return _tiny_list(name, value, _depth(config), keep)
    return ruled(name, value) if isinstance(value, int) and not isinstance(value, bool) else None


def ruled(name: str, value: int) -> int:
    """The tiny value of a whole number by the name of its field."""
    rule = next(rule for pattern, rule in RULES if re.fullmatch(pattern, name))
    return rule if isinstance(rule, int) else rule(value)


def _token_id(name: str, value: Any) -> Any:
    """A small id, the same wherever a field of this name occurs, and never that of a text token."""
    common = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    small = common.get(name, 3 + sum(name.encode()) % (FIRST_TEXT_TOKEN - 12))
    if isinstance(value, list | tuple):
        return type(value)([small] if name in common else range(small, small + len(value)))
    return small if value >= 0 else None


def _key_value_heads(value: Any, heads: Any) -> int:
    """One, as many as query heads, or half of them: whichever the original has."""
    return 1 if value == 1 else HEADS if value == heads else HEADS // 2


def _depth(config: Any) -> int:
    depth = _value(config, "num_hidden_layers")
    return depth if isinstance(depth, int) else 0


def names_layers(name: str, value: Sequence[Any], depth: int) -> bool:
    """Whether a list names layers by their number."""
    numbers = all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < depth for item in value)
    return numbers and len(set(value)) == len(value) and bool(re.search(r"(layers|idxs|indexes|indices|ids)$", name))


def kept_layers(config: Any) -> list[int]:
    """The numbers of the layers that stay: the first of each kind in every per-layer list, and two at least."""
    depth, keep = _depth(config), set()
    for name, value in vars(config).items():
        if not isinstance(value, list | tuple) or not value:
            continue
        if names_layers(name, value, depth):
            kinds = [str(index in value) for index in range(depth)]
        elif len(value) == depth:
            kinds = [repr(item) for item in value]
        else:
            continue
        keep |= {kinds.index(kind) for kind in kinds}
    keep |= set([index for index in range(depth) if index not in keep][: max(0, 2 - len(keep))])
    return sorted(keep)


def _tiny_list(name: str, value: Any, depth: int, keep: list[int]) -> Any:
    """A list thinned out to the layers that stay and bounded by the rule of its field."""
    if keep and names_layers(name, value, depth):
        return type(value)(keep.index(item) for item in value if item in keep)
    if keep and len(value) == depth:
        value = type(value)(value[index] for index in keep)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return type(value)(ruled(name, item) for item in value)
    return value


def tiny_rope(parameters: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Rope parameters for heads of `width` channels that were trained at N tokens; nested ones too."""
    pairs = int(width * (parameters.get("partial_rotary_factor") or 1.0)) // 2
    result: dict[str, Any] = {}
    for key, value in parameters.items():
        if isinstance(value, Mapping):
            result[key] = tiny_rope(value, width)
        elif key == "original_max_position_embeddings" and value:
            result[key] = TRAINED_LENGTH
        elif key == "mrope_section" and value:
            result[key] = sections(value, pairs)
        elif key in ("short_factor", "long_factor") and value:
            result[key] = list(value[:pairs])
        else:
            result[key] = value
    return result


def sections(old: Iterable[int], pairs: int) -> list[int]:
    """As many sections in nearly the same ratio that add up to `pairs`; what is left goes to the largest remainders."""
    shares = [pairs * size / sum(old) for size in old]
    new = [math.floor(share) for share in shares]
    by_remainder = sorted(range(len(new)), key=lambda index: new[index] - shares[index])
    for index in by_remainder[: pairs - sum(new)]:
        new[index] += 1
    return new
