"""One test for each public report on factors that follow the length of the text; numbered as the reports are."""

import inspect

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_posext
from hf_posext.methods import REGISTRY
from tests.architectures import tiny_config, tiny_inputs, tiny_model
from tests.methods import IN_ATTENTION, ON_TABLES

N = 32
ONES, RAMP = [1.0] * 8, [1.0 + channel / 2 for channel in range(8)]
METHODS = {
    "pi": {},
    "ntk": {},
    "ntk_by_parts": {},
    "yarn": {},
    "llama3": {},
    "abf": {"rope_theta": 2_000_000.0},
    "dynamic_ntk": {},
    "longrope": {"short_factor": ONES, "long_factor": RAMP},
}
"""Every method of the package with the options that a model with 8 frequencies needs."""


def stretched(method: str, row: str = "llama", factor: float = 4):
    return hf_posext.patch_model(tiny_model(row), method, factor, dynamic=True, **METHODS[method])


def tokens(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    return tiny_inputs(length, batch=batch, seed=seed)["input_ids"]


def logits(model, ids: Tensor, **inputs) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **inputs).logits


def cache_name(model) -> str:
    """The keyword of the cache, which transformers has renamed."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def generated(model, ids: Tensor, count: int, **options) -> Tensor:
    """The `count` new tokens of a greedy generation, [B, count]."""
    options = {"attention_mask": torch.ones_like(ids), "use_cache": True, **options}
    out = model.generate(ids, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0, **options)
    return out[:, ids.shape[1] :]


def one_layer():
    """A Llama in which a token's logits depend on nothing but how it reads the others itself."""
    config = tiny_config("llama")
    config.num_hidden_layers = 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def read_by_transformers(ids: Tensor, rope: dict | None) -> Tensor:
    """Logits of the last token where the frequencies are what transformers computes for just this length."""
    model = one_layer()
    if rope is not None:
        settings = {"max_position_embeddings": N, **rope.pop("settings", {})}
        config = LlamaConfig(head_dim=16, rope_parameters={"rope_theta": 1e4, **rope}, **settings)
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=ids.shape[1])
        model.model.rotary_emb.inv_freq.copy_(inv_freq)
        model.model.rotary_emb.attention_scaling = scaling
    return logits(model, ids)[:, -1]


