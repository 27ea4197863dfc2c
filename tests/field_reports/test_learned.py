"""One test for each public report on learned positions; numbered as the reports are."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertModel

from hf_posext import inspect_model, patch_model, record_of, unpatch_model
from tests.dynamic import text
from tests.host_logs import Lines
from tests.snapshots import differences, snapshot
from tests.tables import FAMILIES, make, padded, read, shared_unpatched, tables_of

N, T = 16, 32
"""Tokens of the models of these reports, and of the patched ones."""
STRETCHES = ["pi", "tile", "hierarchical", "sinusoidal"]
ENCODERS = ["bert", "roberta", "xlm_roberta", "distilbert", "albert", "electra", "mpnet", "deberta"]


def short(row: str, **changes: Any) -> Any:
    """A tiny model of a family with N = 16."""
    field = "n_positions" if row == "gpt2" else "max_position_embeddings"
    counted = FAMILIES[row].reserved if FAMILIES[row].kind == "encoder" else 0
    return make(row, **{field: N + counted, **changes})


@pytest.mark.parametrize("method", STRETCHES)
@pytest.mark.parametrize("row", ENCODERS)
def test_report_014_text_beyond_the_table_is_an_error_with_the_limit(row: str, method: str) -> None:
    """By token ids, by embeddings and by positions: never an index error, never an assertion on the device."""
    model = patch_model(short(row), method, 2)
    assert read(model, text(T, 2)).shape[1] == T
    embed = model.get_input_embeddings()
    model(inputs_embeds=embed(text(T)))
    for inputs in ({"input_ids": text(T + 1)}, {"inputs_embeds": embed(text(T + 1))}):
        with pytest.raises(ValueError, match=rf"{T + 1} tokens.*{T} at most.*`factor` or `target_length`"):
            model(**inputs)


@pytest.mark.parametrize("row", [row for row in FAMILIES if FAMILIES[row].kind != "pair"])
def test_report_014_positions_beyond_the_table_are_an_error_with_the_limit(row: str) -> None:
    method = "tile" if FAMILIES[row].mechanism == "learned" else "pi"
    model = patch_model(short(row), method, 2)
    first = FAMILIES[row].reserved if FAMILIES[row].kind == "encoder" else 0
    places = torch.tensor([[0, 1, 2, T - 1]]) + first
    model(input_ids=text(4), position_ids=places)
    with pytest.raises(ValueError, match=rf"{T}.*`factor` or `target_length`"):
        model(input_ids=text(4), position_ids=places + torch.tensor([[0, 0, 0, 1]]))


@pytest.mark.parametrize("method", STRETCHES)
def test_report_035_gpt2_reads_twice_as_much_and_stays_causal(method: str) -> None:
    model = patch_model(short("gpt2"), method, 2)
    one, other = text(T), text(T)
    other[0, -1] = 5 + (int(other[0, -1]) - 4) % 90
    assert torch.equal(read(model, one)[:, :-1], read(model, other)[:, :-1])
    assert model.config.n_positions == model.config.max_position_embeddings == T


@pytest.mark.parametrize("method", ["pi", "tile"])
def test_report_035_masks_of_gpt_neo_grow_and_shrink(method: str) -> None:
    model = short("gpt_neo")
    before = snapshot(model, 0)
    masks = [name for name, _ in model.named_buffers() if name.endswith("attention.bias")]
    patch_model(model, method, 2)
    full, local = (model.get_buffer(name) for name in masks)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    assert torch.equal(full[0, 0], distance >= 0)
    assert torch.equal(local[0, 0], (distance >= 0) & (distance < 8))
    unpatch_model(model)
    assert differences(before, snapshot(model, 0)) == []


def buffers_of(model: Any) -> dict[str, Tensor]:
    """Buffers with an id for each position, by the last part of their name."""
    return {
        name.rpartition(".")[2]: value
        for name, value in model.named_buffers()
        if name.endswith(("position_ids", "_type_ids"))
    }


@pytest.mark.parametrize("row", ENCODERS)
def test_report_036_buffers_of_ids_grow_with_the_table(row: str) -> None:
    model, extra = short(row), FAMILIES[row].reserved
    before = buffers_of(model)
    patch_model(model, "pi", 2)
    after = buffers_of(model)
    assert before.keys() == after.keys()
    assert torch.equal(after["position_ids"], torch.arange(T + extra)[None])
    assert all(torch.equal(value, torch.zeros(1, T + extra)) for name, value in after.items() if "type" in name)
    unpatch_model(model)
    assert [name for name, value in buffers_of(model).items() if not torch.equal(value, before[name])] == []


NOISY = pytest.mark.transformers_logs("transformers says that it has no use for the saved ids")


@pytest.mark.parametrize("kept", ["as they are", pytest.param("persistent", marks=NOISY), "absent"])
def test_report_036_whatever_becomes_of_the_buffers(kept: str, tmp_path: Path, host_logs: Lines) -> None:
    """Older versions save them, newer ones do not, some have none; what is loaded is of the right size."""
    model = short("bert")
    embeddings = model.bert.embeddings
    if kept == "persistent":
        embeddings._non_persistent_buffers_set.clear()
    if kept == "absent":
        del embeddings._buffers["token_type_ids"]
    before = snapshot(model, 0)
    patch_model(model, "tile", 2)
    expected = read(model, text(T, 2))
    state = model.state_dict()
    assert ("bert.embeddings.position_ids" in state) == (kept == "persistent")
    assert all(value.shape[-1] == T for name, value in state.items() if name.endswith("_ids"))
    model.save_pretrained(tmp_path)
    plain = FAMILIES["bert"].auto_class.from_pretrained(tmp_path).eval()
    assert [line for line in host_logs.lines if "MISMATCH" in line or "MISSING" in line] == []
    assert torch.equal(read(plain, text(T, 2)), expected)
    assert torch.equal(read(unpatch_model(plain), text(N)), read(short("bert"), text(N)))
    unpatch_model(model)
    assert [each for each in differences(before, snapshot(model, 0)) if not each.endswith("config")] == []


def test_report_036_a_model_without_position_ids() -> None:
    model = short("distilbert")
    del model.distilbert.embeddings._buffers["position_ids"]
    patch_model(model, "hierarchical", 2)
    assert torch.equal(read(model, text(N)), read(short("distilbert"), text(N)))
    assert read(model, text(T)).shape[1] == T


@pytest.mark.parametrize("row", ["roberta", "xlm_roberta", "mpnet"])
def test_report_037_reserved_rows_are_no_positions(row: str) -> None:
    model, before = short(row), tables_of(short(row))[0]
    assert model.config.max_position_embeddings == N + 2
    patch_model(model, "tile", 2)
    (after,) = tables_of(model)
    assert torch.equal(after, torch.cat((before, before[2:])))
    record = record_of(model)
    assert (record.trained_length, record.target_length, model.config.max_position_embeddings) == (N, T, T + 2)
    assert str(T) in str(inspect_model(model))


def test_report_037_positions_that_the_caller_packs_are_used_as_they_are() -> None:
    """Two texts in one row: RoBERTa's positions begin at 2 for each, and nobody shifts them a second time."""
    model, seen = patch_model(short("roberta"), "pi", 2), []
    places = torch.cat((torch.arange(20), torch.arange(12)))[None] + 2
    model.roberta.embeddings.position_embeddings.register_forward_hook(lambda _, __, output: seen.append(output))
    model(input_ids=text(T), position_ids=places)
    assert torch.equal(seen[0][0], tables_of(model)[0][places[0]])


