"""Invariants 1, 3, 4, 5, 10 and 12 for methods that act in attention: exact where that is asked, back to each bit."""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posext import PatchError, inspect_model, load_pretrained, patch_model, patched, record_of, unpatch_model
from hf_posext.attention import biased, remapped
from tests import special_models
from tests.architectures import TRAINED_LENGTH, tiny_config, tiny_inputs
from tests.dynamic import CACHES, assert_close, has_cache, in_pieces, steps, text, whole
from tests.in_attention import (
    BIDIRECTIONAL,
    EVERY_CASE,
    FACTOR,
    FEW,
    KINDS,
    MIXED,
    REMAPS,
    ROWS,
    WITHOUT_ROTATION,
    auto_class,
    loaded_in,
    make,
    named,
    patch,
    patched_model,
    shared_model,
    shared_unpatched,
    text_for,
)
from tests.snapshots import described, differences, snapshot


@pytest.mark.parametrize(("row", "kind"), EVERY_CASE)
def test_factor_1_changes_no_bit(row: str, kind: str) -> None:
    length = TRAINED_LENGTH if row in ("bert", "gpt2") else 48
    model, unpatched = patched_model(row, kind, factor=1), shared_unpatched(row)
    assert record_of(model).factor == 1
    assert torch.equal(whole(model, text(length)), whole(unpatched, text(length)))
    if has_cache(model):
        both = [in_pieces(each, text(32), steps(28, 32), CACHES["dynamic"](each, 32)) for each in (model, unpatched)]
        assert torch.equal(*both)


@pytest.mark.parametrize("method", sorted({method for method, _ in KINDS.values()}))
def test_factor_1_changes_no_bit_without_options_either(method: str) -> None:
    model = patch_model(make("llama"), method, 1)
    assert torch.equal(whole(model, text()), whole(shared_unpatched("llama"), text()))


@pytest.mark.parametrize(("row", "kind"), MIXED)
def test_unpatching_gives_everything_back(row: str, kind: str) -> None:
    model = make(row)
    before, implementation = snapshot(model), model.config._attn_implementation
    patch(model, kind)
    assert list(model.state_dict()) == list(before.state_dict)
    whole(model, text_for(row, kind))
    if has_cache(model):
        in_pieces(model, text(30), steps(27, 30), CACHES["dynamic"](model, 30))
    assert unpatch_model(model) is model
    assert differences(before, snapshot(model)) == []
    assert model.config._attn_implementation == implementation
    assert record_of(model) is None


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_classes_are_the_same_objects_under_the_patch(kind: str) -> None:
    """Attention forwards and classes are never replaced, and no weight is copied."""
    model = make("llama")
    weights = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    attention = [module for module in model.modules() if hasattr(module, "is_causal")]
    kinds = [type(module) for module in attention]
    patch(model, kind)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == weights
    assert [type(module) for module in attention] == kinds
    assert not any("forward" in vars(module) for module in attention)


@pytest.mark.parametrize("row", ROWS)
def test_models_of_the_same_config_object_and_all_classes_are_left_alone(row: str) -> None:
    kind = "alibi" if row in ("bert", "gpt2") else "self_extend_uneven"
    config = make(row).config if row in ("bert", "gpt2") else tiny_config(row)
    one, other = (auto_class(row).from_config(config, dtype=torch.float32).eval() for _ in range(2))
    words, before, first = described(config), snapshot(other), snapshot(one)
    classes = {each for module in one.modules() for each in type(module).__mro__}
    attributes = {each: dict(vars(each)) for each in classes}
    patch(one, kind)
    expected = whole(one, text_for(row, kind))
    assert differences(before, snapshot(other)) == []
    assert described(config) == words
    assert other.config._attn_implementation == config._attn_implementation == "sdpa"
    assert [each.__name__ for each in classes if dict(vars(each)) != attributes[each]] == []
    other.set_attn_implementation("eager")
    assert torch.equal(whole(one, text_for(row, kind)), expected)
    other.set_attn_implementation("sdpa")
    assert differences(first, snapshot(unpatch_model(one))) == []
    assert differences(before, snapshot(other)) == []


