"""A temperature reaches the whole logit, or the patch is refused with the ways out."""

from typing import Any

import pytest
import torch

from hf_posext import PatchError, patch_model
from tests.architectures import tiny_model
from tests.methods import ramp
from tests.snapshots import differences, logits_of, snapshot

MLA = ("deepseek_v3", "deepseek_v3_yarn")


@pytest.mark.parametrize("architecture", MLA)
def test_a_temperature_that_would_miss_most_of_the_logit_is_refused_by_name(architecture: str) -> None:
    model = tiny_model(architecture)
    before = snapshot(model)
    message = r'`yarn` scales cos and sin by 1\.\d+, .*DeepseekV3.*temperature="logits".*attention_factor=1\.0'
    with pytest.raises(PatchError, match=message):
        patch_model(model, "yarn", 2)
    assert differences(before, snapshot(model)) == []


@pytest.mark.parametrize("architecture", MLA)
def test_the_message_offers_only_options_that_the_method_has(architecture: str) -> None:
    model = tiny_model(architecture)
    with pytest.raises(PatchError, match=r"attention_factor=1\.0") as error:
        patch_model(model, "longrope", 2, long_factor=ramp(8))
    assert "temperature=" not in str(error.value)


@pytest.mark.parametrize("architecture", MLA)
@pytest.mark.parametrize("options", [{"attention_factor": 1.0}, {"temperature": "logits"}])
def test_both_ways_out_of_that_refusal_work(architecture: str, options: dict[str, Any]) -> None:
    model = tiny_model(architecture)
    before = logits_of(model)
    patch_model(model, "yarn", 2, **options)
    assert (logits_of(model) - before).abs().max() > 1e-3


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "gemma3", "deepseek_v3", "qwen2_vl"])
def test_temperature_on_the_logits_multiplies_the_softmax_scaling_by_the_square(architecture: str) -> None:
    """YaRN eq. 21 and 22: 1/t = (0.1 ln s + 1)^2 multiplies q k / sqrt(d) as a whole, over ntk_by_parts."""
    model, plain = tiny_model(architecture), tiny_model(architecture)
    patch_model(model, "yarn", 4, temperature="logits")
    patch_model(plain, "ntk_by_parts", 4)
    square = float((0.1 * torch.tensor(4.0, dtype=torch.float64).log() + 1) ** 2)
    served = 0
    for module in plain.modules():
        kinds = getattr(getattr(module, "config", None), "layer_types", None)
        if type(module).__name__.endswith("Attention") and hasattr(module, "layer_idx"):
            if architecture == "gemma3" and kinds[module.layer_idx] != "full_attention":
                continue
            module.scaling *= square
            served += 1
    assert served
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=1e-5, atol=1e-5)


def test_temperature_on_the_logits_equals_cos_and_sin_where_every_channel_rotates() -> None:
    logits = logits_of(patch_model(tiny_model("llama"), "yarn", 4, temperature="logits"))
    torch.testing.assert_close(logits, logits_of(patch_model(tiny_model("llama"), "yarn", 4)), rtol=1e-4, atol=1e-4)


def test_temperature_on_the_logits_differs_where_few_channels_rotate() -> None:
    logits = logits_of(patch_model(tiny_model("gpt_neox"), "yarn", 4, temperature="logits"))
    assert (logits - logits_of(patch_model(tiny_model("gpt_neox"), "yarn", 4))).abs().max() > 1e-2
