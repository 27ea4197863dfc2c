"""Models with nothing wrong: of every mechanism, unpatched and patched; each call builds a fresh one."""

from collections.abc import Callable
from functools import partial
from typing import Any

from hf_posext import patch_model
from tests import special_models, tables
from tests.architectures import TRAINED_LENGTH, tiny_model
from tests.mechanisms import alibi_models, relative_models

N = TRAINED_LENGTH
ROTARY = (
    "llama", "mistral_sliding", "qwen3", "gemma2", "gemma3", "phi", "gpt_neox", "cohere", "gptj", "modernbert",
    "roformer", "qwen2_vl", "deepseek_v3", "llama_linear", "llama_llama3", "llama_yarn", "llama_longrope",
    "llama_dynamic", "phi3_longrope", "gemma3_linear", "deepseek_v3_yarn",
)  # fmt: skip
TABLES = ("bert", "roberta", "distilbert", "gpt2", "gpt_neo", "opt", "bart", "xglm", "marian", "m2m_100")
ALIBI = ("bloom", "mpt", "falcon")
RELATIVE = ("t5", "mpnet", "deberta_v2")

PATCHES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama_pi": ("llama", "pi", {}),
    "llama_yarn_patched": ("llama", "yarn", {}),
    "llama_yarn_dynamic": ("llama", "yarn", {"dynamic": True}),
    "llama_self_extend": ("llama", "self_extend", {}),
    "llama_alibi": ("llama", "alibi", {}),
    "llama_nope": ("llama", "nope", {}),
    "llama_window": ("llama", "window", {}),
    "gemma3_yarn": ("gemma3", "yarn", {}),
    "gpt_neox_ntk": ("gpt_neox", "ntk", {}),
    "gptj_pi": ("gptj", "pi", {}),
    "gpt2_tile": ("gpt2", "tile", {}),
    "gpt2_pi": ("gpt2", "pi", {}),
    "gpt2_pi_dynamic": ("gpt2", "pi", {"dynamic": True}),
    "bert_alibi": ("bert", "alibi", {}),
    "bloom_pi": ("bloom", "pi", {}),
    "esm_pi": ("esm", "pi", {}),
    "t5_pi": ("t5", "pi", {"original_max_position_embeddings": N}),
}
"""Name -> the model, the method and its options, at factor 2."""


def patched(name: str) -> Any:
    """A model of `PATCHES`."""
    base, method, options = PATCHES[name]
    return patch_model(MODELS[base](), method, 2, **options)


MODELS: dict[str, Callable[[], Any]] = {
    **{name: partial(tiny_model, name) for name in ROTARY},
    **{name: partial(tables.make, name) for name in TABLES},
    **{name: partial(alibi_models.tiny, name) for name in ALIBI},
    **{name: partial(relative_models.tiny, name) for name in RELATIVE},
    "smollm3": special_models.smollm3,
    "esm": special_models.esm,
    **{name: partial(patched, name) for name in PATCHES},
}