def test_two_models_of_one_config_object_may_have_different_patches() -> None:
    config = tiny_config("llama")
    models = [auto_class("llama").from_config(config, dtype=torch.float32).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    alone = [
        whole(patch(copy.deepcopy(model), kind), text())
        for model, kind in zip(models, ("alibi", "rerope"), strict=True)
    ]
    patch(models[0], "alibi")
    patch(models[1], "rerope")
    for model, expected in zip(models, alone, strict=True):
        assert torch.equal(whole(model, text()), expected)


def test_transformers_functions_are_left_alone() -> None:
    before = {name: ALL_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "flex_attention", "flash_attention_2")}
    patched_model("llama", "alibi")
    assert {name: ALL_ATTENTION_FUNCTIONS[name] for name in before} == before


SAVED = [*FEW, *named([("llama", kind) for kind in ("nope", "rerope", "window")]), *named([("bert", "window")])]


@pytest.mark.parametrize(("row", "kind"), SAVED)
def test_a_saved_model_comes_back_and_plain_transformers_reads_the_original(
    row: str, kind: str, tmp_path: Path
) -> None:
    model, tokens = shared_model(row, kind), text_for(row, kind)
    short = tokens[:, :TRAINED_LENGTH]
    model.save_pretrained(tmp_path)
    written = (tmp_path / "config.json").read_text()
    assert "posext_" not in written
    assert "attn_implementation" not in written
    assert "load_pretrained" in json.loads(written)["posext"]["note"]
    plain = auto_class(row).from_pretrained(tmp_path)
    assert torch.equal(whole(plain, short), whole(shared_unpatched(row), short))
    loaded = load_pretrained(tmp_path, auto_class(row))
    assert record_of(loaded) == record_of(model)
    assert_close(whole(loaded, tokens), whole(model, tokens), 1e-5)
    assert torch.equal(whole(unpatch_model(loaded), short), whole(shared_unpatched(row), short))


def test_a_saved_model_is_silent_and_can_be_loaded_in_half_precision(tmp_path: Path) -> None:
    model = patched_model("llama", "self_extend")
    model.save_pretrained(tmp_path)
    inspect_model(model).to_dict()
    loaded = load_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(whole(loaded, text()), whole(model.bfloat16(), text()))


@pytest.mark.parametrize(("row", "kind"), FEW)
def test_a_record_says_what_was_done(row: str, kind: str) -> None:
    record, (method, options) = record_of(shared_model(row, kind)), KINDS[kind]
    assert (record.method, record.options, record.factor, record.native) == (method, dict(options), FACTOR, None)
    assert (record.trained_length, record.target_length) == (TRAINED_LENGTH, FACTOR * TRAINED_LENGTH)
    assert "plain transformers" in record.note
    json.dumps(record.to_dict())


