"""`relative_bias` in use: trained, decoded with, saved and brought back, copied, compiled, suspended and taken off."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy

import hf_posext
from hf_posext import patch_model, record_of
from tests.architectures import TRAINED_LENGTH
from tests.bucketed import CAUSAL, FACTOR, FAMILIES, NAME, biases, trained, untrained
from tests.copies import through_pickle, through_torch_save
from tests.dynamic import CACHES, assert_close, greedy, in_pieces, padded, steps, text, whole
from tests.host_logs import Lines
from tests.in_attention import bert
from tests.snapshots import differences, snapshot

LONG = FACTOR * TRAINED_LENGTH
ROWS = ("bert", "roberta", "distilbert", "gpt2")


def auto_class(row: str) -> Any:
    """The auto class of a family."""
    return transformers.AutoModelForCausalLM if row in CAUSAL else transformers.AutoModelForMaskedLM


def loss_on_the_token_before(is_trained: bool) -> float:
    """Loss of a model that has learned to say the token before each one; its table says nothing of positions."""
    model = patch_model(bert(num_hidden_layers=1), "relative_bias", FACTOR, max_distance=16)
    table = torch.nn.init.zeros_(model.bert.embeddings.position_embeddings.weight).requires_grad_(False)
    own = [each.requires_grad_(is_trained) for each in biases(model).values()]
    others = [each for name, each in model.named_parameters() if name not in biases(model) and each is not table]
    optimizer = torch.optim.Adam([{"params": own, "lr": 0.3}, {"params": others, "lr": 0.01}])
    for step in range(80):
        tokens = 5 + text(24, batch=16, seed=step) % 8
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens).logits[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def test_it_learns_what_depends_on_distances() -> None:
    """Of eight tokens: without a bias the order of the text is not seen, and the loss stays about ln 8."""
    assert loss_on_the_token_before(False) > 1.8
    assert loss_on_the_token_before(True) < 1.0


CHANGES = {
    "in place": lambda each: each.copy_(torch.ones_like(each).cumsum(0)),
    "data": lambda each: each.data.copy_(torch.ones_like(each).cumsum(0)),
    "other data": lambda each: setattr(each, "data", torch.ones_like(each).cumsum(0)),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_bias_is_seen_however_it_was_written_and_forgotten_when_it_is_zero_again(how: str) -> None:
    """No counter of torch's tells of every change."""
    model, tokens = untrained("bert"), text(20)
    silent = whole(model, tokens)
    with torch.no_grad():
        for each in biases(model).values():
            CHANGES[how](each)
    found = whole(model, tokens)
    assert not torch.allclose(found, silent, atol=0.1)
    assert_close(found, model(tokens).logits.detach())
    with torch.no_grad():
        for each in biases(model).values():
            each.zero_()
    assert torch.equal(whole(model, tokens), silent)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_an_optimiser_is_seen(fused: bool) -> None:
    model, tokens = untrained("bert"), text(20)
    silent = whole(model, tokens)
    optimizer = torch.optim.AdamW(biases(model).values(), lr=0.5, fused=fused)
    model(tokens).logits.square().mean().backward()
    optimizer.step()
    assert not torch.allclose(whole(model, tokens), silent, atol=0.1)


