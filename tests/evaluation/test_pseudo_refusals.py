"""Models, texts and settings that have no pseudo-perplexity: each is refused with what came and what to do."""

import logging
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_posext import PseudoPerplexityReport, patch_model, perplexity, pseudo_perplexity
from hf_posext.evaluation.forwards import LengthError
from hf_posext.evaluation.pseudo_perplexity import is_masked_lm
from tests.evaluation.masked_stubs import FAMILIES, SEP, TRAINED, build, documents, masking_tokenizer
from tests.evaluation.stubs import tiny_llama, word_tokenizer

DOCUMENTS = documents(140, 90, 121)


def measure(model: nn.Module, docs: Any = DOCUMENTS, **settings: Any) -> PseudoPerplexityReport:
    """Pseudo-perplexity on token ids, with few resamples."""
    defaults: dict[str, Any] = {"context_lengths": [16, 32], "resamples": 200, "batch_size": 8}
    return pseudo_perplexity(model, settings.pop("tokenizer", masking_tokenizer()), docs, **{**defaults, **settings})


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "modernbert"])
def test_a_length_that_the_table_does_not_hold_is_refused(family: str) -> None:
    with pytest.raises(
        LengthError, match=f"cannot read {TRAINED + 1} tokens: its table of positions ends at {TRAINED}"
    ):
        measure(build(family), context_lengths=[16, TRAINED + 1])


def test_lengths_beyond_the_patch_are_refused_or_noted(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LengthError, match="cannot read 65 tokens: its table of positions ends at 64"):
        measure(patch_model(build(), "alibi", 2), context_lengths=[32, 65])
    note = "`pi` is made for 64 tokens; 80 is beyond its reach. Patch with a factor that covers the longest context."
    with caplog.at_level(logging.WARNING, logger="hf_posext"):
        assert note in measure(patch_model(build("modernbert"), "pi", 2), context_lengths=[80]).notes
    assert caplog.messages == [note]


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no lengths": ({"context_lengths": []}, ValueError, "`context_lengths` is empty"),
    "special tokens only": ({"context_lengths": [2]}, ValueError, "more than the 2 special tokens"),
    "share": ({"mask_share": 1.0}, ValueError, "`mask_share` must be below 1, got 1.0"),
    "no share": ({"mask_share": 0}, ValueError, "`mask_share` must be a finite number > 0"),
    "draws": ({"draws": 7}, ValueError, "`draws` must be at most 6 for a `mask_share` of 0.15.*got 7"),
    "no draws": ({"draws": 0}, ValueError, "`draws` must be at least 1"),
    "targets": ({"targets": 0}, ValueError, "`targets` must be at least 1"),
    "endpoints": ({"endpoints_per_document": True}, TypeError, "`endpoints_per_document` must be a whole number"),
    "bar": ({"bars": ["window"]}, ValueError, "Unknown bar 'window'.*`truncate`, `none`"),
    "arm": ({"arm": "truncate"}, ValueError, "`arm` must not be the name of a bar"),
    "too long": ({"context_lengths": [32], "docs": documents(20)}, ValueError, "needs 30 tokens besides 2 special"),
    "too many targets": ({"targets": 500}, ValueError, "needs 500 tokens.*longest document has 140"),
    "nothing masked": ({"docs": [torch.full((99,), SEP)]}, ValueError, "No token is masked"),
    "vocabulary": ({"docs": [torch.full((99,), 50)]}, ValueError, "Document 0 has the token id 50"),
    "no tokenizer": ({"tokenizer": None}, ValueError, "needs a tokenizer with a mask token.*got None"),
    "no mask": (
        {"tokenizer": masking_tokenizer(has_mask=False)},
        ValueError,
        "needs a tokenizer with a mask token.*has none",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_named(case: str) -> None:
    settings, error, message = MISTAKES[case]
    with pytest.raises(error, match=message):
        measure(build(), **settings)


def test_a_mask_token_that_the_model_does_not_know_is_named() -> None:
    with pytest.raises(ValueError, match="special token with the id 4, but the model's ids are 0 to 3"):
        measure(build(vocab_size=4, bos_token_id=None, eos_token_id=None), context_lengths=[32])


def bart() -> nn.Module:
    """An encoder-decoder, which transformers loads as a masked LM too."""
    sizes = {"vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16}
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(**sizes, decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2)
    )


OTHERS: dict[str, tuple[Any, str]] = {
    "causal": (tiny_llama, "looks at the preceding tokens only. Measure a causal LM with `perplexity`"),
    "headless": (lambda: build().bert, "BertModel has no LM head. Load the model with AutoModelForMaskedLM"),
    "encoder-decoder": (bart, "is an encoder-decoder"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_model_that_is_no_masked_lm_is_refused_before_anything_is_read(case: str) -> None:
    make, message = OTHERS[case]
    model = make()
    assert not is_masked_lm(model)
    with pytest.raises(ValueError, match=f"Pseudo-perplexity needs a masked LM.*{message}"):
        measure(model, 3, context_lengths=[16])


@pytest.mark.parametrize("family", FAMILIES)
def test_perplexity_of_a_masked_lm_names_the_other_function(family: str) -> None:
    model = build(family)
    assert is_masked_lm(model)
    with pytest.raises(ValueError, match=r"looks at the following tokens too\. Measure a masked LM with `pseudo_perpl"):
        perplexity(model, word_tokenizer(adds_bos=False), DOCUMENTS, context_lengths=[16])
