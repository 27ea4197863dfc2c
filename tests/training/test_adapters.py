"""What is trained: found by what modules are, in any family, and by names that PEFT takes for these modules alone."""

from typing import Any

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskedLM

from hf_posext import patch_model
from hf_posext.errors import PatchError
from hf_posext.records import record_of
from hf_posext.training.adapters import count_trainable, make_trainable
from hf_posext.training.config import AdapterConfig
from tests.training.runs import tiny_bert, tiny_llama

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 61}
FAMILIES: dict[str, tuple[Any, dict[str, Any], set[str], str, set[str]]] = {
    "llama": (
        AutoModelForCausalLM,
        SMALL,
        {"q_proj", "k_proj", "v_proj", "o_proj"},
        "embed_tokens",
        {"input_layernorm", "post_attention_layernorm", "norm"},
    ),
    "gpt_neox": (
        AutoModelForCausalLM,
        SMALL,
        {"query_key_value", "dense"},
        "embed_in",
        {"input_layernorm", "post_attention_layernorm", "final_layer_norm"},
    ),
    "gpt2": (
        AutoModelForCausalLM,
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 61, "bos_token_id": 0, "eos_token_id": 1},
        {"c_attn", "c_proj"},
        "wte",
        {"ln_1", "ln_2", "ln_f"},
    ),
    "bloom": (
        AutoModelForCausalLM,
        {"hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 61},
        {"query_key_value", "dense"},
        "word_embeddings",
        {"word_embeddings_layernorm", "input_layernorm", "post_attention_layernorm", "ln_f"},
    ),
    "bert": (
        AutoModelForMaskedLM,
        SMALL,
        {"query", "key", "value", "dense"},
        "word_embeddings",
        {"LayerNorm"},
    ),
}


def make(family: str) -> nn.Module:
    """A tiny model of a family."""
    auto, sizes, *_ = FAMILIES[family]
    return auto.from_config(AutoConfig.for_model(family, **sizes))


def lasts(model: nn.Module, kind: Any) -> set[str]:
    """Last names of the modules of a kind."""
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, kind)}


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_norms_and_embedding_are_found(family: str) -> None:
    _, _, projections, embedding, norms = FAMILIES[family]
    model = make_trainable(make(family), AdapterConfig(norms=True, embeddings=True), None)
    assert lasts(model, BaseTunerLayer) == projections
    assert lasts(model, ModulesToSaveWrapper) == norms | {embedding}


def test_the_dense_layers_of_a_feed_forward_are_no_attention() -> None:
    """BERT calls a layer of attention and two others `dense`, so that last names alone would take all three."""
    model = make_trainable(make("bert"), AdapterConfig(), None)
    paths = {name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    assert all(".attention." in path for path in paths)
    assert sum(path.endswith("output.dense") for path in paths) == 2


def test_the_tower_of_a_multimodal_model_is_left_alone() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "llava",
        text_config=AutoConfig.for_model("llama", **SMALL).to_dict(),
        vision_config=AutoConfig.for_model("clip_vision_model", image_size=28, patch_size=14, **vision).to_dict(),
    )
    model = AutoModelForImageTextToText.from_config(config)
    adapted = make_trainable(model, AdapterConfig(norms=True, embeddings=True), None)
    paths = [
        name for name, module in adapted.named_modules() if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)
    ]
    assert paths
    assert not any("vision" in path for path in paths)


@pytest.mark.parametrize(("factor", "is_whole"), [(2, False), (4, True)])
def test_norms_and_embeddings_are_trained_from_factor_four_where_nothing_is_said(factor: int, is_whole: bool) -> None:
    model = patch_model(tiny_llama(), "pi", factor)
    adapted = make_trainable(model, AdapterConfig(), record_of(model))
    assert bool(lasts(adapted, ModulesToSaveWrapper)) == is_whole


def test_a_tied_embedding_stays_tied() -> None:
    model = make_trainable(tiny_llama(tie_word_embeddings=True), AdapterConfig(embeddings=True), None)
    ids = torch.arange(8)[None] + 2
    model.get_input_embeddings().modules_to_save["default"].weight.data.mul_(0.5)
    base = tiny_llama(tie_word_embeddings=True)
    base.model.embed_tokens.weight.data.mul_(0.5)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, base(input_ids=ids).logits)


def test_full_tuning_trains_every_number() -> None:
    trained, whole = count_trainable(make_trainable(tiny_llama().requires_grad_(False), AdapterConfig("full"), None))
    assert trained == whole == sum(each.numel() for each in tiny_llama().parameters())


def test_old_rows_that_are_free_are_refused() -> None:
    model = patch_model(tiny_bert(), "tile", 4)
    with pytest.raises(PatchError, match=r"tile x4 .* leaves them free. Patch with frozen_rows=True"):
        make_trainable(model, AdapterConfig("new_rows"), record_of(model))


def test_a_second_adapter_is_refused() -> None:
    model = tiny_llama()
    make_trainable(model, AdapterConfig(), None)
    with pytest.raises(ValueError, match="has an adapter already"):
        make_trainable(model, AdapterConfig(), None)


def test_a_model_without_what_is_asked_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`adapter.lora` is handed to peft.LoraConfig"):
        make_trainable(tiny_llama(), AdapterConfig(lora={"ranks": 3}), None)