def test_decoding_equals_one_pass_and_padded_prompts_are_read_as_each_alone() -> None:
    model, tokens = trained("gpt2"), text(48, batch=2)
    for cache in ("dynamic", "static"):
        assert_close(in_pieces(model, tokens, steps(), CACHES[cache](model, 48)), whole(model, tokens))
    rows = [text(length, seed=length)[0] for length in (9, 20)]
    batch = padded(rows, "left")
    options = {"min_new_tokens": 20, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    found = model.generate(**batch, **options)
    for each, full_row in zip(rows, found, strict=True):
        assert full_row[-20:].tolist() == greedy(model, each[None], 20)[0, -20:].tolist()


@pytest.mark.parametrize("row", ROWS)
def test_a_trained_model_is_saved_and_brought_back_quietly(row: str, tmp_path: Path, host_logs: Lines) -> None:
    model, tokens = trained(row), text(LONG, batch=2)
    expected = whole(model, tokens)
    model.save_pretrained(tmp_path)
    found = hf_posext.load_pretrained(tmp_path, auto_class(row))
    assert_close(whole(found, tokens), expected, 1e-5)
    assert record_of(found) == record_of(model)
    assert host_logs.complaints() == []
    short = text(TRAINED_LENGTH)
    assert torch.equal(whole(hf_posext.unpatch_model(found), short), whole(FAMILIES[row](), short))


@pytest.mark.transformers_logs("transformers names the weights that it does not know, which are those of the bias")
@pytest.mark.parametrize("row", ROWS)
def test_plain_transformers_reads_the_longer_table_without_the_bias(row: str, tmp_path: Path) -> None:
    model = trained(row)
    model.save_pretrained(tmp_path)
    plain, said = auto_class(row).from_pretrained(tmp_path, output_loading_info=True)
    assert set(said["unexpected_keys"]) == set(biases(model))
    assert not said["missing_keys"]
    assert not said["mismatched_keys"]
    longer = patch_model(FAMILIES[row](), "tile", FACTOR)
    assert torch.equal(whole(plain, text(LONG)), whole(longer, text(LONG)))
    note = json.loads((tmp_path / "config.json").read_text())["posext"]["note"]
    assert "longer table" in note
    assert "load_pretrained" in note


def test_a_checkpoint_without_the_bias_is_refused(tmp_path: Path) -> None:
    model = trained("bert")
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if NAME not in k})
    with pytest.raises(hf_posext.PatchError, match=r"has no `bert.encoder.layer.0.attention.self.posext_bias`"):
        hf_posext.load_pretrained(tmp_path, transformers.AutoModelForMaskedLM)


def test_a_record_says_what_was_done() -> None:
    record = record_of(untrained("bert", buckets=16, table="hierarchical"))
    assert (record.method, record.native, record.own) == ("relative_bias", None, [NAME])
    assert record.options == {"buckets": 16, "table": "hierarchical"}
    assert (record.trained_length, record.target_length) == (TRAINED_LENGTH, LONG)


@pytest.mark.parametrize("row", FAMILIES)
def test_unpatching_gives_everything_back(row: str) -> None:
    model = FAMILIES[row]()
    before = snapshot(model)
    patch_model(model, "relative_bias", FACTOR)
    with torch.no_grad():
        for each in biases(model).values():
            each.add_(1)
    whole(model, text(LONG))
    assert hf_posext.unpatch_model(model) is model
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize("row", ["bert", "gpt2"])
def test_copies_are_patched_and_go_their_own_way(row: str) -> None:
    model, tokens = trained(row), text(48)
    expected = whole(model, tokens)
    copies = [duplicate(model) for duplicate in (copy.deepcopy, through_pickle, through_torch_save)]
    with torch.no_grad():
        for each in biases(model).values():
            each.zero_()
    hf_posext.unpatch_model(model)
    for copied in copies:
        assert torch.equal(whole(copied, tokens), expected)
        short = text(TRAINED_LENGTH)
        assert torch.equal(whole(hf_posext.unpatch_model(copied), short), whole(FAMILIES[row](), short))


def test_it_outlives_a_suspension() -> None:
    """The same objects: an optimiser goes on with them."""
    model, plain, tokens = trained("bert"), FAMILIES["bert"](), text(48)
    expected, parameters, short = whole(model, tokens), list(biases(model).values()), text(TRAINED_LENGTH)
    with hf_posext.suspended(model):
        assert biases(model) == {}
        assert torch.equal(whole(model, short), whole(plain, short))
    assert all(one is other for one, other in zip(biases(model).values(), parameters, strict=True))
    assert torch.equal(whole(model, tokens), expected)


