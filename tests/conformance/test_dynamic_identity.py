"""A factor that follows the length: what short text gives, what scale each token has, and what lives through what."""

import copy
import functools
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, DynamicCache

from hf_posext import PatchError, load_pretrained, patch_model, record_of, unpatch_model
from tests.architectures import ARCHITECTURE, TRAINED_LENGTH, tiny_config, tiny_model
from tests.dynamic import (
    BROAD_PAIRS,
    CORE,
    CORE_CASES,
    KINDS,
    LENGTH,
    MIXED_CASES,
    OTHER_PAIRS,
    PREFILL,
    REFUSED,
    SWITCHED_AT_N,
    assert_close,
    dynamic_model,
    has_cache,
    in_pieces,
    named,
    options_of,
    padded,
    patch_dynamic,
    shared_model,
    shared_unpatched,
    short_list,
    short_reach,
    steps,
    text,
    whole,
)
from tests.methods import frequencies_of, ramp
from tests.snapshots import differences, snapshot
from tests.special_models import build, falcon

LONG = 80
"""Tokens of the texts in which the scale of each token is looked at: beyond 2 N, where it goes in steps of 2 tokens."""


def ones(row: str, kind: str) -> dict[str, Any]:
    """Options that make a kind with a list for short text leave short text as it is."""
    return {"short_factor": [1.0] * frequencies_of(ARCHITECTURE[row])} if kind == SWITCHED_AT_N else {}


def read_short(model: Any, reach: int) -> list[Tensor]:
    """Logits of texts of 1, 20 and N tokens, and of one that is read token by token up to N."""
    found = [whole(model, text(length)) for length in (1, PREFILL, reach)]
    if has_cache(model):
        found.append(in_pieces(model, text(reach), steps(reach - 4, reach), DynamicCache(config=model.config)))
    return found


@functools.cache
def short_unpatched(row: str, reach: int, dtype: torch.dtype = torch.float32, attention: str = "") -> list[Tensor]:
    """What an unpatched model gives for short text."""
    model = tiny_model(row).to(dtype)
    if attention:
        model.set_attn_implementation(attention)
    return read_short(model, reach)


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """The same to the last bit, and not for want of numbers."""
    for one, other in zip(found, expected, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)


IN_BOTH_DTYPES = [
    *(pytest.param(*case.values, torch.float32, id=f"{case.id}-float32") for case in CORE_CASES),
    *(pytest.param(*case.values, torch.bfloat16, id=f"{case.id}-bfloat16") for case in MIXED_CASES),
]


