"""One test for each public report on methods that act in attention; numbered as the reports are."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_posext
from hf_posext import NoSiteError, list_methods, load_pretrained, patch_model, record_of, unpatch_model
from tests.architectures import tiny_config, tiny_model
from tests.dynamic import CACHES, assert_close, in_pieces, steps, text, whole
from tests.in_attention import auto_class, bert, make
from tests.snapshots import differences, snapshot

N = 32
EVERY = {
    "alibi": {},
    "nope": {},
    "self_extend": {"window": 8, "group_size": 4},
    "rerope": {"window": 8},
    "leaky_rerope": {"window": 8},
    "window": {"width": 8, "sinks": 2},
}
"""Every method that acts in attention, with options for N = 32."""


def stretched(method: str, row: str = "llama", **options: Any) -> Any:
    """A tiny model of a row, patched by 4."""
    return patch_model(make(row), method, 4, **{**EVERY[method], **options})


def generated(model: Any, tokens: Tensor, **options: Any) -> Tensor:
    """The eight new tokens of a greedy generation."""
    options = {"attention_mask": torch.ones_like(tokens), **options}
    out = model.generate(tokens, do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=0, **options)
    return out[:, tokens.shape[1] :]


@torch.no_grad()
def weights(model: Any, tokens: Tensor) -> Tensor:
    """Attention weights of the first layer, [B, H, L, S] float64."""
    model.set_attn_implementation("eager")
    return model(input_ids=tokens, output_attentions=True).attentions[0].double()


def without_queries(model: Any) -> Any:
    """The model with queries of zero, so that weights are what the bias alone makes."""
    for name, parameter in model.named_parameters():
        if ".q_proj." in name or ".self.query." in name:
            parameter.data.zero_()
    return model


@pytest.mark.parametrize("method", EVERY)
def test_report_005_rows_padded_on_the_left_are_generated_as_alone(method: str) -> None:
    model, rows = stretched(method), [text(length, seed=length) for length in (9, 28)]
    batch = torch.cat([torch.nn.functional.pad(row, (28 - row.shape[1], 0)) for row in rows])
    alone = torch.cat([generated(model, row) for row in rows])
    assert torch.equal(generated(model, batch, attention_mask=(batch != 0).long()), alone)


@pytest.mark.parametrize("method", EVERY)
def test_report_009_generation_across_n_is_the_same_with_and_without_a_cache(method: str) -> None:
    model = stretched(method)
    assert torch.equal(generated(model, text(28, 2)), generated(model, text(28, 2), use_cache=False))


@pytest.mark.parametrize("method", ["alibi", "self_extend"])
def test_report_026_a_whole_factor_is_kept_as_a_number_with_a_point(method: str, tmp_path: Path) -> None:
    model = stretched(method)
    model.save_pretrained(tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())["posext"]
    assert (record["factor"], type(record["factor"])) == (4.0, float)
    assert type(record["total_factor"]) is float
    assert record_of(load_pretrained(tmp_path)).factor == 4.0


@pytest.mark.parametrize("method", EVERY)
def test_report_029_positions_of_packed_documents_start_anew(method: str) -> None:
    """The second of two documents in a row is read as if it were alone, at its own distances."""
    model, one, two = stretched(method), text(20), text(44, seed=1)
    places = torch.cat((torch.arange(20), torch.arange(44)))[None]
    found = whole(model, torch.cat((one, two), 1), position_ids=places)
    assert_close(found, torch.cat((whole(model, one), whole(model, two)), 1))


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (8, [2.0**-power for power in range(1, 9)]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [*(2.0**-power for power in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_report_032_slopes_of_head_counts_that_are_no_powers_of_two(heads: int, slopes: list[float]) -> None:
    """Seen from outside: neighbouring weights of a query differ by the slope of their head."""
    model = without_queries(patch_model(bert(num_attention_heads=heads, hidden_size=16 * heads), "alibi", 4))
    seen = weights(model, text(12))[0, :, -1]
    found = seen[:, 1:].log() - seen[:, :-1].log()
    assert_close(found, torch.tensor(slopes).double()[:, None].expand_as(found), 1e-5)


@pytest.mark.parametrize("method", ["alibi", "nope", "self_extend", "rerope"])
def test_report_034_sliding_layers_of_gemma3_are_left_alone(method: str) -> None:
    model = stretched(method, "gemma3")
    assert record_of(model).sites == ["model.rotary_emb[full_attention]"]
    before = tiny_model("gemma3").model.rotary_emb.sliding_attention_inv_freq
    assert torch.equal(model.model.rotary_emb.sliding_attention_inv_freq, before)
    first = []
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: first.append(output))
    unpatched = tiny_model("gemma3")
    other = unpatched.model.layers[0].register_forward_hook(lambda module, args, output: first.append(output))
    whole(model, text())
    whole(unpatched, text())
    handle.remove()
    other.remove()
    assert torch.equal(*(each[0] if isinstance(each, tuple) else each for each in first))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", ["llama", "bert"])
def test_report_057_a_cast_of_the_module_rounds_no_slope(row: str, dtype: torch.dtype) -> None:
    """0.3 is no number of bfloat16: rounded, the bias at distance 40 would be off by 0.05."""
    model = without_queries(patch_model(make(row), "alibi", 4, slopes=[0.3] * 4).to(dtype))
    seen = weights(model, text(44))[0, 0, -1]
    expected = (-0.3 * (43 - torch.arange(44)).double()).softmax(-1)
    assert ((seen / expected - 1).abs()[-20:] < 2 * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("row", ["llama", "bert"])
def test_report_070_alibi_takes_the_old_encoding_out_says_so_and_needs_no_mask(row: str) -> None:
    model, tokens = stretched("alibi", row), text(20)
    shuffled = torch.cat((tokens[:, torch.randperm(19)], tokens[:, 19:]), 1)
    flat = patch_model(make(row), "alibi", 4, slopes=[0.0] * 4)
    assert_close(whole(patch_model(make(row), "nope", 4), tokens), whole(flat, tokens))
    assert not torch.allclose(whole(model, shuffled)[:, -1], whole(model, tokens)[:, -1], atol=1e-2)
    assert_close(whole(model, tokens), whole(model, tokens, attention_mask=torch.ones_like(tokens)))
    info = next(info for info in list_methods(make(row)) if info.name == "alibi")
    assert "tuning" in info.summary


@pytest.mark.parametrize("method", EVERY)
def test_report_073_a_sliding_window_of_the_model_stays(method: str) -> None:
    """Every layer of this Mistral sees eight tokens: what is further back than two layers reach changes nothing."""
    model, tokens = (
        patch_model(tiny_model("mistral_sliding"), method, 4, **{**EVERY[method], **narrower(method)}),
        text(),
    )
    other = tokens.clone()
    other[:, :20] = text(20, seed=1)
    found = [whole(model, each)[:, 20 + 2 * 7 :] for each in (tokens, other)]
    assert_close(*found)
    model.set_attn_implementation("eager")
    assert_close(whole(model, tokens)[:, 20 + 2 * 7 :], found[0])


def narrower(method: str) -> dict[str, int]:
    """Options with which a method acts within eight tokens."""
    if method in ("alibi", "nope"):
        return {}
    return {"width": 4, "sinks": 0} if method == "window" else {"window": 4}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("method", EVERY)
def test_report_075_padding_alone_gives_numbers_in_every_precision(
    method: str, implementation: str, dtype: torch.dtype
) -> None:
    """Biases are not added to the lowest number, which would be minus infinity and then not a number."""
    model, tokens = stretched(method).to(dtype), text(60, batch=2)
    model.set_attn_implementation(implementation)
    mask = torch.ones_like(tokens)
    mask[0], mask[1, :40] = 0, 0
    found = whole(model, tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert torch.isfinite(found).all()
    model.train().zero_grad()
    model(input_ids=tokens, attention_mask=mask, use_cache=False).logits.float().square().mean().backward()
    assert all(torch.isfinite(each.grad).all() for each in model.parameters() if each.grad is not None)


def test_report_094_the_first_slope_of_eight_heads_is_a_half() -> None:
    found = hf_posext.methods.get_method("alibi").functions["learned"](None, 1.0).slopes(8)
    assert (float(found[0]), float(found[-1])) == (0.5, 0.00390625)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("row", ["llama", "gemma3"])
def test_report_095_the_bias_of_a_cached_step_counts_from_the_position_of_the_query(row: str, cache: str) -> None:
    model = stretched("alibi", row)
    found = in_pieces(model, text(), steps(37, 48), CACHES[cache](model, 48))
    assert_close(found, whole(model, text()))


@pytest.mark.parametrize("method", EVERY)
def test_report_098_a_model_that_slides_in_every_layer_is_not_refused(method: str) -> None:
    model = tiny_model("mistral_sliding")
    before = snapshot(model)
    patch_model(model, method, 4, **{**EVERY[method], **narrower(method)})
    assert torch.isfinite(whole(model, text())).all()
    assert differences(before, snapshot(unpatch_model(model))) == []


@pytest.mark.parametrize("row", ["llama", "bert"])
def test_report_104_near_keys_stay_exact_in_half_precision_far_into_a_text(row: str) -> None:
    """Built from absolute places in bfloat16, the biases of neighbours at 600 would be equal."""
    model = without_queries(patch_model(make(row), "alibi", 32, slopes=[0.25] * 4).bfloat16())
    seen = weights(model, text(600))[0, 0, 599, -6:]
    steps_down = (seen[1:].log() - seen[:-1].log()) - 0.25
    assert steps_down.abs().max() < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.transformers_logs("older releases remark on float32 for flash attention, which is only named here")
@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_report_116_flash_attention_gives_way_to_sdpa_with_a_notice(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make("llama")
    model.config._attn_implementation_internal = name
    with caplog.at_level(logging.WARNING, "hf_posext.attention.interface"):
        patch_model(model, "alibi", 4)
        found = whole(model, text())
    assert [f"`{name}`" in line.getMessage() for line in caplog.records if line.name.startswith("hf_posext")] == [True]
    assert_close(found, whole(stretched("alibi"), text()))
    assert unpatch_model(model).config._attn_implementation == name


@pytest.mark.parametrize("method", ["self_extend", "rerope", "leaky_rerope", "yarn", "ntk"])
def test_report_117_methods_of_rotation_are_refused_for_a_learned_table_with_those_that_apply(method: str) -> None:
    model = make("bert")
    before = snapshot(model)
    with pytest.raises(NoSiteError, match=r"learned.*`alibi`.*`nope`"):
        patch_model(model, method, 4)
    assert differences(before, snapshot(model)) == []


def test_report_124_slopes_are_those_of_all_heads_of_the_layer() -> None:
    """A rank that holds four of eight heads has to take its slice of the eight slopes, not four of its own."""
    settings = {**tiny_config("llama").to_dict(), "num_attention_heads": 8, "num_key_value_heads": 4}
    model = auto_class("llama").from_config(type(tiny_config("llama"))(**settings), dtype=torch.float32).eval()
    seen = weights(without_queries(patch_model(model, "alibi", 4)), text(12))[0, :, -1]
    found = (seen[:, 1:].log() - seen[:, :-1].log()).mean(-1)
    assert_close(found, 2.0 ** -torch.arange(1, 9).double(), 1e-5)
    half = hf_posext.methods.get_method("alibi").functions["rotary"](None, 1.0, slopes=found[4:].tolist())
    assert_close(half.slopes(4), found[4:], 1e-12)