@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "longrope"])
@pytest.mark.parametrize(("lengths", "count"), [((5, 9), 6), ((24, 31), 16)])
def test_report_005_rows_padded_on_the_left_are_generated_as_alone(
    method: str, lengths: tuple[int, int], count: int
) -> None:
    model = stretched(method)
    rows = [tokens(length, seed=length) for length in lengths]
    alone = [generated(model, row, count) for row in rows]
    width = max(lengths)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    assert torch.equal(generated(model, ids, count, attention_mask=(ids != 0).long()), torch.cat(alone))


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "longrope"])
def test_report_005_a_row_padded_on_the_left_is_read_as_alone(method: str, with_ids: bool) -> None:
    model = stretched(method)
    row = tokens(40, seed=1)
    ids = torch.cat((torch.nn.functional.pad(row, (20, 0)), tokens(60, seed=2)))
    mask = (ids != 0).long()
    inputs = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if with_ids else {}
    torch.testing.assert_close(
        logits(model, ids, attention_mask=mask, **inputs)[:1, 20:], logits(model, row), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("method", ["pi", "yarn", "dynamic_ntk", "longrope"])
def test_report_009_generation_across_n_is_the_same_with_and_without_a_cache(method: str) -> None:
    model, ids = stretched(method), tokens(26, batch=2)
    assert torch.equal(generated(model, ids, 16), generated(model, ids, 16, use_cache=False))


@pytest.mark.parametrize(("row", "method"), [("gemma3", "yarn"), *(("llama", method) for method in METHODS)])
def test_report_010_a_long_text_leaves_no_trace_on_a_short_one(row: str, method: str) -> None:
    model = stretched(method, row)
    short, long, between = tokens(20), tokens(100), tokens(48)
    first = logits(model, short), logits(model, between)
    logits(model, long)
    generated(model, tokens(30), 6)
    again = logits(model, short), logits(model, between)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


@pytest.mark.parametrize("row", ["llama", "phi3"])
def test_report_012_the_switch_of_longrope_does_not_break_cached_keys(row: str) -> None:
    """Phi-3 drops its cache at this length by itself in transformers; both ways must agree."""
    model, ids = stretched("longrope", row), tokens(28, batch=2)
    assert torch.equal(generated(model, ids, 12), generated(model, ids, 12, use_cache=False))
    cache = DynamicCache(config=model.config)
    whole = logits(model, ids := tokens(40), use_cache=False)
    steps = [logits(model, ids[:, :30], **{cache_name(model): cache})]
    steps += [logits(model, ids[:, place : place + 1], **{cache_name(model): cache}) for place in range(30, 40)]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("method", ["yarn", "dynamic_ntk", "longrope"])
@pytest.mark.parametrize("length", [24, 40])
def test_report_029_documents_in_one_row_are_read_as_alone(length: int, method: str, with_mask: bool) -> None:
    """The length is that of each document and not of the pack: two of 24 tokens are short text."""
    model, document = stretched(method), tokens(length)
    same = torch.block_diag(*[torch.ones(length, length)] * 2).bool().tril()
    mask = {"attention_mask": same[None, None]} if with_mask else {}
    places = torch.arange(length).repeat(2)[None]
    pack = logits(model, document.repeat(1, 2), position_ids=places, use_cache=False, **mask)
    alone = logits(model, document)
    torch.testing.assert_close(pack[:, :length], alone, rtol=0, atol=1e-4)
    torch.testing.assert_close(pack[:, length:], alone, rtol=0, atol=1e-4)
    if length <= N:
        assert torch.equal(alone, logits(tiny_model("llama"), document))


@pytest.mark.parametrize("dynamic", [False, True])
def test_report_029_positions_with_a_gap_are_honoured_from_the_cache_too(dynamic: bool) -> None:
    model = hf_posext.patch_model(tiny_model("llama"), "yarn", 4, dynamic=dynamic)
    ids, places = tokens(30), torch.cat((torch.arange(10), torch.arange(50, 70)))[None]
    whole = logits(model, ids, position_ids=places, attention_mask=torch.ones_like(ids))
    cache = {cache_name(model): DynamicCache(config=model.config)}
    steps = [
        logits(
            model,
            ids[:, begin:end],
            position_ids=places[:, begin:end],
            attention_mask=torch.ones(1, end, dtype=torch.int64),
            **cache,
        )
        for begin, end in [(0, 20), *zip(range(20, 30), range(21, 31), strict=True)]
    ]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("row", "method"), [("gpt_neox", "yarn"), ("gpt_neox", "longrope"), *(("llama", method) for method in METHODS)]
)
def test_report_043_factor_1_changes_no_bit_and_short_text_never_pays(row: str, method: str) -> None:
    assert {*METHODS, *IN_ATTENTION, *ON_TABLES} == set(REGISTRY)
    options = dict(METHODS[method])
    if row == "gpt_neox" and method == "longrope":
        options = {"short_factor": ONES[:2], "long_factor": RAMP[:2]}
    plain, model = tiny_model(row), tiny_model(row)
    hf_posext.patch_model(model, method, 1, dynamic=True, **options)
    assert torch.equal(logits(model, tokens(90)), logits(plain, tokens(90)))
    hf_posext.unpatch_model(model)
    hf_posext.patch_model(model, method, 4, dynamic=True, **options)
    assert torch.equal(logits(model, tokens(N)), logits(plain, tokens(N)))
    assert not torch.equal(logits(model, tokens(N + 1))[:, -1], logits(plain, tokens(N + 1))[:, -1])


@pytest.mark.parametrize("length", [N - 1, N, N + 1])
def test_report_048_text_of_n_tokens_is_short_and_one_more_is_long(length: int) -> None:
    ids = tokens(length)
    settings = {"max_position_embeddings": 4 * N}
    longrope = {"factor": 4.0, "original_max_position_embeddings": N, "short_factor": RAMP[::-1], "long_factor": RAMP}
    if length <= N:  # there the temperature is 1, see `methods.longrope`
        longrope["attention_factor"] = 1.0
    model = hf_posext.patch_model(one_layer(), "longrope", 4, short_factor=RAMP[::-1], long_factor=RAMP)
    expected = read_by_transformers(ids, {"rope_type": "longrope", "settings": settings, **longrope})
    torch.testing.assert_close(logits(model, ids)[:, -1], expected, rtol=0, atol=1e-4)
    model = hf_posext.patch_model(one_layer(), "dynamic_ntk", 4)
    expected = read_by_transformers(ids, {"rope_type": "dynamic", "factor": 4.0} if length > N else None)
    torch.testing.assert_close(logits(model, ids)[:, -1], expected, rtol=0, atol=1e-4 if length > N else 0)