@pytest.mark.parametrize(("row", "kind", "dtype"), IN_BOTH_DTYPES)
def test_short_text_is_read_as_before_to_the_last_bit(row: str, kind: str, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and kind != SWITCHED_AT_N:
        model = copy.deepcopy(shared_model(row, kind))
    else:
        model = patch_dynamic(tiny_model(row).to(dtype), row, kind, **ones(row, kind))
    for attention in ("sdpa", "eager") if (row, kind) in BROAD_PAIRS else ("sdpa",):
        model.set_attn_implementation(attention)
        assert_equal(read_short(model, TRAINED_LENGTH), short_unpatched(row, TRAINED_LENGTH, dtype, attention))


@pytest.mark.parametrize(("row", "kind"), named(OTHER_PAIRS))
def test_short_text_is_read_as_before_on_every_other_row(row: str, kind: str) -> None:
    model = shared_model(row, kind)
    reach = short_reach(row, model)
    assert_equal(read_short(model, reach), short_unpatched(row, reach, model.dtype))


@pytest.mark.parametrize("row", CORE)
def test_a_list_for_short_text_is_that_of_a_fixed_patch_up_to_n(row: str) -> None:
    short = short_list(frequencies_of(ARCHITECTURE[row]))
    fixed = patch_model(tiny_model(row), "longrope", 4, long_factor=short, attention_factor=1.0)
    assert_equal(read_short(shared_model(row, SWITCHED_AT_N), 32), read_short(fixed, 32))


@pytest.mark.parametrize(("row", "kind"), [*MIXED_CASES, *named(("modernbert", kind) for kind in ("pi", "yarn"))])
def test_factor_1_changes_no_bit_at_any_length(row: str, kind: str) -> None:
    model, unpatched = dynamic_model(row, kind, factor=1), shared_unpatched(row)
    assert torch.equal(whole(model, text(LONG)), whole(unpatched, text(LONG)))
    if has_cache(model):
        both = [in_pieces(each, text(40), steps(30, 40), DynamicCache()) for each in (model, unpatched)]
        assert torch.equal(*both)


@pytest.mark.parametrize(("row", "kind"), MIXED_CASES[::2])
def test_what_was_read_before_leaves_no_trace(row: str, kind: str) -> None:
    unused = dynamic_model(row, kind)
    model = copy.deepcopy(unused)
    for length in (32, 33, 64, 48, 20):
        fresh, sizes = copy.deepcopy(unused), steps(length - 3, length)
        assert torch.equal(whole(model, text(length)), whole(fresh, text(length)))
        assert torch.equal(*(in_pieces(each, text(length), sizes, DynamicCache()) for each in (model, fresh)))


def one_layer(row: str, **settings: Any) -> Any:
    """The model of a row with a single layer, of full attention, so that no hidden state depends on other tokens."""
    family = ARCHITECTURE[row]
    kinds = {"layer_types": ["full_attention"]} if "layer_types" in family.settings else {}
    changed = copy.deepcopy({**family.settings, "num_hidden_layers": 1, **kinds, **settings})
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **changed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def scale_at(place: int, limit: float = math.inf) -> float:
    """s of the token at a place, from the length up to it: exact up to 2 N, then rounded up to even lengths."""
    length = place + 1 if place < 2 * TRAINED_LENGTH else 2 * math.ceil((place + 1) / 2)
    return min(max(1.0, length / TRAINED_LENGTH), limit)


PLACES = (31, 32, 63, 64, 79)
BY_SCALE = [case for case in CORE_CASES if case.values[1] not in ("dynamic_ntk", SWITCHED_AT_N, "pi_all")]


@pytest.mark.transformers_logs("older releases complain about a Gemma-3 without sliding layers")
@pytest.mark.parametrize(("row", "kind"), BY_SCALE)
def test_each_token_is_read_at_the_scale_of_the_text_up_to_it(row: str, kind: str) -> None:
    """A fixed patch with that very scale is the measure; a list has a temperature that follows the limit: it is set."""
    options = {**options_of(row, kind), **({"attention_factor": 1.1} if kind == "longrope" else {})}
    is_broad = (row, kind) in BROAD_PAIRS
    method, factors = KINDS[kind][0], {4: PLACES if is_broad else (78,), 2: (79,) if is_broad else ()}
    for factor, places in factors.items():
        found = whole(patch_model(one_layer(row), method, factor, dynamic=True, **options), text(LONG))
        for place in places:
            scale = scale_at(place, factor)
            model = one_layer(row) if scale == 1 else patch_model(one_layer(row), method, scale, **options)
            assert_close(found[:, place], whole(model, text(LONG))[:, place])


ENDS = (20, 31, 32, 33, 50, 63, 65, 79)


@pytest.mark.parametrize("row", ["llama", "gpt_neox", "qwen3"])
def test_dynamic_ntk_reads_the_last_token_as_transformers_does(row: str) -> None:
    given = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    parameters = {**ARCHITECTURE[row].settings.get("rope_parameters", {}), **given}
    found = whole(patch_model(one_layer(row), "dynamic_ntk", 4), text(LONG))
    for place in ENDS:
        theirs = one_layer(row, rope_parameters=parameters)
        assert_close(found[:, place], whole(theirs, text(LONG)[:, : place + 1])[:, -1])


@pytest.mark.parametrize("row", ["llama", "gpt_neox", "qwen3", "phi3"])
def test_two_lists_read_the_last_token_as_transformers_does(row: str) -> None:
    count = frequencies_of(ARCHITECTURE[row])
    lists = {"short_factor": short_list(count), "long_factor": ramp(count), "attention_factor": 1.0}
    given = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32, "factor": 4.0}
    parameters = {**ARCHITECTURE[row].settings.get("rope_parameters", {}), **given, **lists}
    found = whole(patch_model(one_layer(row), "longrope", 4, **lists), text(LONG))
    for place in ENDS:
        theirs = one_layer(row, rope_parameters=parameters, max_position_embeddings=128)
        assert_close(found[:, place], whole(theirs, text(LONG)[:, : place + 1])[:, -1])


