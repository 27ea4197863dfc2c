"""Gated adapters with caches, in training, in copies, on disk, under the compiler and in evaluations."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import DynamicCache

from hf_posext import PatchError, patch_model, perplexity
from hf_posext.gating import gate_adapter, is_gated, ungate_adapter
from tests import tables
from tests.architectures import tiny_model
from tests.copies import through_pickle, through_torch_save
from tests.dynamic import CACHES, assert_close, greedy, padded, pieces, steps, text
from tests.gated import ADAPTERS, CASES, CAUSAL, adapted, gated, in_pieces, no_cache, read
from tests.mechanisms import alibi_models

LONG = 48
IN_TRAINING = ["lora", "dora", "whole", "tokens", "embedding", "head", "head_lora"]
ROWS = [*((row, "whole") for row in CAUSAL), ("llama", "dora"), ("llama", "head"), ("gpt_neox", "head_lora")]


@pytest.mark.parametrize(("row", "adapter"), ROWS)
@pytest.mark.parametrize("sizes", ["steps", "pieces", "fours"])
def test_decoding_across_n_equals_one_pass(row: str, adapter: str, sizes: str) -> None:
    """Pieces of four tokens, as many as some models have heads, also go through the middle of a piece."""
    model, n = gated(CASES[row], adapter), CASES[row].trained_length
    begin = n - 2
    sizes_of = {"steps": steps(begin, LONG), "pieces": pieces(LONG, 7), "fours": [begin, *pieces(LONG - begin, 4)]}
    found, expected = in_pieces(model, text(LONG, 2), sizes_of[sizes], DynamicCache()), read(model, text(LONG, 2))
    size = expected.std().clamp(min=1)  # a random head makes logits of any size
    assert_close(found / size, expected / size, 1e-4)


@pytest.mark.parametrize("row", ["llama", "gemma3"])
def test_decoding_with_a_static_cache_equals_one_pass(row: str) -> None:
    model = gated(CASES[row], "whole")
    found = in_pieces(model, text(LONG), steps(30, LONG), CACHES["static"](model, LONG))
    assert_close(found, read(model, text(LONG)), 1e-4)


@pytest.mark.parametrize("row", CAUSAL)
def test_short_text_is_decoded_as_by_the_original_to_the_last_bit(row: str) -> None:
    case = CASES[row]
    tokens, sizes = text(case.trained_length, 2), steps(9, case.trained_length)
    found = in_pieces(gated(case, "whole"), tokens, sizes, DynamicCache())
    assert torch.equal(found, in_pieces(case.make(), tokens, sizes, DynamicCache()))


@pytest.mark.parametrize(("row", "adapter"), ROWS)
def test_generation_across_n_is_that_of_passes_without_a_cache(row: str, adapter: str) -> None:
    model, prompt = gated(CASES[row], adapter), text(CASES[row].trained_length - 3, seed=4)
    found = model.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8, min_new_tokens=8
    )
    assert torch.equal(found, greedy(model, prompt, 8))


def test_rows_padded_on_the_left_are_continued_as_alone() -> None:
    model, rows = gated(CASES["llama"], "head"), [text(20)[0], text(29, seed=1)[0], text(40, seed=2)[0]]
    batch = padded(rows, "left")
    found = model.generate(**batch, do_sample=False, max_new_tokens=6, min_new_tokens=6)[:, -6:]
    assert torch.equal(found, torch.cat([greedy(model, row[None], 6)[:, -6:] for row in rows]))


@torch.no_grad()
@pytest.mark.parametrize("kept", [1, 5, torch.tensor([3, 31, 32, 40]), torch.tensor([31, 32])], ids=str)
@pytest.mark.parametrize("adapter", ["head", "head_lora"])
def test_a_head_that_is_asked_for_some_tokens_gives_those_of_all(adapter: str, kept: Any) -> None:
    model = gated(CASES["llama"], adapter)
    everything = read(model, text(LONG, 2))
    expected = everything[:, -kept:] if isinstance(kept, int) else everything[:, kept]
    assert_close(model(input_ids=text(LONG, 2), logits_to_keep=kept).logits, expected, 1e-5)


def gradients(model: Any, tokens: Tensor, *, between: bool = False) -> dict[str, Tensor]:
    """Gradients of a loss on all tokens; with `between` other forwards happen before they are asked for."""
    model.zero_grad()
    loss = no_cache(model, tokens).log_softmax(-1)[..., 7].mean()
    if between:
        no_cache(model, text(20))
        no_cache(model, text(90 if model.config.model_type != "bert" else 60, 3, seed=5))
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def with_checkpointing(model: Any) -> Any:
    """The model, whose layers now run again in backward."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    return model


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal gradients, and not for want of any."""
    assert expected.keys() == found.keys()
    assert any(bool(each.any()) for each in expected.values())
    assert [name for name in expected if not torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)] == []


@pytest.mark.parametrize("between", [False, True], ids=["at_once", "after_others"])
@pytest.mark.parametrize(
    ("row", "adapter"),
    [*(("llama", each) for each in IN_TRAINING), ("gpt_neox", "whole"), ("gemma3", "whole"), ("bert", "whole")],
)
def test_gradients_are_those_without_checkpointing(row: str, adapter: str, between: bool) -> None:
    """A layer that runs again in backward sees the text of its own forward, also after a later one."""
    torch.manual_seed(0)
    model = gated(CASES[row], adapter).train()
    expected = gradients(model, text(LONG, 2))
    runs = []
    layer = next(
        module for name, module in model.named_modules() if name.endswith(("q_proj", "query_key_value", "query"))
    )
    layer.register_forward_hook(lambda *_: runs.append(1), always_call=True)
    found = gradients(with_checkpointing(model), text(LONG, 2), between=between)
    assert len(runs) == (4 if between else 2)
    assert_same(found, expected)


@pytest.mark.parametrize("adapter", IN_TRAINING)
def test_short_rows_alone_give_gradients_of_zero(adapter: str) -> None:
    found = gradients(gated(CASES["llama"], adapter).train(), text(32, 2))
    assert found
    assert [name for name, each in found.items() if each.any()] == []


def test_gradients_are_those_of_the_tokens_beyond_n() -> None:
    """On rows of an encoder, where the adapter is on or off as a whole, those of the long row without a gate."""
    case = CASES["bert"]
    batch = tables.padded([text(20)[0], text(LONG, seed=1)[0]], "right", 0)
    both, alone = gated(case, "whole").train(), adapted(case, "whole").train()
    both(**batch).logits[1].square().sum().backward()
    alone(input_ids=batch["input_ids"][1:]).logits.square().sum().backward()
    expected = {name: each.grad for name, each in alone.named_parameters() if each.requires_grad}
    found = {name: each.grad for name, each in both.named_parameters() if each.requires_grad}
    scale = max(float(each.abs().max()) for each in expected.values())
    assert [name for name in expected if (found[name] - expected[name]).abs().max() > 1e-5 * scale] == []


def test_nothing_is_kept_after_a_forward_that_failed() -> None:
    model, expected = gated(CASES["llama"]), None
    expected = read(model, text(LONG))

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    handle = model.get_base_model().model.layers[1].self_attn.q_proj.lora_B["default"].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        read(model, text(LONG))
    handle.remove()
    layers = [each for each in model.modules() if hasattr(each, "_disable_adapters")]
    assert not any(each._disable_adapters for each in layers)
    assert torch.equal(read(model, text(LONG)), expected)


@torch.no_grad()
@pytest.mark.parametrize("length", ["short", "long"])
def test_where_all_tokens_are_alike_the_adapter_costs_nothing_or_is_not_masked(length: str) -> None:
    """The low-rank layers do not run for short text, and the base layer never runs twice."""
    model = gated(CASES["llama"])
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    runs = []
    layer.lora_B["default"].register_forward_hook(lambda *_: runs.append("low rank"))
    layer.base_layer.register_forward_hook(lambda *_: runs.append("base"))
    read(model, text(32 if length == "short" else LONG))
    assert runs == (["base"] if length == "short" else ["base", "low rank"])


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": through_pickle,
    "torch_save": through_torch_save,
}


@pytest.mark.parametrize("kind", list(COPIES))
@pytest.mark.parametrize(("row", "adapter"), [("llama", "head"), ("bert", "whole")])
def test_a_copy_has_a_gate_of_its_own(row: str, adapter: str, kind: str) -> None:
    model = gated(CASES[row], adapter)
    expected, plain = read(model, text(LONG, 2)), read(adapted(CASES[row], adapter), text(20))
    other = COPIES[kind](model)
    ungate_adapter(model)
    assert is_gated(other)
    assert torch.equal(read(other, text(LONG, 2)), expected)
    assert torch.equal(read(other, text(20)), read(CASES[row].make(), text(20)))
    assert torch.equal(read(model, text(20)), plain)


@pytest.mark.parametrize("adapter", ["lora", "dora", "whole", "tokens", "ia3"])
def test_short_text_in_half_precision_is_that_of_the_original(adapter: str) -> None:
    case, tokens = CASES["llama"], text(32, 2)
    base = case.make().to(torch.bfloat16)
    model = gate_adapter(adapted(case, adapter, patch_model(copy.deepcopy(base), "yarn", 4, dynamic=True)))
    assert torch.equal(read(model, tokens), read(base, tokens))
    later = gated(case, adapter).to(torch.bfloat16)
    assert torch.equal(read(later, tokens), read(case.patched().to(torch.bfloat16), tokens))


def test_another_adapter_is_gated_by_another_call() -> None:
    model = gated(CASES["llama"])
    model.add_adapter("other", LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False))
    model.set_adapter("other")
    gate_adapter(model.eval())
    assert torch.equal(read(model, text(32)), read(CASES["llama"].make(), text(32)))
    assert not torch.equal(read(model, text(LONG)), read(CASES["llama"].patched(), text(LONG)))


@pytest.mark.filterwarnings("ignore:.*longer than")
def test_the_bars_of_an_evaluation_are_those_of_the_model_as_given() -> None:
    documents = [text(120, seed=seed)[0].tolist() for seed in range(2)]
    settings: dict[str, Any] = {
        "context_lengths": [32, 64],
        "bars": ["none", "truncate", "window"],
        "targets": 16,
        "progress": False,
    }
    case = CASES["llama"]
    found = perplexity(gated(case, "whole"), None, documents, **settings).rows
    expected = perplexity(case.patched(), None, documents, **settings).rows
    bars = ("none", "truncate", "window")
    assert {row["arm"] for row in expected} >= set(bars)
    assert [row for row in found if row["arm"] in bars] == [row for row in expected if row["arm"] in bars]
    own, plain = (
        {row["context_length"]: row["nll"] for row in rows if row["arm"] not in bars} for rows in (found, expected)
    )
    assert own[32] == plain[32]
    assert abs(own[64] - plain[64]) > 1e-3


def of_experts(**config: Any) -> Any:
    """A mixture of experts, which see all tokens in one row, under a gated adapter."""
    model = patch_model(tiny_model("deepseek_v3"), "yarn", 4, dynamic=True, attention_factor=1.0)
    return gate_adapter(get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **config)).eval())


def test_experts_are_gated_by_the_tokens_that_they_see() -> None:
    model = of_experts(
        target_modules=["q_a_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    assert torch.equal(read(model, text(32, 2)), read(tiny_model("deepseek_v3"), text(32, 2)))
    found = in_pieces(model, text(LONG, 2), pieces(LONG, 7), DynamicCache())
    assert_close(found, read(model, text(LONG, 2)), 1e-4)
    experts = [name for name, module in model.named_modules() if type(module).__name__ == "ParamWrapper"]
    assert len(experts) == 2


def test_a_router_that_gives_out_several_things_is_gated_in_each() -> None:
    model = of_experts(target_modules=["q_a_proj"], modules_to_save=["gate"])
    with torch.no_grad():
        model.get_base_model().model.layers[1].mlp.gate.modules_to_save["default"].weight.normal_()
    assert torch.equal(read(model, text(32)), read(tiny_model("deepseek_v3"), text(32)))
    found = in_pieces(model, text(LONG, 2), pieces(LONG, 7), DynamicCache())
    assert_close(found, read(model, text(LONG, 2)), 1e-4)


def test_a_layer_whose_output_has_no_tokens_is_refused_as_it_runs() -> None:
    model = gated(CASES["llama"])
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.forward = lambda *_: {"states": torch.zeros(1)}
    with pytest.raises(PatchError, match="gives out a dict, which has no tokens"):
        read(model, text(LONG))


@torch.no_grad()
def test_rows_with_other_adapters_are_gated_as_well() -> None:
    """PEFT adds in place then, to what the base layer gave."""
    model, tokens = gated(CASES["llama"]), text(LONG, 2)
    found = model(input_ids=tokens, use_cache=False, adapter_names=["default", "__base__"]).logits
    assert_close(found[0], read(model, tokens)[0], 1e-4)
    assert_close(found[1], read(CASES["llama"].patched(), tokens)[1], 1e-4)


@pytest.mark.parametrize("row", ["llama", "bert"])
def test_inference_mode_changes_nothing(row: str) -> None:
    model, tokens = gated(CASES[row]), text(LONG, 2)
    with torch.inference_mode():
        found = read(model, tokens)
    with torch.no_grad():
        assert torch.equal(found, read(model, tokens))


def test_alibi_counts_by_its_own_trained_length() -> None:
    assert CASES["bloom"].trained_length == alibi_models.N
    assert set(ADAPTERS) >= set(IN_TRAINING)
