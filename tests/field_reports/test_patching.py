"""One test for each public report on patching that is not covered by an invariant; numbered as the reports are."""

import inspect
import json
import time
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_posext
from hf_posext import mechanisms
from tests.architectures import tiny_inputs, tiny_model


def logits(model, **inputs):
    with torch.no_grad():
        return model(**inputs).logits


def site_of(model):
    return mechanisms.find_sites(model)[0]


class DtypeRecorder(TorchDispatchMode):
    """Collects the dtypes of all tensors made while it is active."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        self.seen |= {tensor.dtype for tensor in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(tensor)}
        return result


def test_report_001_editing_the_config_alone_is_no_patch():
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert hf_posext.inspect_model(model).record is None


@pytest.mark.parametrize("factor", [1.5, 2, 3, 8])
@pytest.mark.parametrize("method", ["pi", "ntk"])
def test_report_016_the_slowest_channel_is_stretched_by_the_factor_given(method, factor):
    model = tiny_model("llama")
    before = model.model.rotary_emb.inv_freq.double().clone()
    hf_posext.patch_model(model, method, factor)
    assert float(before[-1] / model.model.rotary_emb.inv_freq.double()[-1]) == pytest.approx(factor, rel=1e-6)


def test_report_017_stale_rotary_keys_in_a_state_dict_change_nothing():
    model = hf_posext.patch_model(tiny_model("llama"), "pi", 2)
    before = model.model.rotary_emb.inv_freq.clone()
    stale = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "model.rotary_emb.inv_freq": torch.ones(8)}
    model.load_state_dict({**model.state_dict(), **stale}, strict=False)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_report_018_the_rotary_module_keeps_its_signature():
    model = tiny_model("llama")
    before = inspect.signature(model.model.rotary_emb.forward)
    rotary = hf_posext.patch_model(model, "yarn", 2).model.rotary_emb
    states, positions = torch.zeros(1, 4, 64), torch.arange(4)[None]
    assert inspect.signature(rotary.forward) == before
    assert torch.equal(rotary(states, positions)[0], rotary(x=states, position_ids=positions)[0])


@pytest.mark.parametrize("factor", [2, 4])
def test_report_026_the_factor_stays_a_float_in_json(factor):
    model = hf_posext.patch_model(tiny_model("llama"), "pi", factor)
    written = json.loads(model.config.to_json_string())["rope_parameters"]["factor"]
    assert isinstance(written, float)
    assert f'"factor": {factor}.0' in model.config.to_json_string()


def test_report_033_partial_rotation_keeps_its_width():
    model = hf_posext.patch_model(tiny_model("gpt_neox"), "pi", 2)
    torch.testing.assert_close(site_of(model).module.inv_freq, torch.tensor([0.5, 0.005]))


def test_report_034_only_the_global_layers_of_gemma3_are_stretched_on_top_of_their_own_factor():
    model = tiny_model("gemma3_linear")
    rotary = model.model.rotary_emb
    local, unscaled = rotary.sliding_attention_inv_freq.clone(), rotary.full_attention_inv_freq.clone() * 8
    hf_posext.patch_model(model, "pi", 2)
    assert torch.equal(rotary.sliding_attention_inv_freq, local)
    torch.testing.assert_close(rotary.full_attention_inv_freq, unscaled / 16)


def test_report_040_a_hook_of_accelerate_is_still_called():
    from accelerate.hooks import ModelHook, add_hook_to_module

    calls = []

    class Counting(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(type(module).__name__)
            return args, kwargs

    model = tiny_model("llama")
    add_hook_to_module(model.model.rotary_emb, Counting())
    before = logits(model, **tiny_inputs(16))
    hf_posext.patch_model(model, "pi", 2)
    calls.clear()
    assert not torch.equal(logits(model, **tiny_inputs(16)), before)
    assert calls == ["LlamaRotaryEmbedding"]


def test_report_056_keys_that_the_method_does_not_own_survive():
    model = tiny_model("qwen2_vl")
    sections = model.config.text_config.rope_parameters["mrope_section"]
    hf_posext.patch_model(model, "pi", 2)
    assert model.config.text_config.rope_parameters["mrope_section"] == sections


def test_report_065_the_tokenizer_is_raised_and_given_back():
    from hf_posext.demo import load_demo

    model, tokenizer, documents = load_demo("llama")
    hf_posext.patch_model(model, "pi", 2, tokenizer=tokenizer)
    assert tokenizer.model_max_length == 512
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(tokenizer(documents[0][:1200]).input_ids) > 256
    hf_posext.unpatch_model(model)
    assert tokenizer.model_max_length == 256


def test_report_072_the_width_is_that_of_the_module_and_not_of_the_config():
    model = tiny_model("llama")
    rotary = model.model.rotary_emb
    rotary.inv_freq = torch.nn.Buffer(rotary.inv_freq[:4].clone(), persistent=False)
    rotary.original_inv_freq = torch.nn.Buffer(rotary.inv_freq.clone(), persistent=False)
    assert mechanisms.read(site_of(model), 32).rotated_width == 8


def test_report_074_the_table_of_gptj_grows_and_row_2p_is_the_old_row_p():
    model = tiny_model("gptj")
    old = site_of(model).module.embed_positions.clone()
    hf_posext.patch_model(model, "pi", 2)
    new = site_of(model).module.embed_positions
    assert new.shape[0] == 2 * old.shape[0]
    torch.testing.assert_close(new[::2], old, atol=1e-6, rtol=0)
    assert torch.isfinite(logits(model, input_ids=torch.ones(1, 64, dtype=torch.long))).all()


def test_report_085_attention_of_a_token_to_itself_carries_the_temperature_once():
    model = hf_posext.patch_model(tiny_model("llama"), "yarn", 4)
    cosine, sine = model.model.rotary_emb(torch.zeros(1, 1, 64), torch.tensor([[17]]))
    norm = (cosine**2 + sine**2).double()
    torch.testing.assert_close(
        norm, torch.full_like(norm, (0.1 * torch.tensor(4.0).log().item() + 1) ** 2), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_report_087_cos_and_sin_come_in_the_dtype_of_the_model(attention):
    model = hf_posext.patch_model(tiny_model("llama").to(torch.bfloat16), "yarn", 2)
    model.set_attn_implementation(attention)
    rotary = model.model.rotary_emb(torch.zeros(1, 4, 64, dtype=torch.bfloat16), torch.arange(4)[None])
    assert {tensor.dtype for tensor in rotary} == {torch.bfloat16}
    assert logits(model, **tiny_inputs(16)).dtype == torch.bfloat16


def test_report_093_channels_that_do_not_turn_stay_still_and_the_others_are_halved():
    model = tiny_model("llama")
    rotary = model.model.rotary_emb
    rotary.inv_freq[4:] = 0
    before = rotary.inv_freq.clone()
    hf_posext.patch_model(model, "pi", 2)
    assert torch.equal(rotary.inv_freq, before / 2)


def test_report_098_a_sliding_window_is_patched_and_named_as_the_reach():
    model = hf_posext.patch_model(tiny_model("mistral_sliding"), "pi", 2)
    assert any("sliding window" in note for note in hf_posext.inspect_model(model).notes)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox", "gptj", "modernbert", "qwen2_vl"])
def test_report_107_every_length_field_is_raised(name):
    model = hf_posext.patch_model(tiny_model(name), "pi", 3)
    text = model.config.get_text_config()
    fields = [key for key in ("max_position_embeddings", "n_positions") if isinstance(getattr(text, key, None), int)]
    assert fields
    assert {getattr(text, key) for key in fields} == {96}


def test_report_112_a_huge_factor_costs_neither_time_nor_memory():
    model = tiny_model("llama")
    size = sum(buffer.nbytes for buffer in model.buffers())
    start = time.perf_counter()
    hf_posext.patch_model(model, "pi", 1e5)
    assert time.perf_counter() - start < 5
    assert sum(buffer.nbytes for buffer in model.buffers()) == size


def test_report_115_no_float64_is_made_in_forward():
    model = hf_posext.patch_model(tiny_model("llama"), "yarn", 2)
    with DtypeRecorder() as recorder:
        logits(model, **tiny_inputs(16))
    assert torch.float32 in recorder.seen
    assert torch.float64 not in recorder.seen


@pytest.mark.parametrize("name", ["llama", "gemma3", "gptj"])
def test_report_118_forwards_add_no_buffers(name):
    model = hf_posext.patch_model(tiny_model(name), "yarn", 2)
    before = {key: tuple(value.shape) for key, value in model.named_buffers()}
    logits(model, **tiny_inputs(64))
    assert {key: tuple(value.shape) for key, value in model.named_buffers()} == before


def test_report_123_the_rotary_module_leaves_its_inputs_alone():
    model = hf_posext.patch_model(tiny_model("llama"), "yarn", 2)
    states, positions = torch.randn(1, 4, 64), torch.arange(4)[None]
    kept = states.clone(), positions.clone()
    model.model.rotary_emb(states, positions)
    assert torch.equal(states, kept[0])
    assert torch.equal(positions, kept[1])