@pytest.mark.parametrize("kind", ["pi", "ntk", "yarn", "llama3"])
def test_an_encoder_reads_a_text_at_the_scale_of_its_length(kind: str) -> None:
    model = shared_model("modernbert", kind)
    batch = padded([text(length, seed=length)[0] for length in (20, 48)], "right")
    found = whole(model, batch["input_ids"], attention_mask=batch["attention_mask"])
    fixed = patch_model(tiny_model("modernbert"), KINDS[kind][0], 48 / TRAINED_LENGTH)
    assert_close(found[1:], whole(fixed, batch["input_ids"][1:]))
    assert_close(found[:1, :20], whole(shared_unpatched("modernbert"), batch["input_ids"][:1, :20]))


@pytest.mark.parametrize(("row", "kind"), [*MIXED_CASES, *named(pair for pair in OTHER_PAIRS if pair[1] == "pi")])
def test_unpatching_gives_everything_back(row: str, kind: str) -> None:
    model = tiny_model(row)
    before, implementation = snapshot(model), model.config._attn_implementation
    patch_dynamic(model, row, kind)
    reach = short_reach(row, model)
    if has_cache(model):
        in_pieces(model, text(reach + 4), steps(reach + 1, reach + 4), DynamicCache(config=model.config))
    whole(model, text(reach + 4))
    assert list(model.state_dict()) == list(before.state_dict)
    unpatch_model(model)
    assert differences(before, snapshot(model)) == []
    assert model.config._attn_implementation == implementation


LOADED_TOO = ("qwen2_vl", "deepseek_v3", "gptj", "modernbert", "llama_yarn", "deepseek_v3_yarn")


@pytest.mark.parametrize(
    ("row", "kind"), [*MIXED_CASES[::2], *named((row, "pi") for row in LOADED_TOO if row not in REFUSED)]
)
def test_a_saved_model_comes_back(row: str, kind: str, tmp_path: Path) -> None:
    model, auto_class = shared_model(row, kind), getattr(transformers, ARCHITECTURE[row].auto_class)
    tokens = text(record_of(model).trained_length + 16)
    model.save_pretrained(tmp_path)
    written = (tmp_path / "config.json").read_text()
    assert "posext_" not in written
    assert "attn_implementation" not in written
    loaded = load_pretrained(tmp_path, auto_class)
    assert record_of(loaded) == record_of(model)
    assert torch.equal(whole(loaded, tokens), whole(model, tokens))
    expected = whole(shared_unpatched(row), tokens[:, :TRAINED_LENGTH])
    assert torch.equal(whole(unpatch_model(loaded), tokens[:, :TRAINED_LENGTH]), expected)