@pytest.mark.parametrize("method", ["dynamic_ntk", "ntk"])
def test_report_071_the_base_follows_the_length_and_is_not_one_for_all(method: str) -> None:
    """At 64 tokens 1e4 * 3^(16/14) with factor 2, where the paper's own form has 1e4 * 2^(16/14)."""
    model = hf_posext.patch_model(one_layer(), method, 2, dynamic=True)
    ids = tokens(64)
    found = logits(model, ids)
    for length in (32, 40, 48, 56, 64):
        ratio = 2 * length / N - 1 if method == "dynamic_ntk" else length / N
        plain = one_layer()
        base = 1e4 * ratio ** (16 / 14)
        plain.model.rotary_emb.inv_freq.copy_(base ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16))
        expected = logits(plain, ids[:, :length])[:, -1]
        torch.testing.assert_close(found[:, length - 1], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("row", ["llama", "phi3"])
@pytest.mark.parametrize("length", [5, N - 1, N])
def test_report_091_a_short_prompt_has_the_short_list_whatever_the_capacity(row: str, length: int) -> None:
    model = hf_posext.patch_model(tiny_model(row), "longrope", 64, short_factor=ONES, long_factor=RAMP)
    assert torch.equal(logits(model, tokens(length)), logits(tiny_model(row), tokens(length)))


@pytest.mark.parametrize("method", ["ntk", "dynamic_ntk"])
def test_report_097_the_fastest_channel_turns_by_the_position_itself(method: str) -> None:
    """Positions are not divided as well: what reaches attention at position p is turned by p in channel 0."""
    model = hf_posext.patch_model(one_layer(), method, 2, dynamic=True)
    seen = {}

    def watched(module, query, key, value, attention_mask=None, **options):
        seen["query"], seen["key"] = query, key
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)

    attention = model.model.layers[0].self_attn
    cache = {cache_name(model): DynamicCache(config=model.config)}
    ids, made = tokens(60), []
    hook = attention.k_proj.register_forward_hook(lambda module, args, output: made.append(output))
    logits(model, ids[:, :59], **cache)
    ALL_ATTENTION_FUNCTIONS.register("unit_watched", watched)
    try:
        model.set_attn_implementation("unit_watched")
        logits(model, ids[:, 59:], **cache)
    finally:
        hook.remove()
        for name in ("unit_watched", "posext_unit_watched"):
            ALL_ATTENTION_FUNCTIONS._global_mapping.pop(name, None)
    still = torch.cat(made, dim=1).view(1, 60, 2, 16).transpose(1, 2).double()
    turned = seen["key"].double()
    turns = torch.complex(turned[..., 0], turned[..., 8]) / torch.complex(still[..., 0], still[..., 8])
    expected = torch.polar(torch.ones(60, dtype=torch.float64), torch.arange(60, dtype=torch.float64))
    torch.testing.assert_close(turns, expected.expand_as(turns), rtol=0, atol=1e-4)
    slowest = torch.complex(turned[..., 7], turned[..., 15]) / torch.complex(still[..., 7], still[..., 15])
    s = 60 / N
    slow = 1e4 ** (-14 / 16) / (s if method == "ntk" else 2 * s - 1)
    expected = torch.polar(torch.ones(60, dtype=torch.float64), slow * torch.arange(60, dtype=torch.float64))
    torch.testing.assert_close(slowest, expected.expand_as(slowest), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("row", "method"), [("gemma3", "yarn"), *(("llama", method) for method in METHODS)])
def test_report_118_forwards_add_and_change_no_buffers(row: str, method: str) -> None:
    model = stretched(method, row)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for length in (8, N, 2 * N):
        logits(model, tokens(length))
        generated(model, tokens(length), 2)
        now = dict(model.named_buffers())
        assert list(now) == list(before)
        assert all(torch.equal(now[name], before[name]) for name in before)


def test_report_119_the_length_that_is_given_wins_and_at_n_the_scale_is_1() -> None:
    model = hf_posext.patch_model(one_layer(), "dynamic_ntk", 2, original_max_position_embeddings=16)
    ids = tokens(24)
    assert torch.equal(logits(model, ids[:, :16]), logits(one_layer(), ids[:, :16]))
    rope = {"rope_type": "dynamic", "factor": 2.0, "settings": {"max_position_embeddings": 16}}
    expected = read_by_transformers(ids, rope)
    torch.testing.assert_close(logits(model, ids)[:, -1], expected, rtol=0, atol=1e-4)
