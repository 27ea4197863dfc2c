"""Dynamic `pi` on tables: a row of at most N tokens is read with the old table, a longer one with the stretched one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posext import fixed_length, load_pretrained, patch_model, record_of, scale_for, unpatch_model
from tests.dynamic import CACHES, assert_close, in_pieces, steps, text, whole
from tests.snapshots import snapshot
from tests.tables import (
    EVERY_PAIR,
    FAMILIES,
    N,
    T,
    generated,
    loss_of,
    make,
    padded,
    patch,
    patched_model,
    read,
    shared_model,
    shared_unpatched,
    tables_of,
)

KIND = "pi_dynamic"
ROWS = [row for row, kind in EVERY_PAIR if kind == KIND]
DECODERS = [row for row in ROWS if FAMILIES[row].kind == "decoder"]
LONG = 48
FEW_ROWS = ("bert", "roberta", "gpt2", "opt", "bart", "xglm", "m2m_100")
"""One for each way in which positions are made or rows are kept."""


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("length", [1, N - 1, N])
def test_text_of_at_most_n_tokens_is_read_as_before_to_the_last_bit(row: str, length: int) -> None:
    tokens = text(length, 2)
    assert torch.equal(read(shared_model(row, KIND), tokens), read(shared_unpatched(row), tokens))


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("length", [N + 1, T])
def test_longer_text_is_read_as_with_a_fixed_factor(row: str, length: int) -> None:
    tokens = text(length, 2)
    assert_close(read(shared_model(row, KIND), tokens), read(shared_model(row, "pi"), tokens), 1e-5)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("length", [20, N])
def test_a_short_row_beside_a_long_one_is_read_as_by_the_unpatched_model(row: str, length: int) -> None:
    model, short = shared_model(row, KIND), text(length)[0]
    batch = padded([short, text(LONG, seed=1)[0]], "right", 1)
    found = read(model, **tokens_of(batch))
    assert_close(found[:1, :length], read(shared_unpatched(row), short[None]), 1e-4)
    assert_close(found[1:], read(shared_model(row, "pi"), text(LONG, seed=1)), 1e-4)


def tokens_of(batch: dict[str, Tensor]) -> dict[str, Any]:
    """A batch in the words of `read`."""
    return {"tokens": batch["input_ids"], "attention_mask": batch["attention_mask"]}


@pytest.mark.parametrize("row", FEW_ROWS)
def test_rows_that_are_looked_up_for_a_short_text_are_the_old_ones_to_the_last_bit(row: str) -> None:
    """Attention may round otherwise in another batch; what stands for a position may not."""
    family, model, seen = FAMILIES[row], patched_model(row, KIND), []
    for path in family.tables:
        model.get_submodule(path).register_forward_hook(lambda _, __, output: seen.append(output))
    batch = padded([text(20)[0], text(LONG, seed=1)[0]], "right", 1)
    read(model, **tokens_of(batch))
    first, last = family.reserved, family.reserved + LONG
    for found, old, new in zip(seen, tables_of(shared_unpatched(row)), tables_of(model), strict=True):
        assert torch.equal(found[0, :20], old[first : first + 20])
        assert torch.equal(found[1], new[first:last])


@pytest.mark.parametrize("row", ["opt", "roberta", "m2m_100", "fsmt"])
def test_rows_padded_on_the_left_are_read_as_alone(row: str) -> None:
    """Where padding takes no position; 28 tokens behind 20 of padding are a short text, though 48 wide."""
    model, pad = shared_model(row, KIND), make(row).config.pad_token_id
    texts = [text(28)[0], text(LONG, seed=1)[0], text(40, seed=2)[0]]
    found = read(model, **tokens_of(padded(texts, "left", pad)))
    for index, each in enumerate(texts):
        alone = read(shared_unpatched(row) if len(each) <= N else shared_model(row, "pi"), each[None])
        assert_close(found[index, -len(each) :], alone[0], 1e-4)


def test_packed_documents_are_short_each() -> None:
    """Positions that are given decide: two documents of 24 tokens in a row of 48 are short text."""
    places = torch.cat((torch.arange(24), torch.arange(24)))[None]
    model, seen = patched_model("gpt2", KIND), []
    model.transformer.wpe.register_forward_hook(lambda _, __, output: seen.append(output))
    read(model, text(LONG), position_ids=places)
    (old,) = tables_of(shared_unpatched("gpt2"))
    assert torch.equal(seen[0][0], old[places[0]])


@pytest.mark.parametrize("row", DECODERS)
def test_a_short_text_is_decoded_with_a_cache_as_by_the_unpatched_model(row: str) -> None:
    model, plain, tokens = shared_model(row, KIND), shared_unpatched(row), text(N, 2)
    sizes = steps(20, N)
    found = in_pieces(model, tokens, sizes, CACHES["dynamic"](model, N))
    assert torch.equal(found, in_pieces(plain, tokens, sizes, CACHES["dynamic"](plain, N)))


@pytest.mark.parametrize("row", DECODERS)
def test_a_long_prompt_is_decoded_with_a_cache_as_read_at_once(row: str) -> None:
    model, tokens = shared_model(row, KIND), text(LONG, 2)
    assert_close(in_pieces(model, tokens, steps(40, LONG), CACHES["dynamic"](model, LONG)), whole(model, tokens))


@pytest.mark.parametrize("row", DECODERS)
@pytest.mark.parametrize("sizes", [[N, 1], [20, 20], [1, 31, 1]])
def test_a_text_that_grows_beyond_n_over_a_cache_is_refused_with_the_way_out(row: str, sizes: list[int]) -> None:
    model, total = shared_model(row, KIND), sum(sizes)
    with pytest.raises(ValueError, match=rf'{N} tokens.*{total} tokens.*scale="frozen".*fixed_length'):
        in_pieces(model, text(total), sizes, CACHES["dynamic"](model, total))
    assert torch.equal(read(model, text(20)), read(shared_unpatched(row), text(20)))  # nothing is left of it


@pytest.mark.parametrize("row", ["gpt2", "opt", "xglm"])
@pytest.mark.parametrize(("prompt", "new"), [(20, 8), (28, 8), (40, 8), (24, 8)])
def test_a_frozen_generation_is_that_of_one_table(row: str, prompt: int, new: int) -> None:
    model = patched_model(row, KIND, scale="frozen")
    like = shared_model(row, "pi") if prompt + new > N else shared_unpatched(row)
    assert torch.equal(generated(model, text(prompt, 2), new), generated(like, text(prompt, 2), new))


def test_each_row_of_a_frozen_generation_has_its_own_table() -> None:
    """20 and 40 tokens, padded on the left: the first stays within N, the second does not."""
    model = patched_model("opt", KIND, scale="frozen")
    batch = padded([text(20)[0], text(40, seed=1)[0]], "left", 1)
    found = generated(model, batch["input_ids"], 8, attention_mask=batch["attention_mask"])
    assert torch.equal(found[:1], generated(shared_unpatched("opt"), text(20), 8))
    assert torch.equal(found[1:], generated(shared_model("opt", "pi"), text(40, seed=1), 8))


@pytest.mark.parametrize(("prompt", "new", "table"), [(20, 16, "old"), (40, 8, "both"), (40, 40, "new")])
def test_each_side_of_a_pair_has_its_own_length_in_a_frozen_generation(prompt: int, new: int, table: str) -> None:
    """The encoder reads the prompt and the decoder writes what is new; neither is as long as both together."""
    model = patched_model("bart", KIND, scale="frozen")
    seen: dict[str, list[Tensor]] = {path: [] for path in FAMILIES["bart"].tables}
    for path, found in seen.items():
        model.get_submodule(path).register_forward_hook(lambda _, __, output, found=found: found.append(output))
    generated(model, text(prompt), new)
    is_new = {"old": (False, False), "both": (True, False), "new": (True, True)}[table]
    rows = zip(tables_of(shared_unpatched("bart")), tables_of(model), seen.values(), is_new, strict=True)
    for old, longer, outputs, stretched in rows:
        first = torch.cat([output.reshape(-1, 64) for output in outputs])[:8]
        assert torch.equal(first, (longer if stretched else old)[2:10])


def test_a_fixed_length_decides_for_all_texts_of_a_block() -> None:
    model, tokens = shared_model("gpt2", KIND), text(20, 2)
    with fixed_length(model, LONG):
        assert_close(read(model, tokens), read(shared_model("gpt2", "pi"), tokens), 1e-5)
        assert_close(
            in_pieces(model, text(LONG), steps(20, LONG), CACHES["dynamic"](model, LONG)), whole(model, text())
        )
    with fixed_length(model, N):
        assert torch.equal(read(model, tokens), read(shared_unpatched("gpt2"), tokens))
    with fixed_length(model, [N, LONG]):
        found = read(model, tokens)
        assert_close(found[:1], read(shared_unpatched("gpt2"), tokens[:1]), 1e-5)
        assert_close(found[1:], read(shared_model("gpt2", "pi"), tokens[1:]), 1e-5)
    assert torch.equal(read(model, tokens), read(shared_unpatched("gpt2"), tokens))


def test_a_text_beyond_the_length_that_was_fixed_is_refused() -> None:
    """The old table has no row for it, so that no text is read with a row that is not its own."""
    model = shared_model("gpt2", KIND)
    with fixed_length(model, 20), pytest.raises(ValueError, match=rf"{N}"):
        read(model, text(LONG))


def test_a_cache_of_one_table_is_not_read_with_the_other() -> None:
    model = shared_model("gpt2", KIND)
    cache = CACHES["dynamic"](model, LONG)
    with fixed_length(model, LONG):
        in_pieces(model, text(20), [20], cache)
    with pytest.raises(ValueError, match="cache was filled at scale 2"):
        in_pieces(model, text(4), [4], cache)


def test_a_long_text_that_was_cut_short_in_its_cache_is_not_read_with_two_tables() -> None:
    """As assisted decoding does: either what the cache holds is refused, or the rest is read like it."""
    model, tokens = shared_model("gpt2", KIND), text(40)
    cache = CACHES["dynamic"](model, LONG)
    in_pieces(model, tokens, [40], cache)
    cache.crop(-20)
    try:
        found = in_pieces(model, tokens[:, 20:24], [4], cache)
    except ValueError:
        return
    assert_close(found, read(shared_model("gpt2", "pi"), tokens[:, :24])[:, 20:])


@pytest.mark.parametrize(("length", "scale"), [(1, 1.0), (N, 1.0), (N + 1, 2.0), (T, 2.0)])
def test_the_scale_of_a_length(length: int, scale: float) -> None:
    assert scale_for(shared_model("bert", KIND), length) == scale


@pytest.mark.parametrize("row", FEW_ROWS)
@pytest.mark.parametrize("trained", [False, True])
def test_both_tables_come_back_from_disk(row: str, trained: bool, tmp_path: Path) -> None:
    """Old rows are in no way made of new ones, which may have been trained since."""
    family, model = FAMILIES[row], make(row)
    before = read(model, text(N, 2))
    patch(model, KIND)
    if trained and family.mechanism == "learned":
        loss_of(model).backward()
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
        before = read(with_weights_of(model, row), text(N, 2))
    expected = read(model, text(LONG, 2))
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, family.auto_class).eval()
    assert record_of(loaded) == record_of(model)
    assert torch.equal(read(loaded, text(LONG, 2)), expected)
    assert torch.equal(read(loaded, text(N, 2)), read(model, text(N, 2)))
    assert torch.equal(read(unpatch_model(loaded), text(N, 2)), before)


def with_weights_of(model: Any, row: str) -> Any:
    """The unpatched model of a row with all weights of a patched one but its table, which is the old one."""
    twin = make(row)
    old = {f"{path}.weight": twin.get_submodule(path).weight for path in FAMILIES[row].tables}
    twin.load_state_dict({name: old.get(name, model.state_dict()[name]) for name in twin.state_dict()})
    return twin


def test_what_was_read_before_does_not_matter() -> None:
    """Invariant 8: a pure function of the config and of the present text."""
    model = patched_model("gpt2", KIND)
    first = [read(model, text(length)) for length in (20, LONG, 20)]
    before = snapshot(model, 0)
    again = [read(model, text(length)) for length in (LONG, 20)]
    assert torch.equal(first[0], first[2])
    assert torch.equal(first[1], again[0])
    assert torch.equal(first[0], again[1])
    assert {name: value.shape for name, value in before.tensors.items()} == {
        name: value.shape for name, value in snapshot(model, 0).tensors.items()
    }


def test_a_relative_bias_beside_the_table_cannot_follow_the_length() -> None:
    with pytest.raises(ValueError, match=r"dynamic.*relative bias, which all texts of a batch share"):
        patch_model(make("mpnet"), "pi", 2, dynamic=True)