def through_torch(model: Any) -> Any:
    """A copy by way of `torch.save` of the whole model."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_torch])
@pytest.mark.parametrize(("row", "kind"), [*MIXED_CASES[::2], *named([("modernbert", "pi"), ("qwen2_vl", "pi")])])
def test_a_copy_is_patched_and_goes_its_own_way(row: str, kind: str, duplicate: Callable[[Any], Any]) -> None:
    model = dynamic_model(row, kind)
    expected = whole(model, text())
    copied = duplicate(model)
    assert torch.equal(whole(copied, text()), expected)
    unpatch_model(model)
    assert torch.equal(whole(copied, text()), expected)
    if has_cache(copied):
        assert_close(in_pieces(copied, text(), steps(30), DynamicCache()), expected)
    assert torch.equal(whole(unpatch_model(copied), text(32)), whole(shared_unpatched(row), text(32)))


def loaded_in_bfloat16(row: str) -> Any:
    """The unpatched model as `from_pretrained(dtype=...)` gives it: weights rounded, frequencies not."""
    auto_class = getattr(transformers, ARCHITECTURE[row].auto_class)
    model = auto_class.from_config(tiny_config(row), dtype=torch.bfloat16).eval()
    model.load_state_dict(tiny_model(row).state_dict())
    return model


@pytest.mark.parametrize(("row", "kind"), MIXED_CASES[::2])
def test_a_cast_rounds_no_frequency_of_a_patch(row: str, kind: str) -> None:
    changes = {"layers": "all"}  # those of layers that a patch leaves alone are rounded as without it
    cast, loaded = dynamic_model(row, kind, **changes), patch_dynamic(loaded_in_bfloat16(row), row, kind, **changes)
    assert torch.equal(whole(cast.bfloat16(), text()), whole(loaded, text()))


@pytest.mark.parametrize(("row", "kind"), MIXED_CASES[::3])
def test_an_adapter_may_come_before_or_after(row: str, kind: str) -> None:
    after = wrapped(dynamic_model(row, kind))
    before = patch_dynamic(wrapped(tiny_model(row)), row, kind)
    expected = whole(before, text())
    assert torch.equal(whole(after, text()), expected)
    assert not torch.allclose(expected, whole(shared_model(row, kind), text()), atol=0.1)
    assert_close(in_pieces(after.base_model.model, text(), steps(30), DynamicCache()), expected)
    torch.manual_seed(0)
    plain = whole(wrapped(tiny_model(row)), text())
    assert torch.equal(whole(unpatch_model(before), text()), plain)


def wrapped(model: Any) -> Any:
    """The model under an adapter that is not the identity."""
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear")).eval()


@pytest.mark.parametrize("row", [*CORE, "modernbert", "qwen2_vl"])
def test_another_model_of_the_same_config_is_left_alone(row: str) -> None:
    config, auto_class = tiny_config(row), getattr(transformers, ARCHITECTURE[row].auto_class)
    torch.manual_seed(0)
    one, other = (auto_class.from_config(config, dtype=torch.float32).eval() for _ in range(2))
    before, unpatched = snapshot(other), snapshot(one)
    implementation = other.config._attn_implementation
    patch_model(one, "yarn", 4, dynamic=True)
    expected = whole(one, text())
    assert differences(before, snapshot(other)) == []
    assert other.config._attn_implementation == config._attn_implementation == implementation
    other.set_attn_implementation("eager")
    assert torch.equal(whole(one, text()), expected)
    other.set_attn_implementation(implementation)
    assert differences(unpatched, snapshot(unpatch_model(one))) == []
    assert differences(before, snapshot(other)) == []


@pytest.mark.parametrize("row", [*CORE, "modernbert", "qwen2_vl", "deepseek_v3"])
def test_another_attention_implementation_keeps_the_scaling(row: str) -> None:
    model, tokens = dynamic_model(row, "pi"), text()
    expected = whole(model, tokens)
    model.set_attn_implementation("eager")
    assert_close(whole(model, tokens), expected)
    if has_cache(model):
        assert_close(in_pieces(model, tokens, steps(30), DynamicCache()), expected)
    weights = model(input_ids=tokens, output_attentions=True).attentions[-1]
    assert weights.shape[-2:] == (LENGTH, LENGTH)
    assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    model.set_attn_implementation("sdpa")
    assert torch.equal(whole(model, tokens), expected)
    model.set_attn_implementation("eager")
    unpatch_model(model)
    assert model.config._attn_implementation == "eager"
    assert_close(whole(model, tokens), whole(shared_unpatched(row), tokens))


def neox_japanese() -> Any:
    """GPT-NeoX-Japanese."""
    settings = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"bos_token_id": 1, "eos_token_id": 2}
    return build("AutoModelForCausalLM", "gpt_neox_japanese", {**settings, "max_position_embeddings": TRAINED_LENGTH})


ELSEWHERE: dict[str, Callable[[], Any]] = {
    **{row: functools.partial(tiny_model, row) for row in REFUSED},
    "falcon": falcon,
    "gpt_neox_japanese": neox_japanese,
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_attention_that_is_not_in_the_registry_is_refused(name: str) -> None:
    model = ELSEWHERE[name]()
    before = snapshot(model)
    with pytest.raises(PatchError, match="attention registry"):
        patch_model(model, "pi", 4, dynamic=True)
    assert differences(before, snapshot(model)) == []
