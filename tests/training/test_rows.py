"""Models read rows as they are meant: packed documents alone, positions that jump as one text, padding not at all."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_posext import patch_model
from hf_posext.training.config import DataConfig
from hf_posext.training.data import Rows, training_rows
from tests.architectures import tiny_model
from tests.evaluation import masked_stubs
from tests.evaluation.stubs import BOS, documents, tiny_llama, word_tokenizer

N, T = 8, 32
CAUSAL = ["llama", "gpt_neox", "mistral_sliding"]
IMPLEMENTATIONS = ["sdpa", "eager"]
TOLERANCE: dict[str, Any] = {
    "rtol": 1e-4,
    "atol": 1e-4,
}  # logits are up to 20, and a masked key is left out or added as 0


def rows_of(given: list[Tensor], **config: Any) -> Rows:
    """Rows with a BOS, N = 8 and T = 32."""
    tokenizer = word_tokenizer(adds_bos=True)
    lengths = {"trained_length": N, "target_length": T}
    return training_rows(given, tokenizer, DataConfig(**config), **lengths, is_masked=False)


def batch_of(rows: Rows, *indices: int) -> dict[str, Tensor]:
    """Some rows as a batch, without labels."""
    batch = rows.collate([rows.dataset[index] for index in indices or range(rows.windows)])
    return {name: value for name, value in batch.items() if name != "labels"}


@torch.no_grad()
def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What a model says while it trains, [B, L, V]."""
    return model(**batch, use_cache=False).logits


def built(name: str, implementation: str) -> Any:
    """A tiny model with one of the implementations of attention."""
    model = tiny_model(name)
    model.set_attn_implementation(implementation)
    return model


def seen_from_all(length: int, implementation: str) -> Tensor:
    """An explicit mask [1, 1, L, L] with which each token sees itself and all before it."""
    mask = torch.ones(length, length).tril().bool()[None, None]
    return mask if implementation == "sdpa" else torch.where(mask, 0.0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
@pytest.mark.parametrize("positions", ["pose", "randomized"])
def test_a_row_whose_positions_jump_is_read_as_one_text(name: str, implementation: str, positions: str) -> None:
    model = built(name, implementation)
    batch = batch_of(rows_of(documents(60), positions=positions, short_fraction=0.3))
    explicit = {**batch, "attention_mask": seen_from_all(N, implementation).expand(len(batch["input_ids"]), -1, -1, -1)}
    torch.testing.assert_close(logits(model, batch), logits(model, explicit), **TOLERANCE)
    plain = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    assert (logits(model, batch) - logits(model, plain)).abs().max() > 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CAUSAL)
def test_29_the_same_documents_in_one_row_are_read_alike_and_as_alone(name: str, implementation: str) -> None:
    model = built(name, implementation)
    (document,) = documents(15)  # with a BOS two of them fill a row
    batch = batch_of(rows_of([document] * 4, packing=True))
    found = logits(model, batch)
    assert batch["input_ids"].shape == (2, T)
    alone = logits(model, {"input_ids": batch["input_ids"][:1, :16]})
    torch.testing.assert_close(found.reshape(4, 16, -1), alone.expand(4, -1, -1), **TOLERANCE)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_packed_row_beside_a_plain_one_is_read_as_alone(name: str) -> None:
    model = built(name, "sdpa")
    rows = rows_of(documents(90, 7, 8, 13), packing=True, short_fraction=0.3)
    alone = torch.cat([logits(model, batch_of(rows, index)) for index in range(rows.windows)])
    torch.testing.assert_close(logits(model, batch_of(rows)), alone, **TOLERANCE)


def test_the_loss_of_a_packed_row_is_that_of_its_documents() -> None:
    model = built("llama", "sdpa")
    texts = documents(10, 5, 14)
    rows = rows_of(texts, packing=True)
    alone = [torch.tensor([[BOS, *ids.tolist()]]) for ids in texts]
    with torch.no_grad():
        packed = model(**rows.collate([rows.dataset[0]]), use_cache=False).loss
        losses = [model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1) for ids in alone]
    assert float(packed) == pytest.approx(float(sum(losses)) / 29, rel=1e-5)


@pytest.mark.parametrize("length", [7, 15])
def test_29_a_dynamic_factor_follows_the_document_and_not_the_row(length: int) -> None:
    """With N = 8, rows of 8 tokens are read as by the original and rows of 16 as alone."""
    original = tiny_llama(max_position_embeddings=N)
    model = patch_model(tiny_llama(max_position_embeddings=N), "ntk", 4, dynamic=True)
    (document,) = documents(length)
    batch = batch_of(rows_of([document] * 20, packing=True))
    pieces = T // (length + 1)
    alone = {"input_ids": batch["input_ids"][:1, : length + 1]}
    expected = logits(model, alone)
    found = logits(model, batch)
    assert torch.equal(expected, logits(original, alone)) == (length < N)
    torch.testing.assert_close(
        found.reshape(len(found) * pieces, length + 1, -1), expected.expand(len(found) * pieces, -1, -1), **TOLERANCE
    )


def test_a_dynamic_factor_of_a_row_that_jumps_is_that_of_its_positions() -> None:
    model = patch_model(tiny_llama(max_position_embeddings=N), "ntk", 4, dynamic=True)
    batch = batch_of(rows_of(documents(60), positions="pose"))
    explicit = {**batch, "attention_mask": seen_from_all(N, "sdpa").expand(len(batch["input_ids"]), -1, -1, -1)}
    torch.testing.assert_close(logits(model, batch), logits(model, explicit), **TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_padded_row_is_read_as_alone(name: str, implementation: str) -> None:
    model = built(name, implementation)
    rows = rows_of(documents(200), positions="random_length")
    found = logits(model, batch_of(rows))
    lengths = [len(rows.dataset[index]["input_ids"]) for index in range(rows.windows)]
    assert len(set(lengths)) > 2
    together = torch.cat([row[:length] for row, length in zip(found, lengths, strict=True)])
    alone = [logits(model, {"input_ids": torch.tensor([rows.dataset[i]["input_ids"]])})[0] for i in range(rows.windows)]
    torch.testing.assert_close(together, torch.cat(alone), **TOLERANCE)


@pytest.mark.parametrize(("family", "first"), [("bert", 0), ("roberta", 2), ("modernbert", 0)])
def test_a_masked_lm_reads_jumps_and_a_plain_row_beside_them_as_it_counts_itself(family: str, first: int) -> None:
    model = masked_stubs.build(family)
    config = DataConfig(positions="pose", short_fraction=0.5)
    lengths = {"trained_length": N, "target_length": T, "first_position": first}
    tokenizer = masked_stubs.masking_tokenizer()
    rows = training_rows(masked_stubs.documents(120), tokenizer, config, **lengths, is_masked=True)
    batch = rows.collate([rows.dataset[index] for index in range(rows.windows)])
    short = torch.tensor(["position_ids" not in rows.dataset[index] for index in range(rows.windows)])
    del batch["labels"]
    own = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        found, plain = model(**batch).logits, model(**own).logits
    torch.testing.assert_close(found[short], plain[short], **TOLERANCE)
    assert (found[~short] - plain[~short]).abs().amax((1, 2)).median() > 0.1