@pytest.mark.parametrize("kind", ["alibi", "nope", "rerope", "window"])
def test_the_context_manager_takes_the_patch_off_after_an_error(kind: str) -> None:
    model = make("llama")
    before, (method, options) = snapshot(model), KINDS[kind]
    with pytest.raises(ZeroDivisionError), patched(model, method, FACTOR, **options):
        raise ZeroDivisionError
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize("kind", REMAPS)
@pytest.mark.parametrize("row", ["llama", "gpt_neox", "modernbert"])
def test_text_within_the_window_is_read_as_before(row: str, kind: str) -> None:
    window = KINDS[kind][1]["window"]
    for length in (1, window - 1, window):
        found, expected = (whole(model, text(length)) for model in (shared_model(row, kind), shared_unpatched(row)))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("row", ["llama", "qwen3", "gpt_neox", "modernbert"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_that_follows_the_length_leaves_text_up_to_n_as_it_is(row: str, dtype: torch.dtype) -> None:
    """Within N the group is 1, and far keys are met at their true distance: the very bits of the unpatched model."""
    model, unpatched = patch(loaded_in(row, dtype), "self_extend_dynamic"), loaded_in(row, dtype)
    for length in (9, 20, 31, 32):
        assert torch.equal(whole(model, text(length)), whole(unpatched, text(length)))
        if row not in BIDIRECTIONAL:
            sizes = steps(length - 3, length)
            both = [in_pieces(each, text(length), sizes, CACHES["dynamic"](each, 32)) for each in (model, unpatched)]
            assert torch.equal(*both)


@pytest.mark.parametrize("kind", ["window", "window_sinks"])
@pytest.mark.parametrize("row", ["llama", "gemma3", "modernbert", "bert", "gpt2"])
def test_a_window_leaves_text_within_it_as_it_is(row: str, kind: str) -> None:
    for length in (1, 7, 8):
        assert torch.equal(whole(shared_model(row, kind), text(length)), whole(shared_unpatched(row), text(length)))


@pytest.mark.parametrize("kind", WITHOUT_ROTATION[:2])
@pytest.mark.parametrize("row", ["llama", "gpt_neox", "bert", "gpt2"])
def test_without_positions_their_shift_changes_nothing(row: str, kind: str) -> None:
    """Under `nope` nothing depends on positions at all; under `alibi` nothing but distances."""
    model, tokens, places = shared_model(row, kind), text(), torch.arange(48)[None]
    expected = whole(model, tokens)
    assert_close(whole(model, tokens, position_ids=places + 64, attention_mask=torch.ones_like(tokens)), expected)
    if kind == "nope":
        assert torch.equal(
            whole(model, tokens, position_ids=places.flip(1), attention_mask=torch.ones_like(tokens)), expected
        )


def test_without_positions_an_encoder_does_not_see_the_order() -> None:
    model, tokens, order = shared_model("bert", "nope"), text(), torch.randperm(48)
    assert_close(whole(model, tokens[:, order]), whole(model, tokens)[:, order])


@pytest.mark.parametrize("kind", ["alibi", "self_extend", "rerope", "window"])
def test_attention_outside_of_the_registry_is_refused_and_the_model_left_alone(kind: str) -> None:
    model = special_models.falcon()
    before = snapshot(model)
    with pytest.raises(PatchError, match="attention registry"):
        patch(model, kind)
    assert differences(before, snapshot(model)) == []


def test_a_patch_without_effect_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters that do nothing stand for a host that does not ask them."""
    for kind, place in (("self_extend", remapped.Remapped), ("rerope", remapped.Remapped), ("window", biased.Windowed)):
        model = make("llama")
        before = snapshot(model)
        with monkeypatch.context() as patches:
            patches.setattr(place, "attend", lambda self, call: self.reader.of(call)[1].run())
            with pytest.raises(PatchError, match="no effect"):
                patch(model, kind)
        assert differences(before, snapshot(model)) == []


USELESS: list[tuple[str, dict[str, int]]] = [
    ("self_extend", {"group_size": 1}),
    ("self_extend", {"group_size": 4, "window": 10**6}),
    ("rerope", {"window": 10**6}),
    ("window", {"width": 10**6}),
]


@pytest.mark.parametrize(("method", "options"), USELESS)
def test_a_map_that_changes_nothing_is_an_error(method: str, options: dict[str, int]) -> None:
    model = make("llama")
    before = snapshot(model)
    with pytest.raises((PatchError, ValueError), match=r"no effect|group_size|window|width"):
        patch_model(model, method, 4, **options)
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize(("row", "kind"), FEW)
def test_patch_read_inspect_and_unpatch_write_nothing(row: str, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = patched_model(row, kind)
    whole(model, tiny_inputs(20)["input_ids"])
    inspect_model(model)
    unpatch_model(model)
    assert capfd.readouterr() == ("", "")


def test_sliding_layers_are_left_alone_unless_all_are_asked_for() -> None:
    full, every = patched_model("gemma3", "alibi"), patched_model("gemma3", "alibi", layers="all")
    buffers = {name: dict(model.model.rotary_emb.named_buffers()) for name, model in (("full", full), ("all", every))}
    assert torch.equal(buffers["full"]["full_attention_inv_freq"], torch.zeros(8))
    assert buffers["full"]["sliding_attention_inv_freq"].min() > 0
    assert torch.equal(buffers["all"]["sliding_attention_inv_freq"], torch.zeros(8))
    assert not torch.allclose(whole(full, text()), whole(every, text()), atol=1e-3)
    assert [len(record_of(model).sites) for model in (full, every)] == [1, 2]
