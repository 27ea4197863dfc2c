"""The embedded models: there without a network, as promised, and not trained on their own test."""

import subprocess
import sys

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posext import inspect_model, patched, perplexity
from hf_posext.demo import demo_names, demo_path, held_out_documents, load_demo
from hf_posext.evaluation.perplexity_report import PerplexityReport

OFFLINE = """
import socket
def refuse(*_, **__):
    raise AssertionError("the network was asked")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from hf_posext.demo import load_demo
model, tokenizer, documents = load_demo("llama")
ids = tokenizer(documents[0][:500], return_tensors="pt")["input_ids"]
print(model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] - ids.shape[1])
"""


def test_it_loads_and_runs_without_asking_the_network() -> None:
    ended = subprocess.run([sys.executable, "-c", OFFLINE], capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == "2", ended.stderr


def test_types_and_state_are_as_promised() -> None:
    model, tokenizer, documents = load_demo()
    assert isinstance(model, PreTrainedModel)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training
    assert model.config.use_cache
    assert model.generation_config.use_cache
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 256
    assert documents == held_out_documents()


def test_each_held_out_document_reaches_16_times_the_trained_length() -> None:
    _, tokenizer, documents = load_demo("llama")
    lengths = [len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in documents]
    assert len(documents) >= 8
    assert all(isinstance(text, str) for text in documents)
    assert min(lengths) > 16 * 256 + 128


def test_text_survives_the_tokenizer() -> None:
    _, tokenizer, documents = load_demo("llama")
    text = documents[0][:2000]
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) == text


def test_two_models_share_nothing() -> None:
    one, other = load_demo()[0], load_demo()[0]
    assert one is not other
    assert one.config is not other.config


def test_models_are_found_by_their_folders() -> None:
    assert demo_names() == ["bert", "gpt_neox", "llama"]
    assert all((demo_path(name) / "model.safetensors").is_file() for name in demo_names())


@pytest.mark.parametrize("name", ["bert", "gpt_neox"])
def test_the_other_models_share_text_and_tokenizer(name: str) -> None:
    model, tokenizer, documents = load_demo(name)
    _, llamas, same = load_demo("llama")
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 256
    assert documents == same
    text = documents[3][:3000]
    assert tokenizer(text, verbose=False)["input_ids"] == llamas(text, verbose=False)["input_ids"]
    assert len(tokenizer) - len(llamas) == (name == "bert")  # the mask


def test_the_encoder_has_a_learned_table_and_a_mask() -> None:
    model, tokenizer, _ = load_demo("bert")
    (site,) = inspect_model(model).sites
    assert (site.mechanism, site.rows) == ("learned", 256)
    assert tokenizer.mask_token_id == model.config.vocab_size - 1


def test_of_gpt_neox_a_quarter_of_each_head_rotates() -> None:
    model, _, _ = load_demo("gpt_neox")
    (site,) = inspect_model(model).sites
    assert (site.mechanism, site.rotated_width) == ("rotary", 16)


@pytest.mark.parametrize("name", ["lama", "text", "", "../llama"])
def test_an_unknown_name_is_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"Unknown demo model .*Allowed: .*`llama`"):
        load_demo(name)


def test_the_published_ordering_of_untuned_methods_at_four_times_the_trained_length() -> None:
    """Nats per token, paired over documents: ReRoPE and SelfExtend below YaRN, ALiBi and NoPE far above it."""
    model, tokenizer, documents = load_demo("llama")
    reports = []
    for method in ("yarn", "rerope", "self_extend", "alibi", "nope"):
        with patched(model, method, 4):
            reports.append(
                perplexity(model, tokenizer, documents, context_lengths=[1024], endpoints_per_document=1, bars=[])
            )
    joined = PerplexityReport.join(reports)
    against_yarn = {arm: joined.difference(arm, "yarn", 1024) for arm in joined.arms[1:]}
    assert against_yarn["rerope"]["high"] < 0
    assert against_yarn["self_extend"]["high"] < 0
    assert against_yarn["alibi"]["low"] > 0.5
    assert against_yarn["nope"]["low"] > 1