def test_report_068_the_old_table_is_not_lost_as_it_becomes_longer(tmp_path: Path) -> None:
    """Asking `from_pretrained` for more positions draws the whole table anew; here every second row is an old one."""
    model = short("bert")
    (before,) = tables_of(model)
    patch_model(model, "pi", 2)
    assert torch.equal(tables_of(model)[0][::2], before)
    assert {name: value.shape[-1] for name, value in buffers_of(model).items()} == {
        "position_ids": T,
        "token_type_ids": T,
    }
    expected = read(model, text(T))
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    plain = FAMILIES["bert"].auto_class.from_pretrained(tmp_path).eval()
    assert torch.equal(read(plain, text(T)), expected)


def test_report_069_opt_keeps_its_offset_its_class_and_its_positions_from_the_mask() -> None:
    model = short("opt")
    module, (before,) = model.model.decoder.embed_positions, tables_of(model)
    kind = type(module)
    patch_model(model, "pi", 2)
    (after,) = tables_of(model)
    assert (len(before), len(after)) == (N + 2, T + 2)
    assert torch.equal(after[:2], before[:2])
    assert torch.equal(after[2::2], before[2:])
    assert isinstance(module, kind)
    assert type(module).__name__ == "OPTLearnedPositionalEmbedding"
    assert module.offset == 2
    batch = padded([text(9)[0], text(T, seed=1)[0]], "left", 1)
    found = read(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    torch.testing.assert_close(found[:1, -9:], read(model, text(9)), rtol=0, atol=1e-4)
    torch.testing.assert_close(found[1:], read(model, text(T, seed=1)), rtol=0, atol=1e-4)


class Sentences(nn.Module):
    """What wrappers of encoders are like: a limit of their own, which has nothing to do with the table."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.auto_model, self.max_seq_length = inner, N

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean of the last hidden states of a text that is cut at the wrapper's limit, [B, W]."""
        return self.auto_model(input_ids=tokens[:, : self.max_seq_length]).last_hidden_state.mean(1)


@pytest.mark.parametrize("through", ["the wrapper", "the model inside"])
def test_report_083_a_wrapper_reads_twice_as_much_once_its_own_limit_is_raised(through: str) -> None:
    torch.manual_seed(0)
    wrapper = Sentences(BertModel(short("bert").config).eval())
    tokenizer = SimpleNamespace(model_max_length=N)
    cut = wrapper(text(T))
    patch_model(wrapper if through == "the wrapper" else wrapper.auto_model, "tile", 2, tokenizer=tokenizer)
    assert torch.equal(wrapper(text(T)), cut)  # the second setting is still in the way
    assert tokenizer.model_max_length == T  # the third one was ours to raise
    wrapper.max_seq_length = tokenizer.model_max_length
    assert not torch.equal(wrapper(text(T)), cut)
    assert wrapper(text(T)).isfinite().all()
    wrapper.max_seq_length = T + 1
    with pytest.raises(ValueError, match=rf"{T + 1} tokens.*{T} at most"):
        wrapper(text(T + 1))
    unpatch_model(wrapper)
    assert tokenizer.model_max_length == N


def test_report_099_a_table_that_deepspeed_has_split_is_refused_in_words() -> None:
    """Under ZeRO-3 a weight has no rows of its own; its size must be read from nowhere but the config."""
    model = short("bert")
    weight = model.bert.embeddings.position_embeddings.weight
    weight.ds_id, weight.data = 7, torch.empty(0)
    with pytest.raises(RuntimeError, match=r"(?i)deepspeed"):
        patch_model(model, "tile", 2)
    assert weight.shape == (0,)


def test_report_102_no_version_that_is_supported_has_a_table_of_distances_in_bert() -> None:
    """`relative_key` came with a second table of 2 N - 1 rows; where it is ignored nothing else has to grow."""
    model = short("bert", position_embedding_type="relative_key")
    assert [name for name, _ in model.named_modules() if "distance" in name] == []
    assert read(patch_model(model, "tile", 2), text(T)).shape[1] == T


@pytest.mark.parametrize("method", ["yarn", "ntk", "llama3", "longrope", "self_extend", "rerope"])
@pytest.mark.parametrize("row", ["bert", "xlm_roberta"])
def test_report_117_methods_for_rotation_are_refused_with_those_that_apply(row: str, method: str) -> None:
    options = {
        "longrope": {"long_factor": [1.0, 2.0]},
        "self_extend": {"window": 4, "group_size": 2},
        "rerope": {"window": 4},
    }
    with pytest.raises(ValueError, match=f"`{method}` has no meaning for a learned encoding") as error:
        patch_model(short(row), method, 2, **options.get(method, {}))
    words = str(error.value)
    assert all(f"`{each}`" in words for each in ("pi", "tile", "hierarchical", "sinusoidal", "alibi", "nope"))
    assert "`yarn`" not in words.partition("Methods that do")[2]


@pytest.mark.parametrize("row", ["marian", "m2m_100", "fsmt", "xglm", "pegasus"])
@pytest.mark.parametrize("method", ["pi", "sinusoidal"])
def test_report_122_tables_that_grow_on_demand_end_where_the_patch_says(row: str, method: str) -> None:
    """Text that the unpatched class would read with rows made on the fly, and badly, is an error."""
    model = patch_model(make(row), method, 2)
    limit = 2 * 32
    assert read(model, text(limit)).shape[1] == limit
    with pytest.raises(ValueError, match=rf"{limit}.*`factor` or `target_length`"):
        read(model, text(limit + 1))
    assert torch.equal(tables_of(model)[0], tables_of(patch_model(make(row), method, 2))[0])
    unpatch_model(model)
    assert torch.equal(read(model, text(32)), read(shared_unpatched(row), text(32)))