@torch.no_grad()
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("row", ["bert", "gpt2"])
def test_a_graph_that_was_compiled_at_zero_is_right_for_what_is_learned_later(row: str) -> None:
    model, tokens, counter = untrained(row), text(48), CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=counter)
    assert_close(whole(compiled, tokens), whole(model, tokens))
    for each in biases(model).values():
        each.copy_(torch.randn_like(each))
    silent = whole(untrained(row), tokens)
    assert_close(whole(compiled, tokens), whole(model, tokens))
    assert not torch.allclose(whole(compiled, tokens), silent, atol=0.1)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_float32(dtype: torch.dtype) -> None:
    """The unpatched model shows how far half precision takes a model of random weights from float32."""
    tokens, models = text(TRAINED_LENGTH, batch=4), (FAMILIES["bert"](), trained("bert"))
    exact = [whole(each, tokens) for each in models]
    losses = [
        (whole(each.to(dtype), tokens).float() - logits).abs().mean()
        for each, logits in zip(models, exact, strict=True)
    ]
    assert losses[1] < 3 * losses[0]
    assert {each.dtype for each in biases(models[1]).values()} == {dtype}
    silent = untrained("bert").to(dtype)
    assert torch.equal(whole(silent, tokens), whole(FAMILIES["bert"]().to(dtype), tokens))


def test_autocast_changes_nothing_at_zero_and_mixes_no_dtypes() -> None:
    tokens = text(TRAINED_LENGTH)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(whole(untrained("bert"), tokens), whole(FAMILIES["bert"](), tokens))
        model = trained("bert")
        model(tokens).logits.float().square().mean().backward()
    assert all(bool(each.grad.any()) for each in biases(model).values())


def test_an_adapter_may_come_before_or_after() -> None:
    config = LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear")
    models = []
    for order in ("patch first", "adapter first"):
        model = trained("bert") if order == "patch first" else FAMILIES["bert"]()
        torch.manual_seed(0)
        model = get_peft_model(model, config).eval()
        if order == "adapter first":
            patch_model(model, "relative_bias", FACTOR)
            with torch.no_grad():
                for each, other in zip(biases(model).values(), biases(trained("bert")).values(), strict=True):
                    each.copy_(other)
        models.append(model)
    assert torch.equal(whole(models[0], text(48)), whole(models[1], text(48)))


def test_a_model_on_meta_is_filled_by_to_empty_and_a_state_dict() -> None:
    model, tokens = trained("bert"), text(48)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected = whole(model, tokens)
    model.to("meta")
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    assert torch.equal(whole(model, tokens), expected)


def test_weight_initialisation_leaves_the_bias_alone() -> None:
    model = trained("bert")
    expected = {name: each.clone() for name, each in biases(model).items()}
    model.init_weights()
    for module in model.modules():
        model._init_weights(module)
    assert all(torch.equal(each, expected[name]) for name, each in biases(model).items())


def test_a_bias_that_is_put_on_in_inference_mode_can_be_trained() -> None:
    with torch.inference_mode():
        model = untrained("bert")
        whole(model, text(20))
    assert not any(each.is_inference() for each in biases(model).values())


def test_text_that_is_longer_than_the_table_is_refused_with_the_number() -> None:
    model, mask = trained("roberta"), torch.ones(1, LONG + 9, dtype=torch.int64)
    whole(model, text(LONG))
    with pytest.raises(ValueError, match=f"The text has {LONG + 1} tokens, and the model reads {LONG} at most"):
        whole(model, text(LONG + 1))
    mask[0, LONG:] = 0
    tokens = text(LONG + 9).masked_fill(mask == 0, 1)
    found = whole(model, tokens, attention_mask=mask)
    assert_close(found[:, :LONG], whole(model, tokens[:, :LONG]))


def test_it_goes_on_top_of_a_longer_table_and_nothing_on_top_of_it() -> None:
    model = FAMILIES["bert"]()
    before = snapshot(model)
    patch_model(model, "tile", 2)
    expected = whole(model, text(64))
    patch_model(model, "relative_bias", 2, compose=True)
    assert torch.equal(whole(model, text(64)), expected)
    assert whole(model, text(LONG)).shape[1] == LONG
    with pytest.raises(hf_posext.PatchError, match=r"Nothing can be put on top of relative_bias"):
        patch_model(model, "tile", 2, compose=True)
    hf_posext.unpatch_model(model)
    assert differences(before, snapshot(model)) == []
